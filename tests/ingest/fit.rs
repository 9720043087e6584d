//! Batches that do not match the pool, and batches with lost removals.

use pointsman::internals::wire::{Findings, StoreMismatch};

use super::*;

fn only(finding: Finding) -> Findings {
    let mut findings = Findings::default();
    findings.add(finding);
    findings
}

#[test]
fn incompatible_batches_are_a_mismatch_until_a_valid_one() {
    let none = Report { events: 2, findings: only(Finding::UnknownEvent), ..Report::default() };
    let some = Report { usable: 1, stored_blocks: 3, ..none };
    let other_size = Some(StoreMismatch::BlockSize(16));
    let mut bench = Bench::live(SourceConfig::default(), 5);
    bench.applied(none);
    bench.applied(none);
    bench.applied(Report::default());
    assert_eq!(bench.source.state(), StreamState::Live, "a batch without events changes no state");
    assert_eq!(short(&bench.applied(none)), ["mismatched"]);
    let undecodable = DegradationReason::Undecodable { batches: 3, finding: Some(Finding::UnknownEvent) };
    assert_eq!(bench.source.degradation(), Some(undecodable));
    assert_eq!(short(&bench.applied(some)), ["live"]);

    let config = SourceConfig { block_size: Some(64), ..SourceConfig::default() };
    let mut bench = Bench::live(config, 5);
    assert_eq!(short(&bench.applied(Report { mismatch: other_size, ..none })), ["mismatched"]);
    assert_eq!(bench.source.degradation(), Some(DegradationReason::BlockSize { engine: 16, pool: Some(64) }));
    let removals = Report { events: 2, usable: 2, ..Report::default() };
    assert_eq!(short(&bench.applied(removals)), [""; 0], "removals fit any block size");
    assert_eq!(short(&bench.applied(Report { mismatch: other_size, ..removals })), [""; 0]);
    assert_eq!(short(&bench.applied(some)), ["live"]);
    let foreign = Report { foreign_rank: Some(3), ..none };
    let used = Report { stored_blocks: 3, usable: 1, ..foreign };
    assert_eq!(short(&bench.applied(used)), [""; 0], "part of the batch was usable");
    let mut bench = Bench::live(config, 5);
    assert_eq!(short(&bench.applied(foreign)), ["mismatched"]);
    assert_eq!(bench.source.degradation(), Some(DegradationReason::ForeignRank { found: 3 }));
    let mut bench = Bench::live(config, 5);
    let pairs = Report { mismatch: Some(StoreMismatch::Eagle), ..none };
    assert_eq!(short(&bench.applied(pairs)), ["mismatched"]);
    assert_eq!(bench.source.degradation(), Some(DegradationReason::Eagle));
}

#[test]
fn a_lost_removal_makes_a_rank_cold() {
    let mut bench = Bench::live(SourceConfig::default(), 5);
    let lost = Report { events: 1, lost_removals: Some(Finding::TooLarge), ..Report::default() };
    bench.applied(lost);
    assert_eq!(bench.source.state(), StreamState::Live, "the rank has no blocks");
    bench.applied(Report { events: 1, usable: 1, stored_blocks: 3, ..Report::default() });
    assert_eq!(short(&bench.applied(lost)), ["cold"]);
    assert_eq!(bench.source.degradation(), Some(DegradationReason::LostRemoval { finding: Finding::TooLarge }));
    let cleared = Report { events: 1, usable: 1, cleared: true, ..Report::default() };
    assert_eq!(short(&bench.applied(cleared)), ["live"]);
}

#[test]
fn a_stream_that_fits_is_mismatched_after_several_batches_of_unusable_stores_only() {
    let config = SourceConfig { block_size: Some(64), ..SourceConfig::default() };
    let none = Report { events: 2, findings: only(Finding::UnknownEvent), ..Report::default() };
    let some = Report { usable: 1, stored_blocks: 3, ..none };
    let with = |mismatch| Report { mismatch: Some(mismatch), findings: only(Finding::BadToken), ..none };
    let partial = with(StoreMismatch::BlockSize(16));
    let mut bench = Bench::live(config, 5);
    bench.applied(some);
    for _ in 0..10 {
        for harmless in [none, partial, Report { usable: 1, ..none }] {
            assert_eq!(short(&bench.applied(harmless)), [""; 0], "{harmless:?}");
        }
    }
    let foreign = Report { foreign_rank: Some(3), ..none };
    let invalid = StoreMismatch::Invalid(Finding::BadToken);
    let undecodable = DegradationReason::Undecodable { batches: 3, finding: Some(Finding::BadToken) };
    for (unusable, reason) in [
        (with(StoreMismatch::BlockSize(128)), DegradationReason::BlockSize { engine: 128, pool: Some(64) }),
        (with(StoreMismatch::Eagle), DegradationReason::Eagle),
        (with(invalid), undecodable),
        (foreign, DegradationReason::ForeignRank { found: 3 }),
    ] {
        bench.applied(unusable);
        bench.applied(unusable);
        bench.applied(some);
        bench.applied(unusable);
        bench.applied(none);
        bench.applied(unusable);
        assert_eq!(bench.source.state(), StreamState::Live, "{unusable:?}");
        assert_eq!(short(&bench.applied(unusable)), ["mismatched"], "{unusable:?}");
        assert_eq!(bench.source.degradation(), Some(reason));
        assert_eq!(bench.source.block_size(), Some(64), "the blocks that fitted have shown it");
        bench.applied(none);
        assert_eq!(short(&bench.applied(some)), ["live"]);
    }
}
