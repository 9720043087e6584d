//! Examples of the meter's rules, a property test over arbitrary reports, and a simulated engine that is learned from
//! its reports.

use std::collections::VecDeque;
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::load::{ATTENTION_TOKENS, work_tokens};

const SECOND: u64 = 1_000_000_000;

fn meter() -> SpeedMeter {
    SpeedMeter::new(Arc::default(), 64)
}

fn hint(tokens: u32) -> Option<PrefillLoadHint> {
    PrefillLoadHint::new(tokens, 0, true, None)
}

fn load(requests: u32, read_blocks: u32) -> RankLoad {
    RankLoad { requests, active_blocks: read_blocks, read_blocks, prefill_tokens: 0 }
}

/// 1,000 tokens take 40 ms of prefill and a decode step of 100 ms.
#[test]
fn decode_steps_beside_prefills_are_not_prefill_time() {
    let cell = Arc::new(SpeedCell::default());
    cell.publish_step(&EngineSpeed { step_seconds: 0.1, ..EngineSpeed::prior(64) }, Timestamp(0));
    let mut meter = SpeedMeter::new(cell, 64);
    for n in 0..160 {
        let booked = Timestamp(n * SECOND);
        meter.booked(BookingId(n), hint(1_000), booked);
        meter.reported(BookingId(n), true, 0, booked + Duration::from_millis(140));
        meter.ended(BookingId(n), None, booked + Duration::from_millis(150));
    }
    let rate = meter.rate.tokens_per_second();
    let expected = 1_000.0 * (1.0 + 500.0 / ATTENTION_TOKENS) / 0.04;
    assert!((rate / expected - 1.0).abs() < 0.05, "{rate} instead of {expected}");
}

/// Prompts of 4,000 tokens, of which the engine has 3,200 in its cache, unknown to the router, and computes 8,000 a
/// second: at most four requests at once, each with a response of a second.
#[test]
fn unpredicted_cached_tokens_are_not_learned_as_speed() {
    let cell = Arc::new(SpeedCell::default());
    let mut meter = SpeedMeter::new(Arc::clone(&cell), 64);
    let at = |tenths: u64| Timestamp(tenths * SECOND / 10);
    for n in 0..200 {
        meter.booked(BookingId(n), hint(4_000), at(3 * n));
        meter.predicted(BookingId(n), [Some(0.5), None]);
        meter.reported(BookingId(n), true, 0, at(3 * n + 1));
        if let Some(ended) = n.checked_sub(4) {
            meter.ended(BookingId(ended), Some(3_200), at(3 * n + 2));
        }
        meter.check_invariants();
    }
    let expected = work_tokens(800, 3_200) / 0.1;
    let rate = meter.rate.tokens_per_second();
    assert!((rate / expected - 1.0).abs() < 0.08, "{rate} instead of {expected}");
    assert_eq!(meter.bias[0].factor(), 1.0, "the prediction was of another prompt");
}

/// A stream beside responses that are not streamed and last far longer than their prefills: steps are learned in the
/// time outside the expected prefill durations.
#[test]
fn steps_are_learned_beside_unstreamed_responses() {
    let at = |seconds: f64| Timestamp((seconds * SECOND as f64) as u64);
    let mut meter = meter();
    meter.booked(BookingId(1), None, at(0.0));
    meter.load_is(load(2, 10), at(0.0));
    let whole = PrefillLoadHint::new(5_000, 0, true, Some(Duration::from_millis(200))).expect("work");
    meter.booked(BookingId(2), Some(whole.unreported()), at(0.0));
    for n in 1..=40 {
        meter.reported(BookingId(1), true, n, at(0.2 + 0.64 * f64::from(n)));
        meter.check_invariants();
    }
    assert_eq!((meter.step.samples(), meter.rate.samples(), meter.prefills), (39, 0, 0));
    let step = meter.speed().step(2.0, 10.0);
    assert!((step / 0.010 - 1.0).abs() < 0.05, "{step}");
    meter.ended(BookingId(2), None, at(60.0));
    assert_eq!(meter.bookings.len(), 1);
}

#[test]
fn successor_starts_with_the_published_speed() {
    let cell = Arc::new(SpeedCell::default());
    let known = EngineSpeed { work_tokens_per_second: 50_000.0, step_seconds: 0.008, ..EngineSpeed::prior(16) };
    cell.publish(&known, Timestamp(0));
    cell.publish_output(500.0);
    let mut successor = SpeedMeter::new(Arc::clone(&cell), 16);
    let speed = successor.speed();
    let of_prefill = speed.work_tokens_per_second / known.work_tokens_per_second;
    for ratio in [of_prefill, speed.step(0.0, 0.0) / 0.008, speed.step(9.0, 90.0) / known.step(9.0, 90.0)] {
        assert!((ratio - 1.0).abs() < 1e-6, "{speed:?}");
    }
    successor.booked(BookingId(1), None, Timestamp(0));
    successor.reported(BookingId(1), true, 0, Timestamp(1));
    successor.ended(BookingId(1), None, Timestamp(1));
    assert!(cell.output_tokens().is_some_and(|tokens| (490.0..500.0).contains(&tokens)));
}

