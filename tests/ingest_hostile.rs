//! Engines that violate every rule of the wire protocol, one after the other, beside two correct engines.
//!
//! Each case waits until the expected metric counts the violation. Throughout, the correct engines are indexed exactly
//! and chosen for their cached blocks, nothing panics or restarts, and memory stays within the configured limits.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use pointsman::protocol::WorkerId;
use pointsman::test_support::{mix, rank};
use pointsman::{KvSourceStatus, Prompt, RouteRequest, Router, StreamState};
use pointsman_trial::kv_events::Dialect;
use tokio::time::Instant;

use crate::ALLOCATOR;
use crate::common::counters::Counters;
use crate::common::{BLOCK_SIZE, config, stored, tokens};
use crate::engines::{Engine, Held, engine_at, held, held_in, source};
use crate::hostile::{Hostile, Script, Then};
use crate::msgpack::{self, Msg};
use crate::peak::{Peak, live_bytes};
use crate::zmtp::{
    TOPIC, batch, frame, greeting, greeting_of, handshake, header, live_message, message, ready, replay_message,
};

/// Panics of the whole process.
static PANICS: AtomicUsize = AtomicUsize::new(0);

/// Longer than any step of these tests.
const PATIENCE: Duration = Duration::from_secs(60);

const MIB: usize = 1 << 20;

/// Memory limit for an engine that announces much and sends little: connections, their fixed buffers, and the correct
/// engines.
const LITTLE_MAX: usize = 8 * MIB;

/// Memory limit for an engine that sends up to the size limits: the library's message buffer (16 MiB, and as much again
/// while it grows), the message itself, the decoder's lists (tokens 16 MiB, hashes 2 MiB), the test's own copy (16
/// MiB), and [`LITTLE_MAX`].
const MUCH_MAX: usize = (4 * 16 + 16 + 2) * MIB + LITTLE_MAX;

/// Limit of all allocations including freed ones. It detects buffers that are allocated and freed between two samples.
const ALLOCATED_MAX: usize = 4 << 30;

// ---- cases ----

/// One protocol violation.
struct Case {
    name: String,
    live: Script,
    replay: Option<Script>,
    /// Labels of which at least one must be counted. Empty for a connection that is only silent.
    causes: &'static [&'static str],
    /// Whether the rank must end as degraded and not only as silent.
    distrusted: bool,
    /// Prompt of the hostile engine that the index may hold.
    holds: Option<Vec<u32>>,
    bytes_max: usize,
}

impl Case {
    fn live(name: impl Into<String>, live: Script, causes: &'static [&'static str]) -> Self {
        Self { name: name.into(), live, replay: None, causes, distrusted: true, holds: None, bytes_max: LITTLE_MAX }
    }

    fn replay(name: impl Into<String>, replay: Script, causes: &'static [&'static str]) -> Self {
        let live = Script::new(handshake("PUB"), Then::Hang);
        Self { replay: Some(replay), ..Self::live(name, live, causes) }
    }
}

/// Sends these bytes, then nothing.
fn sends(parts: &[&[u8]]) -> Script {
    Script::new(parts.concat(), Then::Hang)
}

/// A publisher that follows ZMTP and sends these payloads.
fn publishes(payloads: &[Vec<u8>]) -> Script {
    let messages = payloads.iter().zip(0..).flat_map(|(payload, n)| live_message(n, payload)).collect::<Vec<u8>>();
    sends(&[&handshake("PUB"), &messages])
}

/// Repeats the payload more often than the source tolerates as accidents.
fn publishes_again(payload: &[u8]) -> Script {
    publishes(&vec![payload.to_vec(); 4])
}

const HTTP: &[u8] = b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\nno";

fn hostile_cases() -> Vec<Case> {
    let mut cases = stream_cases();
    cases.extend(parts_cases());
    cases.extend(payload_cases());
    cases.extend(random_cases());
    cases.extend(replay_cases());
    cases
}

