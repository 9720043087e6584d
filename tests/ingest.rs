//! Rules of the event source, one example each.

mod fit;

use std::time::Duration;

use pointsman::protocol::Timestamp;
use pointsman::{
    StreamState,
    internals::ingest::{DegradationReason, IngestEffect, IngestInput, Note, Source, SourceConfig},
    internals::wire::{Finding, Report},
};

type Payload = Vec<u8>;

/// Content of message `sequence` of one life of a publisher.
fn payload(life: u8, sequence: u64) -> Payload {
    let mut bytes = vec![life];
    bytes.extend(sequence.to_le_bytes());
    bytes
}

/// A source with a simulated clock.
struct Bench {
    source: Source<Payload>,
    now: Timestamp,
}

impl Bench {
    fn new(config: SourceConfig) -> Self {
        Self { source: Source::new(config, Timestamp::default()), now: Timestamp::default() }
    }

    /// A live source, connected and replayed with messages `0..count` of life 1.
    fn live(config: SourceConfig, count: u64) -> Self {
        let mut bench = Self::new(config);
        bench.step(IngestInput::Connected);
        for sequence in 0..count {
            let _ = if config.has_replay { bench.replayed(1, sequence) } else { bench.live_from(1, sequence) };
        }
        bench.step(IngestInput::ReplayEnded);
        assert_eq!(bench.source.state(), StreamState::Live);
        bench
    }

    fn step(&mut self, input: IngestInput<Payload>) -> Vec<IngestEffect<Payload>> {
        let mut effects = Vec::new();
        self.source.step(input, self.now, &mut effects);
        self.source.check_invariants();
        effects
    }

    fn live_from(&mut self, life: u8, sequence: u64) -> Vec<IngestEffect<Payload>> {
        self.step(IngestInput::Live { sequence, payload: payload(life, sequence) })
    }

    fn replayed(&mut self, life: u8, sequence: u64) -> Vec<IngestEffect<Payload>> {
        self.step(IngestInput::Replayed { sequence, payload: payload(life, sequence) })
    }

    fn applied(&mut self, applied: Report) -> Vec<IngestEffect<Payload>> {
        self.step(IngestInput::Applied(applied))
    }

    /// Advances the clock through each tick that is due within `by`, and to the end of that time.
    fn pass(&mut self, by: Duration) -> Vec<IngestEffect<Payload>> {
        let (end, mut effects) = (self.now + by, Vec::new());
        while let Some(at) = self.source.next_tick().filter(|at| *at <= end) {
            self.now = self.now.max(at);
            effects.extend(self.step(IngestInput::Tick));
        }
        self.now = end;
        effects.extend(self.step(IngestInput::Tick));
        effects
    }
}

fn no_replay() -> SourceConfig {
    SourceConfig { has_replay: false, ..SourceConfig::default() }
}

fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

/// Short form of the effects, without notes: `a3` applies message 3, `clear`, `replay 2`, `live`.
fn short(effects: &[IngestEffect<Payload>]) -> Vec<String> {
    let told = effects.iter().filter_map(|effect| match effect {
        IngestEffect::Apply { sequence, .. } => Some(format!("a{sequence}")),
        IngestEffect::Clear => Some("clear".to_owned()),
        IngestEffect::Replay { from } => Some(format!("replay {from}")),
        IngestEffect::Reconnect => Some("reconnect".to_owned()),
        IngestEffect::State(trust) => Some(trust.name().to_owned()),
        IngestEffect::Noted(_) => None,
    });
    told.collect()
}

fn notes(effects: &[IngestEffect<Payload>]) -> Vec<(&'static str, u64)> {
    let noted = effects.iter().filter_map(|effect| match effect {
        IngestEffect::Noted(note) => Some((note.name(), note.count())),
        IngestEffect::Apply { .. }
        | IngestEffect::Clear
        | IngestEffect::Replay { .. }
        | IngestEffect::Reconnect
        | IngestEffect::State(_) => None,
    });
    noted.collect()
}

