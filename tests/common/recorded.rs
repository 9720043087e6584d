//! A scheduler with a recorder: every input at random, while its loads change concurrently.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pointsman::config::{PrefillModel, QueueClass, RouterConfigOverride, SessionAffinity};
use pointsman::internals::config::{
    LoadConfig, OverloadConfig, QueueConfig, SessionConfig, ShadowConfig, SlowStartConfig,
};
use pointsman::internals::engine_load::EngineLoad;
use pointsman::internals::health::Exclusions;
use pointsman::internals::load::{
    ActiveSequences, BoardLoad, EngineSpeed, PeerLoad, PrefillLoadHint, PromptBlocks, RankLoad,
};
use pointsman::internals::protocol::{BookingId, Generation, SequenceHash, Slot};
use pointsman::internals::select::{RankOverlap, SharedHits, TierOverlap};
use pointsman::policy::{KvConfig, LatencyConfig, Policy, PolicyConfig};
use pointsman::protocol::{Timestamp, WorkerId, WorkerRank};
use pointsman::test_support::mix;
use pointsman::{
    Constraints, EngineReading, Pin, PinMode, RankConditions, RankTraits, Replay, ReplayedDecision, RouterConfig,
    SessionId,
    internals::schedule::{
        Admission, Effect, Extensions, Input, LiveLoads, LoadAnswer, LoadQuery, Purpose, RankCells, Recorder, Request,
        ResolvedOptions, ResolvedTargets, Schedule, Target, Waits,
    },
};

const RANKS: u32 = 9;
const STEP: Duration = Duration::from_millis(20);

/// A number below `below`, by index and purpose.
fn draw(n: u64, purpose: u64, below: u64) -> u64 {
    mix(n << 8 | purpose) % below
}

pub(crate) fn prompt(n: u64) -> PromptBlocks {
    let (family, branch, length) = (draw(n, 1, 4), draw(n, 2, 5), 1 + draw(n, 3, 40));
    let content = |block: u64| if block < 9 { family << 32 | block } else { (family << 8 | branch) << 32 | block };
    let mut chained = 0;
    let hashes = (0..length).map(|block| {
        chained = mix(chained ^ mix(content(block)));
        SequenceHash(chained)
    });
    PromptBlocks::Hashed(hashes.collect())
}

pub(crate) fn rank(slot: u32) -> WorkerRank {
    WorkerRank::new(WorkerId(u64::from(slot) / 2), slot % 2)
}

fn options(n: u64, now: Timestamp) -> Option<Box<ResolvedOptions>> {
    if draw(n, 10, 3) == 0 {
        return None;
    }
    let one_in = |purpose: u64, of: u64| draw(n, purpose, of) == 0;
    let worker = WorkerId(draw(n, 11, u64::from(RANKS) / 2));
    let pin = Pin {
        worker,
        rank: one_in(13, 2).then_some(0),
        mode: if one_in(14, 2) { PinMode::Soft } else { PinMode::Hard },
    };
    let constraints = Constraints {
        allowed_workers: one_in(15, 9).then(|| (0..3).map(|m| WorkerId(draw(n, 16 + m, 5))).collect()),
        excluded_ranks: one_in(20, 6).then(|| rank(draw(n, 21, 9) as u32)).into_iter().collect(),
        pin: one_in(12, 11).then_some(pin),
        required_taints: one_in(22, 12).then(|| "fast".to_owned()).into_iter().collect(),
        preferred_taints: one_in(23, 7).then(|| ("fast".to_owned(), 0.4)).into_iter().collect(),
    };
    let ttft = Duration::from_millis(draw(n, 24, 400) + 1);
    let targets = ResolvedTargets { ttft: Some(ttft), ttft_due: Some(now + ttft), itl: None, rejects: one_in(25, 3) };
    let overrides =
        RouterConfigOverride { temperature: one_in(26, 9).then_some(0.7), ..RouterConfigOverride::default() };
    Some(Box::new(ResolvedOptions {
        constraints,
        lora_name: one_in(27, 6).then(|| "adapter".into()),
        session_id: one_in(28, 2).then(|| SessionId::new(&format!("s{}", draw(n, 29, 12))).expect("a short id")),
        expected_output_tokens: one_in(30, 4).then_some(77),
        usual_output_tokens: one_in(31, 5).then_some(33.5),
        output_tokens_max: one_in(32, 5).then_some(50),
        not_streamed: one_in(33, 4),
        targets: one_in(34, 5).then_some(targets),
        overrides,
        ..ResolvedOptions::default()
    }))
}