fn stream_cases() -> Vec<Case> {
    let publisher = handshake("PUB");
    let mut old = greeting();
    old[10] = 2;
    let liar = frame(4, b"\x05READY\x0bSocket-Type\xff\xff\xff\xffPUB");
    let long_name = frame(4, b"\xffREADY");
    let large = vec![0xab; 12 * MIB];
    let two_large = sends(&[&publisher, &frame(1, &large), &header(0, 12 << 20)]);
    vec![
        Case::live("bad greeting", sends(&[&[0; 64]]), &["bad_greeting"]),
        Case::live("ZMTP 2", sends(&[&old]), &["bad_greeting"]),
        Case::live("HTTP", Script::new(HTTP.to_vec(), Then::Close), &["bad_greeting"]),
        Case::live("never greets", sends(&[]), &["connect_timeout"]),
        Case::live("never is ready", sends(&[&greeting()]), &["connect_timeout"]),
        Case::live("greets as SUB", sends(&[&handshake("SUB")]), &["protocol"]),
        Case::live("greets as nothing", sends(&[&greeting(), &ready("")]), &["protocol"]),
        Case::live("CURVE", sends(&[&greeting_of("CURVE")]), &["mechanism"]),
        Case::live("a property of 4 GiB", sends(&[&greeting(), &liar]), &["protocol"]),
        Case::live("an endless name", sends(&[&greeting(), &long_name]), &["protocol"]),
        Case::live("an empty command", sends(&[&greeting(), &frame(4, b"")]), &["protocol"]),
        Case::live("a command within a message", sends(&[&publisher, &frame(4, b"\x04NOPE")]), &["protocol"]),
        Case::live("bad flags", sends(&[&publisher, &[0x80]]), &["bad_flags"]),
        Case::live("a frame of 2^63", sends(&[&publisher, &header(2, 1 << 63)]), &["frame_too_large"]),
        Case::live("a frame of 2^64 - 1", sends(&[&publisher, &header(1, u64::MAX)]), &["frame_too_large"]),
        Case::live("a frame of 8 GiB", sends(&[&publisher, &header(2, 8 << 30)]), &["frame_too_large"]),
        Case::live("a command of 8 GiB", sends(&[&greeting(), &header(4, 8 << 30)]), &["frame_too_large"]),
        Case { bytes_max: MUCH_MAX, ..Case::live("a message of 24 MiB", two_large, &["message_too_large"]) },
        Case::live(
            "endless small parts",
            Script::new(publisher.clone(), Then::Repeat(frame(1, b"x"), 1 << 20)),
            &["too_many_frames"],
        ),
        Case::live(
            "endless commands",
            Script::new(publisher.clone(), Then::Repeat(ready("PUB"), 1 << 20)),
            &[], // allowed: equivalent to a silent publisher
        ),
    ]
}

fn parts_cases() -> Vec<Case> {
    let publisher = handshake("PUB");
    let says = |parts: &[&[u8]]| sends(&[&publisher, &message(parts)]);
    let (topic, payload) = (TOPIC.as_bytes(), empty_batch(1.0));
    let numbers = [0, u64::MAX - 1, 5, u64::MAX - 1, 0, 1 << 63, u64::MAX - 1];
    let jumps: Vec<u8> =
        numbers.iter().zip(0..).flat_map(|(&n, at)| live_message(n, &empty_batch(f64::from(at)))).collect();
    vec![
        Case::live("a sequence of 3 bytes", says(&[topic, b"123", &payload]), &["sequence_length"]),
        Case::live("one part", says(&[topic]), &["part_count"]),
        Case::live("two parts", says(&[topic, &payload]), &["part_count"]),
        Case::live("five parts", says(&[topic, &[0; 8], &payload, b"", b""]), &["part_count"]),
        // This number is the end mark of replays and never a message number.
        Case::live("the end mark as a number", says(&[topic, &[0xff; 8], &payload]), &["refused"]),
        Case::live("sequence numbers with gaps", sends(&[&publisher, &jumps]), &["lost"]),
        Case {
            replay: Some(sends(&[&handshake("ROUTER"), &jumps])),
            ..Case::live("random sequence numbers", sends(&[&publisher, &jumps]), &["incarnation"])
        },
    ]
}

/// A batch without events.
fn empty_batch(time: f64) -> Vec<u8> {
    batch(Dialect::VllmArray, time, &[])
}