#[test]
fn without_a_replay_endpoint_a_reconnection_drops_the_index() {
    let mut bench = Bench::live(no_replay(), 3);
    bench.step(IngestInput::Disconnected);
    // The engine has restarted, and its third message is the first one received.
    assert_eq!(short(&bench.step(IngestInput::Connected)), ["clear", "cold"]);
    assert_eq!(bench.source.degradation(), Some(DegradationReason::NoReplay { from: 3 }));
    assert_eq!(short(&bench.live_from(2, 3)), ["a3"]);
    assert_eq!(bench.source.state(), StreamState::Cold);
    // A publisher read from its first message on is known completely.
    bench.step(IngestInput::Disconnected);
    assert_eq!(short(&bench.step(IngestInput::Connected)), ["clear"]);
    assert_eq!(short(&bench.live_from(3, 0)), ["a0", "live"]);
    // A source without applied messages has nothing to drop.
    let mut bench = Bench::new(no_replay());
    for _ in 0..2 {
        assert_eq!(short(&bench.step(IngestInput::Connected)), Vec::<String>::new());
        bench.step(IngestInput::Disconnected);
    }
}

#[test]
fn the_first_connection_requests_a_full_replay_and_holds_live_messages() {
    let mut bench = Bench::new(SourceConfig::default());
    assert_eq!(short(&bench.step(IngestInput::Connected)), ["replay 0"]);
    assert_eq!(short(&bench.live_from(1, 3)), [""; 0]);
    assert_eq!(short(&bench.live_from(1, 2)), [""; 0]);
    assert_eq!(bench.source.held_messages(), 2);
    assert_eq!(short(&bench.replayed(1, 0)), ["a0"]);
    assert_eq!(short(&bench.replayed(1, 1)), ["a1", "a2", "a3"]);
    assert_eq!(notes(&bench.replayed(1, 2)), [("duplicate", 1)]);
    assert_eq!(short(&bench.step(IngestInput::ReplayEnded)), ["live"]);
    assert_eq!(short(&bench.live_from(1, 4)), ["a4"]);
}

#[test]
fn different_bytes_for_a_known_number_mean_a_new_publisher() {
    let mut bench = Bench::live(SourceConfig::default(), 5);
    let effects = bench.live_from(2, 1);
    assert_eq!(short(&effects), ["clear", "replay 0", "recovering"]);
    assert_eq!(notes(&effects), [("incarnation", 1)]);
    assert_eq!(bench.source.held_messages(), 1);
    assert_eq!(short(&bench.replayed(2, 0)), ["a0", "a1"]);
    assert_eq!(short(&bench.step(IngestInput::ReplayEnded)), ["live"]);
}

#[test]
fn live_messages_that_a_replay_has_overtaken_are_late_not_new() {
    let config = SourceConfig { remembered_max: 3, ..SourceConfig::default() };
    let mut bench = Bench::live(config, 50);
    for sequence in 10..47 {
        assert_eq!(notes(&bench.live_from(1, sequence)), [("late", 1)], "message {sequence}");
    }
    assert_eq!(short(&bench.live_from(1, 50)), ["a50"]);
}

#[test]
fn a_gap_is_requested_with_one_overlapping_message() {
    let mut bench = Bench::live(SourceConfig::default(), 5);
    let effects = bench.live_from(1, 7);
    assert_eq!(short(&effects), ["replay 4", "recovering"]);
    assert_eq!(notes(&effects), [("gap", 1)]);
    assert_eq!(notes(&bench.replayed(1, 4)), [("verified", 1)]);
    assert_eq!(short(&bench.replayed(1, 5)), ["a5"]);
    assert_eq!(short(&bench.replayed(1, 6)), ["a6", "a7", "live"]);
    assert_eq!(notes(&bench.replayed(1, 7)), [("late", 1)]);
}