fn request(n: u64, now: Timestamp) -> Request<u64> {
    let prompt = prompt(n);
    let blocks = prompt.block_count();
    let overlap = |slot: u32| {
        let device_blocks = draw(n, 40 + u64::from(slot), u64::from(blocks) + 1) as u32;
        let host_pinned_blocks = if draw(n, 60 + u64::from(slot), 5) == 0 { blocks - device_blocks } else { 0 };
        let generation = Generation(if draw(n, 70, 30) == 0 { 77 } else { 1 });
        let overlap = TierOverlap { device_blocks, host_pinned_blocks, ..TierOverlap::default() };
        RankOverlap { slot: Slot(slot), generation, overlap }
    };
    let purpose = match draw(n, 80, 24) {
        0 => Purpose::Explain,
        1 => Purpose::LoadSnapshot,
        2 => Purpose::Report,
        _ => Purpose::Book,
    };
    let exactly =
        Target::Exactly { rank: rank(draw(n, 81, 9) as u32), cached_tokens: None, expected_duration: Some(STEP) };
    Request {
        overlaps: (0..RANKS).filter(|slot| draw(n, 90 + u64::from(*slot), 3) == 0).map(overlap).collect(),
        shared_cache: SharedHits::new((draw(n, 82, 5) == 0).then_some(0..3).into_iter().collect()),
        target: if draw(n, 83, 20) == 0 { exactly } else { Target::Any },
        purpose,
        options: options(n, now),
        waits: Some(Box::new(Waits { booking: BookingId(n), arrival: now, block_hashes: None })),
        ..Request::new(n, prompt, blocks * 16)
    }
}