fn payload_cases() -> Vec<Case> {
    let mine = rank(HOSTILE);
    let prompt = tokens(0xbad, 3);
    let whole = batch(Dialect::VllmArray, 1.0, &[(stored(mine, &prompt), &prompt)]);
    let no_time = batch(Dialect::VllmMap, f64::NAN, &[(stored(mine, &prompt), &prompt)]);
    let deep = [&[0x91; 100_000][..], &[0xc0]].concat();
    let deep_field = Msg::named([("type", "BlockStored".into()), ("x", Msg::Raw(deep.clone()))]);
    let ten_million = [&[0xdd][..], &10_000_000_u32.to_be_bytes()].concat();
    let declared = Msg::Raw([&[0x94][..], &Msg::from("BlockStored").bytes(), &ten_million, &[1]].concat());
    let hashes = Msg::Raw([&ten_million[..], &vec![1; 10_000_000]].concat());
    let sent = Msg::Array(vec!["BlockStored".into(), hashes, Msg::Nil, Msg::Array(Vec::new()), Msg::Uint(4)]);
    let sent = msgpack::batch([sent]);
    let cut = whole[..whole.len() - 9].to_vec();
    let foreign = tokens(0xbad, 8);
    let foreign = batch(Dialect::VllmMap, 1.0, &[(stored(mine, &foreign), &foreign[..24])]);
    vec![
        Case::live("a truncated batch", publishes_again(&cut), &["truncated"]),
        Case::live("not a batch", publishes_again(b"\xc1"), &["malformed"]),
        Case::live("an empty payload", publishes_again(b""), &["truncated"]),
        Case::live("text", publishes_again(HTTP), &["wrong_type", "trailing_bytes"]),
        Case::live("nested 100,000 deep", publishes_again(&deep), &["wrong_shape", "too_deep"]),
        Case::live(
            "a deeply nested field",
            publishes_again(&msgpack::batch([deep_field])),
            &["too_deep", "wrong_shape"],
        ),
        Case::live(
            "a deeply nested event",
            publishes_again(&msgpack::batch([Msg::Raw(deep.clone())])),
            &["too_deep", "wrong_type"],
        ),
        Case {
            distrusted: false,
            holds: Some(prompt.clone()),
            ..Case::live("an invalid time", publishes(&[no_time]), &["not_finite"])
        },
        Case::live(
            "10 million hashes declared",
            publishes_again(&msgpack::batch([declared])),
            &["too_large", "truncated"],
        ),
        Case {
            distrusted: false, // one batch does not degrade the rank
            bytes_max: MUCH_MAX,
            ..Case::live("10 million hashes sent", publishes(&[sent]), &["too_large"])
        },
        Case::live("another block size", publishes_again(&foreign), &["block_size"]),
    ]
}

/// Pseudo-random bytes from a seed.
fn random(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed;
    let next = || {
        let byte = mix(state) as u8;
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        byte
    };
    std::iter::repeat_with(next).take(bytes).collect()
}

const RANDOM_STREAM: &[&str] =
    &["bad_flags", "frame_too_large", "message_too_large", "too_many_frames", "protocol", "part_count", "closed"];

const RANDOM_PAYLOAD: &[&str] = &["truncated", "malformed", "too_large", "wrong_type", "wrong_shape", "trailing_bytes"];

fn random_cases() -> Vec<Case> {
    let mut cases = vec![Case::live("random bytes", sends(&[&random(1, 4096)]), &["bad_greeting"])];
    for seed in 2..5 {
        let bytes = random(seed, 4096);
        let streams = Script::new([handshake("PUB"), bytes.clone()].concat(), Then::Close);
        cases.push(Case {
            distrusted: false,
            ..Case::live(format!("random frames, seed {seed}"), streams, RANDOM_STREAM)
        });
        let ready = sends(&[&greeting(), &frame(4, &bytes)]);
        cases.push(Case::live(format!("a random READY, seed {seed}"), ready, &["protocol"]));
        let payloads: Vec<_> = (0..64).map(|n| random(seed << 32 | n, 256)).collect();
        cases.push(Case {
            distrusted: false,
            ..Case::live(format!("random payloads, seed {seed}"), publishes(&payloads), RANDOM_PAYLOAD)
        });
    }
    cases
}