#[test]
fn a_failed_replay_is_retried_once() {
    let mut bench = Bench::live(SourceConfig::default(), 5);
    for sequence in [7, 9, 10] {
        bench.live_from(1, sequence);
    }
    assert_eq!(short(&bench.step(IngestInput::ReplayFailed)), [""; 0]);
    assert_eq!(short(&bench.pass(secs(1))), ["replay 4"]);
    let effects = bench.step(IngestInput::ReplayFailed);
    assert_eq!(short(&effects), ["clear", "a9", "a10", "cold"], "after the last gap");
    assert_eq!(notes(&effects), [("replay_failed", 1), ("dropped", 1), ("lost", 4), ("cold", 1)]);
    assert_eq!(bench.source.degradation(), Some(DegradationReason::ReplayFailed { from: 5 }));
    assert_eq!(short(&bench.live_from(1, 11)), ["a11"]);
}

/// Cause: two failures ended a replay, although each had delivered a part of it.
#[test]
fn a_replay_in_parts_goes_on_while_each_part_makes_progress() {
    let mut bench = Bench::live(SourceConfig::default(), 5);
    bench.live_from(1, 30);
    for part in 0..8 {
        for sequence in 4 + 3 * part..8 + 3 * part {
            bench.replayed(1, sequence);
        }
        assert_eq!(short(&bench.step(IngestInput::ReplayFailed)), [""; 0]);
        assert_eq!(short(&bench.pass(secs(2))), [format!("replay {}", 7 + 3 * part)]);
    }
    assert!(bench.source.degradation().is_none());
}

#[test]
fn a_replay_without_progress_times_out_twice() {
    let mut bench = Bench::live(SourceConfig::default(), 5);
    bench.live_from(1, 7);
    bench.pass(secs(4));
    assert_eq!(notes(&bench.replayed(1, 4)), [("verified", 1)], "which is progress");
    assert_eq!(short(&bench.pass(secs(4))), [""; 0]);
    assert_eq!(short(&bench.pass(secs(2))), ["replay 4"]);
    assert_eq!(short(&bench.pass(secs(5))), ["clear", "a7", "cold"]);
}

#[test]
fn a_replay_with_a_gap_is_requested_again_from_the_gap() {
    let mut bench = Bench::live(SourceConfig::default(), 5);
    bench.live_from(1, 9);
    for sequence in [4, 5, 7, 8] {
        bench.replayed(1, sequence);
    }
    assert_eq!(short(&bench.step(IngestInput::ReplayEnded)), ["replay 5"]);
    bench.replayed(1, 5);
    assert_eq!(short(&bench.step(IngestInput::ReplayEnded)), [""; 0]);
    assert_eq!(short(&bench.pass(secs(1))), ["replay 5"]);
    bench.replayed(1, 5);
    assert_eq!(short(&bench.step(IngestInput::ReplayEnded)), ["clear", "a7", "a8", "a9", "cold"]);
    assert_eq!(bench.source.degradation(), Some(DegradationReason::ReplayHole { from: 6 }));
}

#[test]
fn clears_turnover_and_time_heal_a_cold_rank() {
    let config = SourceConfig { capacity_blocks: Some(100), ..no_replay() };
    let cold = || {
        let mut bench = Bench::live(config, 5);
        for _ in 0..5 {
            bench.applied(Report { events: 1, usable: 1, stored_blocks: 1, ..Report::default() });
        }
        bench.live_from(1, 9);
        assert_eq!(bench.source.state(), StreamState::Cold);
        bench
    };
    let stored = |stored_blocks| Report { events: 1, usable: 1, stored_blocks, ..Report::default() };

    let mut bench = cold();
    let effects = bench.applied(Report { cleared: true, ..stored(0) });
    assert_eq!((short(&effects), notes(&effects)), (vec!["live".to_owned()], vec![("healed", 1)]));

    let mut bench = cold();
    assert_eq!(short(&bench.applied(stored(60))), [""; 0]);
    bench.live_from(1, 10);
    assert_eq!(short(&bench.applied(stored(40))), ["live"]);

    let mut bench = cold();
    assert_eq!(short(&bench.pass(secs(599))), [""; 0]);
    assert_eq!(short(&bench.pass(secs(1))), ["live"]);
}

