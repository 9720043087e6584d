//! Allocations of the event source for an in-sequence message.

use std::time::Duration;

use pointsman::protocol::Timestamp;
use pointsman::{
    StreamState,
    internals::ingest::{IngestEffect, IngestInput, Source, SourceConfig},
    internals::wire::Report,
};
use stats_alloc::Region;

use crate::ALLOCATOR;

const ROUNDS: u64 = 8;
const MESSAGES: u64 = 4_096;

#[test]
fn an_in_order_message_allocates_nothing() {
    alone!();
    let batch = Report { events: 1, usable: 1, stored_blocks: 4, ..Report::default() };
    let mut now = Timestamp::default();
    let mut source = Source::new(SourceConfig::default(), now);
    let mut effects = Vec::with_capacity(8);
    source.step(IngestInput::Connected, now, &mut effects);
    source.step(IngestInput::ReplayEnded, now, &mut effects);
    let mut least = usize::MAX;
    for round in 0..ROUNDS {
        let region = Region::new(ALLOCATOR);
        for sequence in round * MESSAGES..(round + 1) * MESSAGES {
            now = now + Duration::from_micros(50);
            effects.clear();
            source.step(IngestInput::Live { sequence, payload: b"a batch" }, now, &mut effects);
            assert!(matches!(effects[..], [IngestEffect::Apply { .. }]));
            source.step(IngestInput::Applied(batch), now, &mut effects);
        }
        // The minimum over the rounds, because the test harness has its own thread.
        let change = region.change();
        least = least.min(change.allocations + change.reallocations);
    }
    assert_eq!((least, source.state()), (0, StreamState::Live));
}
