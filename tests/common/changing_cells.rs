//! Shared cells of ranks whose loads, speeds and caches change at random.

use std::time::Duration;

use pointsman::EngineReading;
use pointsman::internals::engine_load::EngineLoad;
use pointsman::internals::load::{ActiveSequences, BoardLoad, EngineSpeed, PrefillLoadHint, PromptBlocks};
use pointsman::internals::protocol::BookingId;
use pointsman::internals::schedule::RankCells;
use pointsman::protocol::Timestamp;
use pointsman::test_support::mix;

/// Boards of a rank with 0 to 7 requests and their prefills.
pub(crate) fn boards(prompt: fn(u64) -> PromptBlocks) -> Vec<BoardLoad> {
    let mut active = ActiveSequences::new(true);
    (0..8)
        .map(|n| {
            let load = BoardLoad::of(&active, 0, n, Timestamp(1));
            let hint = PrefillLoadHint::new(800, 100, true, Some(Duration::from_millis(40)));
            active.book(BookingId(u64::from(n)), prompt(u64::from(n)), hint, Timestamp(1)).expect("booked once");
            load
        })
        .collect()
}

/// A random number per rank for state `n`.
pub(crate) fn values(n: u64) -> impl Iterator<Item = u64> {
    (0u64..).map(move |rank| mix(n << 8 | rank))
}

/// Publishes state `n` of every cell, except the speed if it is to age.
pub(crate) fn publish(cells: &[RankCells], boards: &[BoardLoad], n: u64, at: Timestamp, speed_ages: bool) {
    for (cells, value) in cells.iter().zip(values(n)) {
        let load = boards[(value % 8) as usize];
        let incarnation = u32::from(value.is_multiple_of(97));
        cells.board.publish(&BoardLoad { incarnation, applied: (value >> 8) as u32 % 64, ..load });
        if !speed_ages {
            let rate = 5e3 + (value % 1_000) as f64 * 30.0;
            cells.speed.publish(&EngineSpeed { work_tokens_per_second: rate, ..EngineSpeed::prior(16) }, at);
        }
        cells.speed.publish_output((value % 500) as f64);
        cells.holdings.publish((value % 9_000) as usize, at);
        let reading = EngineReading { waiting: Some((value % 12) as u32), ..EngineReading::default() };
        cells.engine_load.publish(&EngineLoad { reading, at });
    }
}