#[test]
fn a_clear_from_before_the_loss_does_not_heal() {
    let mut bench = Bench::live(no_replay(), 1);
    bench.live_from(1, 5);
    let cleared = Report { events: 1, usable: 1, cleared: true, ..Report::default() };
    assert_eq!(short(&bench.applied(cleared)), [""; 0], "the replay starts at message 0");
    assert_eq!(short(&bench.applied(cleared)), ["live"]);
}

#[test]
fn missing_last_messages_are_requested_in_idle_periods() {
    let mut bench = Bench::live(SourceConfig::default(), 3);
    assert_eq!(short(&bench.pass(Duration::from_millis(1_999))), [""; 0]);
    assert_eq!(short(&bench.pass(Duration::from_millis(1))), ["replay 2"], "the stream is not degraded");
    bench.replayed(1, 2);
    assert_eq!(short(&bench.replayed(1, 3)), ["a3"]);
    assert_eq!(short(&bench.live_from(1, 5)), ["recovering"], "a gap like any other");
    assert_eq!(short(&bench.replayed(1, 4)), ["a4", "a5", "live"]);

    // A late tick means that the source itself was delayed. It reads pending messages first.
    bench.now = bench.now + secs(5);
    assert_eq!(short(&bench.step(IngestInput::Tick)), [""; 0]);

    // It requests once, and again after new messages.
    for asked in ["replay 5", "replay 6"] {
        assert_eq!(short(&bench.pass(secs(2))), [asked]);
        bench.replayed(1, if asked == "replay 5" { 5 } else { 6 });
        if asked == "replay 5" {
            bench.replayed(1, 6);
        }
        bench.step(IngestInput::ReplayEnded);
    }
    // It repeats the check periodically, because a broken connection without a reset looks identical.
    assert_eq!(short(&bench.pass(Duration::from_millis(29_999))), [""; 0]);
    assert_eq!(short(&bench.pass(Duration::from_millis(1))), ["replay 6"]);
    bench.replayed(1, 6);
    assert_eq!(short(&bench.step(IngestInput::ReplayEnded)), [""; 0]);
}

#[test]
fn a_subscription_without_existing_messages_is_renewed() {
    let mut bench = Bench::live(SourceConfig::default(), 3);
    for sequence in 3..6 {
        assert_eq!(short(&bench.pass(secs(2))), [format!("replay {}", sequence - 1)]);
        bench.replayed(1, sequence - 1);
        assert_eq!(short(&bench.replayed(1, sequence)), [format!("a{sequence}")]);
        let deaf = if sequence == 5 { vec!["reconnect"] } else { Vec::new() };
        assert_eq!(short(&bench.step(IngestInput::ReplayEnded)), deaf);
    }

    // The same holds for a host that no longer responds. A live message proves that the connection works.
    let mut bench = Bench::live(SourceConfig::default(), 3);
    for sequence in 3..6 {
        bench.pass(secs(2));
        bench.step(IngestInput::ReplayFailed);
        bench.live_from(1, sequence);
    }
    for failures in 1..=3 {
        assert_eq!(short(&bench.pass(secs(2))), ["replay 5"]);
        let deaf = if failures == 3 { vec!["reconnect"] } else { Vec::new() };
        assert_eq!(short(&bench.step(IngestInput::ReplayFailed)), deaf);
    }
}

#[test]
fn an_end_check_tolerates_missing_replies() {
    let mut bench = Bench::live(SourceConfig::default(), 5);
    assert_eq!(short(&bench.pass(secs(2))), ["replay 4"]);
    assert_eq!(short(&bench.replayed(1, 7)), [""; 0], "missing messages may be in flight");
    bench.step(IngestInput::ReplayEnded);
    assert_eq!(short(&bench.pass(secs(2))), ["replay 4"]);
    assert_eq!(short(&bench.replayed(1, 7)), ["clear", "a7", "cold"], "or is lost");
    bench.step(IngestInput::ReplayEnded);

    let mut bench = Bench::live(SourceConfig::default(), 3);
    assert_eq!(short(&bench.pass(secs(6))), ["replay 2"]);
    assert_eq!(notes(&bench.pass(secs(1))), [("replay_failed", 1)]);
    assert_eq!(short(&bench.pass(secs(2))), ["replay 2"], "repeated without giving up");
    assert_eq!(bench.source.state(), StreamState::Live);
}