proptest! {
    #[test]
    fn any_order_of_reports_keeps_the_invariants(
        reports in prop::collection::vec((0..4u8, 0..6u64, 0..20_000u32, 0..10 * SECOND), 1..120),
        block_size in prop_oneof![Just(0), Just(1), Just(64)],
    ) {
        let mut meter = SpeedMeter::new(Arc::default(), block_size);
        let mut model: Vec<(u64, bool)> = Vec::new(); // bookings, and whether their prefills are in progress
        for (report, id, tokens, now) in reports {
            let (booking, now) = (BookingId(id), Timestamp(now));
            let was = model.iter().find(|known| known.0 == id).map(|known| known.1);
            let samples = (meter.rate.samples(), meter.step.samples());
            model.retain(|known| known.0 != id);
            match report {
                0 => {
                    let hint = hint(tokens % 8_000);
                    meter.booked(booking, hint, now);
                    model.push((id, hint.is_some()));
                }
                1 | 2 => {
                    meter.reported(booking, report == 1, tokens % 9, now);
                    let has_begun = report == 1 || tokens % 9 > 0;
                    model.extend(was.map(|under_way| (id, under_way && !has_begun)));
                }
                _ => meter.ended(booking, (tokens % 3 > 0).then_some(tokens), now),
            }
            meter.load_is(load(model.len() as u32, tokens), now);
            let may_learn = if report == 3 { was == Some(false) } else { report == 1 && was == Some(true) };
            prop_assert!(meter.rate.samples() - samples.0 <= u32::from(may_learn));
            prop_assert!(meter.step.samples() - samples.1 <= u32::from([1, 2].contains(&report) && was.is_some()));
            prop_assert_eq!(meter.prefills, model.iter().filter(|known| known.1).count());
            prop_assert_eq!(meter.bookings.len(), model.len());
            meter.check_invariants();
        }
    }
}

/// Simulated engine: each step generates a token for every generating request and computes up to `CHUNK_TOKENS` of the
/// queued prompts. The meter receives the same reports as on a real rank.
struct SimulatedEngine {
    truth: EngineSpeed,
    block_size: u32,
    meter: SpeedMeter,
    now: Timestamp,
    waiting: VecDeque<SimulatedRequest>,
    generating: Vec<SimulatedRequest>,
    traffic: Traffic,
    /// The next arrival.
    next: Timestamp,
    arrived: u64,
    state: u64,
}

/// Random requests: `rate` per second on average, half as many in every other minute; lengths from 0 to twice the given
/// means.
#[derive(Clone, Copy)]
struct Traffic {
    rate: f64,
    prompt: u32,
    output: u32,
}

struct SimulatedRequest {
    id: BookingId,
    prompt: u32,
    computed: u32,
    output: u32,
    generated: u32,
}

const CHUNK_TOKENS: u32 = 2_048;

impl SimulatedEngine {
    fn new(truth: EngineSpeed, block_size: u32, traffic: Traffic) -> Self {
        Self {
            truth,
            block_size,
            meter: SpeedMeter::new(Arc::default(), block_size),
            now: Timestamp(0),
            waiting: VecDeque::new(),
            generating: Vec::new(),
            traffic,
            next: Timestamp(0),
            arrived: 0,
            state: 7,
        }
    }