fn replay_cases() -> Vec<Case> {
    let router = handshake("ROUTER");
    let nothing = empty_batch(1.0);
    let answers = |numbers: &[u64]| numbers.iter().flat_map(|n| replay_message(*n, &nothing)).collect::<Vec<u8>>();
    let end = replay_message(u64::MAX, b"");
    let endless = |answer: Vec<u8>| Script::new(router.clone(), Then::Repeat(answer, 1 << 24));
    vec![
        Case::replay("replay: bad greeting", sends(&[&[0; 64]]), &["bad_greeting"]),
        Case::replay("replay: HTTP", Script::new(HTTP.to_vec(), Then::Close), &["bad_greeting"]),
        Case::replay("replay: never greets", sends(&[]), &["connect_timeout"]),
        Case::replay("replay: greets as PUB", sends(&[&handshake("PUB")]), &["protocol"]),
        Case::replay("replay: CURVE", sends(&[&greeting_of("CURVE")]), &["mechanism"]),
        Case::replay("replay: 2^63", sends(&[&router, &header(2, 1 << 63)]), &["frame_too_large"]),
        Case::replay("replay: 8 GiB", sends(&[&router, &header(2, 8 << 30)]), &["frame_too_large"]),
        Case::replay("replay: endless parts", endless(frame(1, b"x")), &["too_many_frames"]),
        Case::replay("replay: a short number", sends(&[&router, &message(&[b"", b"123", b"p"])]), &["sequence_length"]),
        Case::replay("replay: one part", sends(&[&router, &message(&[b"x"])]), &["part_count"]),
        Case::replay("replay: five parts", sends(&[&router, &message(&[b"", b"", b"", b"", b"x"])]), &["part_count"]),
        Case::replay("replay: closes", Script::new(router.clone(), Then::Close), &["closed"]),
        Case::replay("replay: never answers", sends(&[&router]), &["replay_failed"]),
        Case::replay("replay: begins late", sends(&[&router, &answers(&[7, 8]), &end]), &["cold"]),
        Case::replay("replay: goes backwards", sends(&[&router, &answers(&[9, 5, 9, 3, 0]), &end]), &["cold"]),
        Case::replay("replay: repeated message", endless(answers(&[0])), &["replay_failed"]),
        Case::replay("replay: never in order", endless(answers(&[0, 1 << 40, 3])), &["replay_failed"]),
        Case {
            distrusted: false, // a few batches do not degrade the rank
            ..Case::replay("replay: no batches", sends(&[&router, &replay_message(0, b"\xc1"), &end]), &["malformed"])
        },
    ]
}

// ---- the two correct engines, and the measurements ----

const HOSTILE: u64 = 2;

/// Stores a unique prompt and removes the oldest one if there are more than six.
fn work(engine: &mut Engine) {
    engine.store();
    if engine.prompts.len() > 6 {
        let payload = engine.drops_oldest();
        engine.publisher.publish(&payload);
    }
}

/// Counters of causes.
const COUNTED: [&str; 3] =
    ["pointsman_kv_source_errors_total", "pointsman_kv_source_notes_total", "pointsman_kv_findings_total"];

/// The router, the two correct engines, and the counters.
struct Fleet<'a> {
    router: Router,
    well: [Engine; 2],
    counters: &'a Counters,
    requests: u64,
}

impl<'a> Fleet<'a> {
    async fn start(counters: &'a Counters) -> Self {
        let well = [Engine::start(0, 64).await, Engine::start(1, 64).await];
        let mut builder = Router::builder(config());
        for engine in &well {
            builder = builder.worker(engine.rank.worker, engine.config());
        }
        let router = builder.start().await.expect("valid");
        let mut fleet = Self { router, well, counters, requests: 0 };
        fleet.works("at the start", &Held::new()).await;
        fleet
    }