/// Boards of a rank with 0 to 7 requests and their prefills.
fn boards() -> Vec<BoardLoad> {
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

/// Publishes the `n`th state of every cell.
fn publish(cells: &[RankCells], boards: &[BoardLoad], n: u64, now: Timestamp) {
    for (cells, value) in cells.iter().zip((0u64..).map(|rank| mix(n << 8 | rank))) {
        let load = boards[(value % 8) as usize];
        let incarnation = u32::from(value.is_multiple_of(97));
        cells.board.publish(&BoardLoad { incarnation, applied: (value >> 8) as u32 % 64, ..load });
        let rate = 5e3 + (value % 1_000) as f64 * 30.0;
        cells.speed.publish(&EngineSpeed { work_tokens_per_second: rate, ..EngineSpeed::prior(16) }, now);
        cells.speed.publish_bias(0, 0.5 + (value % 100) as f64 / 50.0, now);
        cells.speed.publish_output((value % 500) as f64);
        cells.holdings.publish((value % 9_000) as usize, now);
        let reading = EngineReading { waiting: Some((value % 12) as u32), ..EngineReading::default() };
        cells.engine_load.publish(&EngineLoad { reading, at: now });
        let requests = (value % 3) as u32;
        cells.peers.publish(&PeerLoad { requests, active_blocks: requests * 7, at: now, ..PeerLoad::default() });
    }
}

/// A scheduler with a recorder, and the state that disturbs it.
pub(crate) struct Recorded {
    schedule: Schedule<u64>,
    live: LiveLoads,
    cells: Vec<RankCells>,
    loads: Vec<BoardLoad>,
    recorder: Recorder<u64>,
    effects: VecDeque<Effect<u64>>,
    open: VecDeque<LoadQuery>,
    late: Vec<LoadAnswer>,
    /// Whether the caches are so small that calls are held.
    is_small: bool,
    /// Entries from each keyframe on.
    pub(crate) segments: Vec<Vec<u8>>,
    pub(crate) booked: u64,
}

impl Recorded {
    pub(crate) fn new(config: &RouterConfig) -> Self {
        let schedule = Schedule::new(config.clone(), 1, Extensions::default());
        let settings = serde_json::to_vec(config).expect("plain data");
        let mut new = Self {
            schedule,
            live: LiveLoads::default(),
            cells: (0..RANKS).map(|_| RankCells::default()).collect(),
            loads: boards(),
            recorder: Recorder::new(settings.into(), |_| "request"),
            effects: VecDeque::new(),
            open: VecDeque::new(),
            late: Vec::new(),
            is_small: config.queue.holds_programs(),
            segments: Vec::new(),
            booked: 0,
        };
        (0..RANKS).for_each(|slot| new.admit(slot, Timestamp(0)));
        new
    }

    pub(crate) fn admit(&mut self, slot: u32, now: Timestamp) {
        self.live.insert(Slot(slot), self.cells[slot as usize].clone());
        let traits = RankTraits {
            total_kv_blocks: if self.is_small { Some(90) } else { (!slot.is_multiple_of(3)).then_some(5_000) },
            max_num_batched_tokens: Some(2_048),
            taints: slot.is_multiple_of(2).then(|| "fast".to_owned()).into_iter().collect(),
            lora_adapters: (slot % 4 == 1).then(|| "adapter".to_owned()).into_iter().collect(),
        };
        let admission =
            Admission { traits: Arc::new(traits), since: now, ..Admission::new(rank(slot), Slot(slot), Generation(1)) };
        self.step(Input::Admit(admission), now);
    }

    pub(crate) fn step(&mut self, input: Input<u64>, now: Timestamp) {
        self.recorder.step(&mut self.schedule, input, &self.live, now, &mut self.effects);
        while let Some(effect) = self.effects.pop_front() {
            match effect {
                Effect::Query(query) => self.open.push_back(query),
                Effect::PublishTypical { speed, rate } => self.live.publish_typical(&speed, rate, now),
                Effect::Book { .. } => self.booked += 1,
                _ => {}
            }
        }
        let segments = &mut self.segments;
        self.recorder.drain(|bytes, keyframe_at| {
            let begin = keyframe_at.unwrap_or(bytes.len());
            if let Some(last) = segments.last_mut() {
                last.extend_from_slice(&bytes[..begin]);
            }
            if keyframe_at.is_some() {
                segments.push(bytes[begin..].to_vec());
            }
        });
    }

    /// Replies to the open query, without some ranks.
    pub(crate) fn answer(&mut self, n: u64, now: Timestamp) {
        let Some(query) = self.open.pop_front() else { return };
        let answer = |slot: &Slot| LoadAnswer {
            slot: *slot,
            generation: Generation(1),
            load: RankLoad { requests: draw(n, 100, 5) as u32, active_blocks: 9, ..RankLoad::default() },
            shared_blocks: query.prompts.iter().map(|_| draw(n, 101, 2) as u32).collect(),
        };
        let (late, answers) =
            query.slots.iter().map(answer).partition(|answer| draw(n, 110 + u64::from(answer.slot.0), 9) == 0);
        self.late = late;
        self.step(Input::Loads { batch: query.batch, answers }, now);
    }

    /// One input of any kind.
    fn disturb(&mut self, n: u64, now: Timestamp) {
        let slot = draw(n, 120, u64::from(RANKS)) as u32;
        let (at, generation) = (Slot(slot), Generation(1));
        let one = || Some(rank(slot)).into_iter().collect();
        match draw(n, 121, 60) {
            0 => {
                self.step(Input::Retire { slot: at, generation }, now);
                self.live.remove(at);
                self.cells[slot as usize] = RankCells::default();
                self.admit(slot, now);
            }
            1 => self.step(Input::Drain { slot: at, generation }, now),
            2 | 3 => self.step(Input::Undrain { slot: at, generation }, now),
            4 => self.step(Input::Conditions(Arc::new(RankConditions { overloaded: one(), unavailable: one() })), now),
            5 | 6 => self.step(Input::Conditions(Arc::default()), now),
            7 => self.step(Input::Exclusions(Arc::new(Exclusions { ejected: one(), ..Exclusions::default() })), now),
            8 => self.step(Input::Exclusions(Arc::new(Exclusions { refusing: one(), ..Exclusions::default() })), now),
            9 | 10 => self.step(Input::Exclusions(Arc::default()), now),
            11 => self.step(Input::Describe { slot: at, generation, traits: Arc::default() }, now),
            12 => self.step(Input::Cancel(BookingId(n.saturating_sub(3))), now),
            13 => {
                let answers = std::mem::take(&mut self.late);
                self.step(Input::Loads { batch: u64::MAX, answers }, now);
            }
            14 => self.recorder.begin_segment(),
            15..20 => self.step(Input::Wake, now),
            20..50 => self
                .step(Input::Ended { booking: BookingId(n.saturating_sub(n % 16)), is_stop: n.is_multiple_of(8) }, now),
            _ => {}
        }
    }

    pub(crate) fn run(&mut self, inputs: u64, seed: u64) {
        let (cells, loads, done) = (self.cells.clone(), self.loads.clone(), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for n in (0..).take_while(|_| !done.load(Ordering::Relaxed)) {
                    publish(&cells[..4], &loads, n, Timestamp(1_000_000)); // concurrently with the steps
                }
            });
            let mut now = Timestamp(0);
            for n in seed * inputs..(seed + 1) * inputs {
                now = now + STEP * draw(n, 130, 3) as u32;
                if draw(n, 131, 3) == 0 {
                    publish(&self.cells[4..], &self.loads, n, now);
                }
                self.disturb(n, now);
                self.step(Input::Request(request(n, now)), now);
                if draw(n, 132, 3) > 0 {
                    self.answer(n, now);
                }
            }
            done.store(true, Ordering::Relaxed);
        });
    }
}