    /// Uniform in 0 to 1.
    fn draw(&mut self) -> f64 {
        self.state = self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.state >> 40) as f64 / f64::from(1 << 24)
    }

    fn load(&self) -> RankLoad {
        let blocks =
            |request: &SimulatedRequest| request.prompt / self.block_size + request.generated / self.block_size;
        let all = || self.waiting.iter().chain(&self.generating);
        load(all().count() as u32, all().map(blocks).sum())
    }

    /// Books all requests that arrived by now.
    fn arrivals(&mut self) {
        while self.next <= self.now {
            let Traffic { rate, prompt, output } = self.traffic;
            let prompt = 1 + (self.draw() * 2.0 * f64::from(prompt)) as u32;
            let output = 2 + (self.draw() * 2.0 * f64::from(output)) as u32;
            let (id, at) = (BookingId(self.arrived), self.next);
            self.arrived += 1;
            self.waiting.push_back(SimulatedRequest { id, prompt, computed: 0, output, generated: 0 });
            self.meter.booked(id, hint(prompt), at);
            self.meter.load_is(self.load(), at);
            let share = if (at.0 / (60 * SECOND)).is_multiple_of(2) { 1.0 } else { 0.5 };
            let gap = -(1.0 - self.draw()).ln() / (rate * share);
            self.next = at + Duration::from_secs_f64(gap);
        }
    }

    fn report(&mut self, id: BookingId, generated: u32) {
        self.meter.reported(id, true, generated / self.block_size, self.now);
        self.meter.load_is(self.load(), self.now);
    }

    fn step(&mut self) {
        let (mut tokens_left, mut work, mut done) = (CHUNK_TOKENS, 0.0, 0);
        for request in &mut self.waiting {
            let tokens = tokens_left.min(request.prompt - request.computed);
            work += work_tokens(tokens, request.computed);
            request.computed += tokens;
            tokens_left -= tokens;
            done += usize::from(request.computed == request.prompt);
        }
        let held = self.generating.iter().map(|request| (request.prompt + request.generated) / self.block_size);
        let decode = self.truth.step(self.generating.len() as f64, f64::from(held.sum::<u32>()));
        self.now = self.now + Duration::from_secs_f64(decode + self.truth.prefill(work));
        self.arrivals();
        for at in 0..self.generating.len() {
            let request = &mut self.generating[at];
            request.generated += 1;
            if request.generated.is_multiple_of(self.block_size) {
                let (id, generated) = (request.id, request.generated);
                self.report(id, generated);
            }
        }
        for mut request in self.waiting.drain(..done).collect::<Vec<_>>() {
            request.generated = 1;
            let id = request.id;
            self.generating.push(request);
            self.report(id, 1);
        }
        let over: Vec<_> = self.generating.extract_if(.., |request| request.generated >= request.output).collect();
        for request in over {
            self.meter.ended(request.id, None, self.now);
            self.meter.load_is(self.load(), self.now);
        }
    }

    fn run(&mut self, seconds: u64) {
        let end = self.now + Duration::from_secs(seconds);
        while self.now < end {
            if self.waiting.is_empty() && self.generating.is_empty() {
                self.now = self.now.max(self.next);
                self.arrivals();
            }
            self.step();
        }
        self.meter.check_invariants();
    }

    /// Maximum and mean relative error of the learned step time at the loads of the next half minute.
    fn off(&mut self) -> (f64, f64) {
        let (mut worst, mut sum) = (0.0_f64, 0.0);
        let learned = self.meter.speed();
        for _ in 0..30 {
            self.run(1);
            let load = self.load();
            let (requests, blocks) = (f64::from(load.requests), f64::from(load.active_blocks));
            let off = learned.step(requests, blocks) / self.truth.step(requests, blocks) - 1.0;
            (worst, sum) = (worst.max(off.abs()), sum + off);
        }
        (worst, sum / 30.0)
    }
}

#[test]
fn engine_is_learned_from_its_reports() {
    let h100 = EngineSpeed { work_tokens_per_second: 25_000.0, ..EngineSpeed::prior(64) };
    let large = EngineSpeed {
        work_tokens_per_second: 8_000.0,
        step_seconds: 0.025,
        request_seconds: 100e-6,
        block_seconds: 10e-6,
    };
    let dear_blocks = EngineSpeed { block_seconds: 12e-6, step_seconds: 0.003, ..h100 };
    let half = EngineSpeed {
        work_tokens_per_second: 12_500.0,
        step_seconds: 0.008,
        request_seconds: 40e-6,
        block_seconds: 8.32e-6,
    };
    for (truth, block_size, rate, prompt, output) in [
        (h100, 64, 6.0, 1_000, 300),
        (h100, 64, 1.7, 8_000, 200), // prefills are in progress most of the time
        (half, 64, 4.0, 1_000, 300),
        (large, 64, 1.5, 1_000, 400),
        (dear_blocks, 64, 2.0, 2_000, 400),
        (half, 16, 1.0, 3_000, 300),
    ] {
        let mut engine = SimulatedEngine::new(truth, block_size, Traffic { rate, prompt, output });
        for (seconds, worst_max, mean_max) in [(20, 0.2, 0.1), (30, 0.1, 0.05), (180, 0.05, 0.03)] {
            engine.run(seconds);
            let learned = engine.meter.speed();
            let (worst, mean) = engine.off();
            let what = format!("{worst} at worst, {mean} on average after {seconds} s more: {learned:?} of {truth:?}");
            assert!(worst < worst_max && mean.abs() < mean_max, "{what}");
        }
        let tokens = engine.meter.cell.output_tokens().expect("requests have ended");
        let mean = f64::from(output + 1);
        assert!((tokens / mean - 1.0).abs() < 0.3, "{tokens} tokens of {mean}, each from 0 to twice that");
    }
}

/// Chunks of a response deliver several blocks within microseconds; the engine must not appear a hundred times faster.
#[test]
fn blocks_of_one_chunk_are_one_report() {
    let (prior, block_size) = (EngineSpeed::prior(16), 16);
    let mut meter = SpeedMeter::new(Arc::default(), block_size);
    meter.booked(BookingId(1), None, Timestamp(0));
    meter.load_is(RankLoad { requests: 1, ..RankLoad::default() }, Timestamp(0));
    meter.reported(BookingId(1), true, 0, Timestamp(0));
    let chunk_nanos = (prior.step(1.0, 0.0) * 16.0 * 8.0 * 1e9) as u64;
    for chunk in 1..=50_u64 {
        for block in 1..=8 {
            let now = Timestamp(chunk * chunk_nanos + u64::from(block) * 1_000);
            meter.reported(BookingId(1), true, u32::try_from(chunk - 1).expect("small") * 8 + block, now);
            meter.check_invariants();
        }
    }
    let learned = meter.speed().step(1.0, 0.0) / prior.step(1.0, 0.0);
    assert!((0.9..1.1).contains(&learned), "{learned} of what it takes");
}