    /// The correct engines publish. They must be indexed exactly, be live, and be chosen. Of other engines the index
    /// may hold no more than `also`.
    async fn works(&mut self, case: &str, also: &Held) {
        for engine in &mut self.well {
            work(engine);
        }
        let expected: Held = self.well.iter().flat_map(Engine::holds).collect();
        let begun = Instant::now();
        loop {
            let held = held(&self.router).await;
            let trust = |engine: &Engine| source(&self.router, engine.rank).map(|source| source.state);
            let all_live = self.well.iter().all(|engine| trust(engine) == Some(StreamState::Live));
            let others: Held = held.difference(&expected).copied().collect();
            if all_live && held.is_superset(&expected) && others.is_subset(also) {
                break;
            }
            assert!(begun.elapsed() < PATIENCE, "{case}: {others:?} {:#?}", self.router.kv_sources());
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        for engine in &self.well {
            let prompt = engine.prompts.last().expect("the victim received its events");
            let id = self.requests.to_string();
            self.requests += 1;
            let placement = self.router.route(RouteRequest::new(&id, Prompt::Tokens(prompt))).await.expect("placed");
            let cached = prompt.len() as u32 - BLOCK_SIZE; // the last block is computed
            assert_eq!((placement.rank(), placement.cached_tokens()), (engine.rank, cached), "{case}");
        }
        assert_eq!(PANICS.load(Ordering::Relaxed), 0, "{case}");
        assert_eq!(self.router.health().restarts, 0, "{case}");
        assert_eq!(self.counters.get("pointsman_restarts_total", &[]), 0, "{case}: restarts");
    }

    /// Occurrences of any of these causes.
    fn count(&self, causes: &[&str]) -> u64 {
        let of = |cause: &&str| COUNTED.iter().map(|name| self.counters.get(name, &[cause])).sum::<u64>();
        causes.iter().map(of).sum()
    }

    async fn endures(&mut self, case: &Case, peak: &Peak) {
        let allocated = ALLOCATOR.stats().bytes_allocated;
        peak.reset();
        let counted = self.count(case.causes);
        let live = Hostile::start({
            let script = case.live.clone();
            move |_| script.clone()
        })
        .await;
        let replay = match case.replay.clone() {
            Some(script) => Some(Hostile::start(move |_| script.clone()).await),
            None => None,
        };
        let worker = engine_at(WorkerId(HOSTILE), live.kv_events(replay.as_ref()));
        self.router.upsert_worker(WorkerId(HOSTILE), worker).await.expect("valid");
        let also = case.holds.as_deref().map(|prompt| held_in(vec![stored(rank(HOSTILE), prompt)])).unwrap_or_default();
        let begun = Instant::now();
        loop {
            self.works(&case.name, &also).await;
            let hostile = source(&self.router, rank(HOSTILE)).expect("the source is connected");
            let is_counted = case.causes.is_empty() || self.count(case.causes) > counted;
            if is_counted && (!case.distrusted || hostile.state != StreamState::Live) {
                break;
            }
            assert!(begun.elapsed() < PATIENCE, "{}: {:?}\n{hostile:#?}", case.name, self.counters);
            let most = peak.most();
            assert!(most <= case.bytes_max, "{}: {most} bytes", case.name);
        }
        if let Some(prompt) = &case.holds {
            assert!(
                held(&self.router).await.is_superset(&held_in(vec![stored(rank(HOSTILE), prompt)])),
                "{}",
                case.name
            );
        }
        let most = peak.most();
        let in_all = ALLOCATOR.stats().bytes_allocated.wrapping_sub(allocated);
        eprintln!("{:28} {:>6} KiB live at most, {:>6} ms", case.name, most >> 10, begun.elapsed().as_millis());
        assert!(most <= case.bytes_max, "{}: {most} bytes live", case.name);
        assert!(in_all <= ALLOCATED_MAX, "{}: {in_all} bytes allocated", case.name);
        self.router.remove_worker(WorkerId(HOSTILE)).await.expect("known");
    }
}

/// Runs a scenario on this thread with a separate metrics recorder, and counts every panic of the
/// process.
fn run(scenario: impl AsyncFnOnce(Fleet<'_>)) {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        PANICS.fetch_add(1, Ordering::Relaxed);
        report(panic);
    }));
    let counters = Counters::default();
    let _recording = counters.record();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async { scenario(Fleet::start(&counters).await).await });
}

#[test]
fn hostile_engines_do_not_affect_others() {
    alone!();
    run(async |mut fleet| {
        let cases = hostile_cases();
        let peak = Peak::watch();
        for _ in 0..20 {
            fleet.works("before", &Held::new()).await;
        }
        let before = live_bytes();
        for case in &cases {
            fleet.endures(case, &peak).await;
        }
        for _ in 0..20 {
            fleet.works("after", &Held::new()).await;
        }
        let kept = live_bytes().saturating_sub(before);
        assert!(kept <= LITTLE_MAX, "{kept} bytes remain after {} cases", cases.len());
        assert_eq!(fleet.router.kv_sources().len(), 2);
    });
}

#[test]
fn connections_may_end_anywhere() {
    alone!();
    run(async |mut fleet| {
        let nothing = empty_batch(1.0);
        let exchange = [handshake("PUB"), live_message(0, &nothing), live_message(1, &nothing)].concat();
        let offsets = exchange.len();
        let cut = Hostile::start(move |n| Script::new(exchange[..n % offsets].to_vec(), Then::Close)).await;
        // Each worker reconnects repeatedly, so one worker per offset covers all offsets, many of them concurrently.
        let workers = 100..100 + offsets as u64;
        for worker in workers.clone() {
            let config = engine_at(WorkerId(worker), cut.kv_events(None));
            fleet.router.upsert_worker(WorkerId(worker), config).await.expect("valid");
        }
        let begun = Instant::now();
        while cut.accepted() < 2 * offsets {
            fleet.works("cut", &Held::new()).await;
            assert!(begun.elapsed() < PATIENCE, "{} connections of {offsets} offsets", cut.accepted());
        }
        let has_failed = |source: &KvSourceStatus| source.rank.worker.0 < 100 || source.last_error.is_some();
        while !fleet.router.kv_sources().iter().all(has_failed) {
            fleet.works("cut", &Held::new()).await;
            assert!(begun.elapsed() < PATIENCE, "{:#?}", fleet.router.kv_sources());
        }
        assert!(fleet.count(&["closed", "protocol"]) >= offsets as u64);
        for worker in workers {
            fleet.router.remove_worker(WorkerId(worker)).await.expect("known");
        }
        fleet.works("after", &Held::new()).await;
    });
}