pub(crate) fn settings(bytes: &[u8]) -> Result<RouterConfig, String> {
    serde_json::from_slice(bytes).map_err(|error| error.to_string())
}

pub(crate) fn replayed(segments: &[Vec<u8>], replay: impl Fn() -> Replay) -> Vec<ReplayedDecision> {
    let mut decisions = Vec::new();
    for segment in segments {
        replay().feed(segment, &mut |decision| decisions.push(decision)).expect("own entries");
    }
    decisions
}

/// Every policy, with and without what makes requests wait, sessions, limits and shadows.
pub(crate) fn configs() -> Vec<RouterConfig> {
    let kinds = Policy::ALL.into_iter().map(PolicyConfig::from).chain([
        PolicyConfig::Kv(KvConfig { temperature: 0.5, ..KvConfig::default() }),
        PolicyConfig::Latency(LatencyConfig { temperature: 0.5 }),
    ]);
    let plain = kinds.map(|policy| RouterConfig { block_size: Some(16), seed: 5, policy, ..RouterConfig::default() });
    let every = plain.clone().map(|config| RouterConfig {
        queue: QueueConfig { threshold: Some(0.4), ..QueueConfig::default() },
        overload: OverloadConfig { engine_waiting: Some(10), ..OverloadConfig::default() },
        slow_start: SlowStartConfig { fill: 0.5, ..SlowStartConfig::default() },
        session: SessionConfig { affinity: SessionAffinity::Hard, ..SessionConfig::default() },
        load: LoadConfig { prefill_model: PrefillModel::Learned, ..LoadConfig::default() },
        decision_trace: 0.1,
        shadow: ShadowConfig { policies: Policy::ALL.map(PolicyConfig::from).to_vec(), share: 0.3 },
        ..config
    });
    let holds = QueueClass { program_hold_ms: Some(1_000), ..QueueClass::named("batch") };
    let busy = QueueClass { busy_prefill_frac: Some(0.4), ..holds.clone() };
    let held = [holds, busy].map(|class| {
        let queue = QueueConfig { classes: vec![class], ..QueueConfig::default() };
        RouterConfig { block_size: Some(16), queue, ..RouterConfig::default() }
    });
    plain.chain(every).chain(held).collect()
}