/// Cause: an empty end check counted as no news, so the blocks of an engine that had restarted behind a dead connection
/// stayed in the index.
#[test]
fn an_empty_end_check_means_a_new_publisher_and_a_dead_connection() {
    let mut bench = Bench::live(SourceConfig::default(), 3);
    assert_eq!(short(&bench.pass(secs(2))), ["replay 2"]);
    let effects = bench.step(IngestInput::ReplayEnded);
    assert_eq!(short(&effects), ["clear", "replay 0", "reconnect", "recovering"]);
}

/// Cause: an end check did not verify the publisher, so messages of a restarted engine applied on top of the blocks of
/// its previous life if their numbers followed.
#[test]
fn an_end_check_applies_no_message_behind_an_unverified_one() {
    let mut bench = Bench::live(SourceConfig::default(), 3);
    assert_eq!(short(&bench.pass(secs(2))), ["replay 2"]);
    assert_eq!(short(&bench.replayed(2, 3)), [""; 0], "message 2 of the publisher is unknown");
    bench.step(IngestInput::ReplayEnded);
    assert_eq!(short(&bench.pass(secs(2))), ["replay 2"]);
    assert_eq!(short(&bench.replayed(2, 3)), ["clear", "a3", "cold"]);
}

/// Cause: end checks required a known message. After two failed replays a dead connection was never replaced.
#[test]
fn a_source_without_any_successful_replay_requests_another_one() {
    let mut bench = Bench::new(SourceConfig::default());
    bench.step(IngestInput::Connected);
    bench.step(IngestInput::ReplayFailed);
    bench.pass(secs(1));
    bench.step(IngestInput::ReplayFailed);
    assert_eq!(bench.source.state(), StreamState::Cold);
    assert_eq!(short(&bench.pass(secs(30))), ["replay 0", "recovering"]);
}

#[test]
fn silent_means_no_connection_or_no_message() {
    let mut bench = Bench::new(SourceConfig::default());
    assert_eq!(short(&bench.pass(secs(9))), [""; 0]);
    assert_eq!(short(&bench.pass(secs(1))), ["silent"]);
    assert_eq!(bench.source.degradation(), Some(DegradationReason::NotConnected { for_ms: 10_000 }));
    assert_eq!(short(&bench.step(IngestInput::Connected)), ["replay 0", "recovering"]);
    assert_eq!(short(&bench.step(IngestInput::ReplayEnded)), ["live"]);
    bench.pass(secs(3600));
    assert_eq!((bench.source.state(), bench.source.degradation()), (StreamState::Live, None), "no request was served");
    assert!(bench.source.awaits_served());
    bench.step(IngestInput::Served);
    bench.pass(secs(9));
    // A connection that is closed and reopened does not hide the silence.
    bench.step(IngestInput::Disconnected);
    bench.step(IngestInput::Connected);
    bench.step(IngestInput::ReplayEnded);
    assert_eq!(short(&bench.pass(secs(1))), ["silent"]);
    assert_eq!(bench.source.degradation(), Some(DegradationReason::NeverPublished { for_ms: 10_000 }));
    assert!(!bench.source.awaits_served());
    assert_eq!(short(&bench.live_from(1, 0)), ["a0", "live"]);
    bench.pass(secs(3600));
    assert_eq!(bench.source.state(), StreamState::Live, "an idle stream with earlier messages is not silent");
    bench.step(IngestInput::Disconnected);
    assert_eq!(short(&bench.pass(secs(10))), ["silent"]);
}

