//! Recorded decisions, replayed.

use std::sync::Arc;
use std::time::Duration;

use pointsman::internals::config::SlowStartConfig;
use pointsman::internals::health::Exclusions;
use pointsman::internals::load::PromptBlocks;
use pointsman::internals::protocol::{Generation, Slot};
use pointsman::internals::schedule::{Input, Request, ResolvedOptions, ResolvedTargets, Target};
use pointsman::internals::select::{RankOverlap, TierOverlap};
use pointsman::protocol::Timestamp;
use pointsman::{Constraints, RecordedChoice, Replay, RouterConfig};

use crate::recorded::{Recorded, configs, prompt, rank, replayed, settings};
use crate::repetitions::repetitions;

/// Decisions per configuration. A larger number for a longer run.
fn decisions() -> u64 {
    repetitions("RECORDED_DECISIONS", 300)
}

#[test]
fn recorded_decisions_replay_bit_for_bit() {
    for (seed, config) in configs().iter().enumerate() {
        let mut recorded = Recorded::new(config);
        recorded.run(decisions(), seed as u64);
        let name = format!("configuration {seed}, {}", config.policy.name());
        assert!(recorded.booked > decisions() / 3, "{name}: {} bookings", recorded.booked);
        let found = replayed(&recorded.segments, || Replay::verifying(settings));
        let different: Vec<_> = found.iter().filter(|decision| !decision.is_equal).collect();
        assert!(
            different.is_empty(),
            "{name}: {} of {} differ, first {:?}",
            different.len(),
            found.len(),
            different[0]
        );
        let booked =
            found.iter().filter(|decision| decision.books && matches!(decision.recorded, RecordedChoice::Rank { .. }));
        assert_eq!(booked.count() as u64, recorded.booked, "{name}: every booking is recorded");
    }
}

/// A request for one of the ranks in the slots 0 and 1.
fn request(n: u64) -> Input<u64> {
    let constraints =
        Constraints { allowed_workers: Some([rank(0).worker].into_iter().collect()), ..Constraints::default() };
    let options = ResolvedOptions { constraints, ..ResolvedOptions::default() };
    Input::Request(Request { options: Some(Box::new(options)), ..Request::new(n, PromptBlocks::Counted(10), 160) })
}

/// The statuses of ranks are recorded with the refresh that ends the slow return of a rank. The replay ends it, too.
#[test]
fn a_slow_return_ends_alike_if_statuses_are_recorded_with_its_end() {
    let slow_start = SlowStartConfig { fill: 0.5, max_ms: 1, return_ms: 10_000 };
    let config = RouterConfig { block_size: Some(16), slow_start, ..RouterConfig::default() };
    let mut recorded = Recorded::new(&config);
    let at = |seconds| Timestamp(0) + Duration::from_secs(seconds);
    let ejected = Exclusions { ejected: [rank(0)].into_iter().collect(), ..Exclusions::default() };
    recorded.step(Input::Exclusions(Arc::new(ejected)), at(0));
    recorded.step(Input::Exclusions(Arc::default()), at(0));
    recorded.step(request(0), at(1));
    recorded.step(Input::Undrain { slot: Slot(1), generation: Generation(1) }, at(11));
    recorded.step(request(1), at(11));
    let found = replayed(&recorded.segments, || Replay::verifying(settings));
    let ranks = found.iter().map(|decision| match &decision.recorded {
        RecordedChoice::Rank { rank, .. } => *rank,
        other => panic!("no rank: {other:?}"),
    });
    assert_eq!(ranks.collect::<Vec<_>>(), [rank(1), rank(0)], "the return is over before the second request");
    assert!(found.iter().all(|decision| decision.is_equal), "{:?}", found[1]);
}

/// The index may know a rank before the scheduler does. Its overlap counts if the rank joins before the decision.
#[test]
fn an_overlap_is_replayed_on_a_rank_that_joins_during_the_query() {
    let config = RouterConfig { block_size: Some(16), ..RouterConfig::default() };
    let (mut recorded, now) = (Recorded::new(&config), Timestamp(0) + Duration::from_secs(1));
    let (slot, generation, blocks) = (Slot(0), Generation(1), prompt(0).block_count());
    recorded.step(Input::Retire { slot, generation }, now);
    let target = Target::Exactly { rank: rank(5), cached_tokens: None, expected_duration: None };
    recorded.step(Input::Request(Request { target, ..Request::new(0, prompt(0), blocks * 16) }), now);
    let ttft = Some(Duration::from_secs(100));
    let targets = Some(ResolvedTargets { ttft, ttft_due: None, itl: None, rejects: false });
    let options = Some(Box::new(ResolvedOptions { targets, ..ResolvedOptions::default() })); // queries unknown loads
    let overlap = TierOverlap { device_blocks: blocks, ..TierOverlap::default() };
    let overlaps = vec![RankOverlap { slot, generation, overlap }];
    recorded.step(Input::Request(Request { overlaps, options, ..Request::new(1, prompt(0), blocks * 16) }), now);
    recorded.admit(0, now);
    recorded.answer(1, now);
    let found = replayed(&recorded.segments, || Replay::verifying(settings));
    let RecordedChoice::Rank { rank: chosen, cached_tokens, .. } = found[1].recorded else { panic!("{:?}", found[1]) };
    assert_eq!(
        (found.len(), chosen, cached_tokens),
        (2, rank(0), (blocks - 1) * 16),
        "the overlap of the new rank counts"
    );
    assert!(found.iter().all(|decision| decision.is_equal), "{:?}", found[1]);
}