#[test]
fn held_messages_are_bounded_and_the_rest_is_requested() {
    let config = SourceConfig { held_messages_max: 3, ..SourceConfig::default() };
    let mut bench = Bench::live(config, 5);
    for sequence in 7..10 {
        assert!(bench.source.wants_live());
        bench.live_from(1, sequence);
    }
    assert!(!bench.source.wants_live());
    assert_eq!(notes(&bench.live_from(1, 10)), [("held_overflow", 1)]);
    for sequence in 4..7 {
        bench.replayed(1, sequence);
    }
    assert_eq!((bench.source.state(), bench.source.held_messages()), (StreamState::Recovering, 0));
    assert_eq!(short(&bench.replayed(1, 10)), ["a10", "live"]);

    let config = SourceConfig { held_bytes_max: 20, ..SourceConfig::default() };
    let mut bench = Bench::live(config, 5);
    bench.live_from(1, 7);
    assert!(bench.source.wants_live());
    bench.live_from(1, 8);
    assert!(!bench.source.wants_live(), "nine more bytes would exceed the limit");
    assert_eq!(bench.source.held_bytes(), 18);
}

#[test]
fn queries_to_a_contradictory_publisher_back_off() {
    let mut bench = Bench::live(SourceConfig::default(), 5);
    let mut asked = 0;
    for life in 2..200 {
        asked += short(&bench.live_from(life, 1)).iter().filter(|effect| effect.starts_with("replay")).count();
        asked += short(&bench.pass(Duration::from_millis(10))).len();
    }
    assert!(asked < 12, "{asked} queries in two seconds");
}

#[test]
fn the_end_mark_is_not_a_message() {
    let mut bench = Bench::live(SourceConfig::default(), 5);
    assert_eq!(notes(&bench.live_from(1, u64::MAX)), [("refused", 1)]);
    assert_eq!(short(&bench.live_from(1, u64::MAX - 1)), ["replay 4", "recovering"]);
    bench.replayed(1, 4);
    bench.step(IngestInput::ReplayEnded);
    bench.pass(secs(1));
    bench.replayed(1, 4);
    bench.step(IngestInput::ReplayEnded);
    assert_eq!(bench.source.state(), StreamState::Cold);
    assert_eq!(short(&bench.live_from(1, 5))[0], "clear", "an implausible number is corrected");
}

#[test]
fn states_and_reasons_have_names() {
    let said: [(DegradationReason, &[&str]); 12] = [
        (DegradationReason::NotConnected { for_ms: 7 }, &["7 ms", "base port"]),
        (DegradationReason::NeverPublished { for_ms: 7 }, &["7 ms", "topic", "base port"]),
        (DegradationReason::BlockSize { engine: 16, pool: None }, &["16", "--block-size"]),
        (DegradationReason::ForeignRank { found: 3 }, &["rank 3", "base port"]),
        (DegradationReason::BlockSize { engine: 32, pool: Some(16) }, &["32", "16", "context parallelism"]),
        (DegradationReason::Eagle, &["is_eagle = false"]),
        (DegradationReason::Undecodable { batches: 4, finding: Some(Finding::BadHash) }, &["4 batches", "bad_hash"]),
        (DegradationReason::ReplayGap { from: 4, first: 9 }, &["from 4", "from 9", "buffer_steps"]),
        (DegradationReason::ReplayHole { from: 4 }, &["message 4"]),
        (DegradationReason::ReplayFailed { from: 4 }, &["message 4", "replay endpoint"]),
        (DegradationReason::NoReplay { from: 4 }, &["message 4", "replay endpoint"]),
        (DegradationReason::LostRemoval { finding: Finding::TooLarge }, &["too_large", "dropped"]),
    ];
    for (doubt, words) in said {
        let text = doubt.to_string();
        assert!(words.iter().all(|word| text.contains(word)), "{text}");
        assert!(!text.ends_with('.') && !doubt.name().contains(' '), "{text}");
    }
    for trust in StreamState::ALL {
        assert!((0.0..=1.0).contains(&trust.credit()) && trust.name() == trust.name().to_lowercase());
    }
    assert_eq!((Note::Gap.count(), Note::Lost { messages: u64::MAX }.count()), (1, u64::from(u32::MAX)));
}
