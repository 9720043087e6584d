//! Script of one world: settings, requests and faults, all derived from a seed. A failing script shrinks by removal of
//! elements.

use pointsman::RouterConfig;
use pointsman::config::{QueueClass, QueueOrder, SessionAffinity};
use pointsman::internals::config::{
    HealthConfig, IndexConfig, LoadConfig, QueueConfig, SessionConfig, SupervisionConfig,
};
use pointsman::policy::Policy;
use pointsman_trial::workload::Rng;

use crate::prompt::BLOCK_SIZE;

#[derive(Clone, Debug)]
pub(crate) struct Script {
    pub(crate) seed: u64,
    pub(crate) settings: Settings,
    /// In order of time.
    pub(crate) acts: Vec<(u64, Act)>,
}

#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) gateways: usize,
    pub(crate) engines: usize,
    pub(crate) ranks_per_engine: usize,
    pub(crate) capacity_blocks: usize,
    /// Messages that an engine keeps for replay.
    pub(crate) replay_messages: usize,
    pub(crate) has_replay: bool,
    pub(crate) is_slow: bool,
    pub(crate) config: RouterConfig,
}

#[derive(Clone, Debug)]
pub(crate) enum Act {
    Request(RequestSpec),
    Fault(Fault),
}

#[derive(Clone, Debug)]
pub(crate) struct RequestSpec {
    pub(crate) gateway: usize,
    pub(crate) document: u64,
    pub(crate) shared_blocks: u32,
    pub(crate) own_blocks: u32,
    pub(crate) output_blocks: u32,
    /// Whether the booking is detached: it ends by id or by expiry.
    pub(crate) is_detached: bool,
    pub(crate) vanishes_after_ms: Option<u64>,
    pub(crate) deadline_ms: Option<u64>,
    pub(crate) class: usize,
    pub(crate) session: Option<u32>,
}

#[derive(Clone, Debug)]
pub(crate) enum Fault {
    /// The engine dies, and starts again with new sequence numbers. If silent, connections stay open without data.
    EngineCrash {
        engine: usize,
        is_silent: bool,
        down_ms: u64,
    },
    /// The engine drops its cache.
    EngineClear {
        engine: usize,
    },
    /// Every request fails in one way.
    EngineFails {
        engine: usize,
        kind: u32,
        for_ms: u64,
    },
    /// The connection of the event stream breaks.
    StreamBreaks {
        gateway: usize,
        engine: usize,
    },
    /// Live messages are lost.
    StreamLoses {
        engine: usize,
        for_ms: u64,
    },
    /// Replays are not answered.
    ReplayHangs {
        engine: usize,
        for_ms: u64,
    },
    /// Messages between gateways are lost.
    Partition {
        gateway: usize,
        for_ms: u64,
    },
    SchedulerDies {
        gateway: usize,
    },
    SequenceDies {
        gateway: usize,
        nth: usize,
    },
    ShardDies {
        gateway: usize,
        shard: usize,
    },
    ReaderDies {
        gateway: usize,
        nth: usize,
    },
    HealthDies {
        gateway: usize,
    },
    GatewayDies {
        gateway: usize,
        down_ms: u64,
    },
    Snapshot {
        gateway: usize,
    },
    Drain {
        gateway: usize,
        worker: usize,
        deadline_ms: u64,
    },
    Undrain {
        gateway: usize,
        worker: usize,
    },
    Remove {
        gateway: usize,
        worker: usize,
    },
    Upsert {
        gateway: usize,
        worker: usize,
    },
    Cordon {
        gateway: usize,
        worker: usize,
        is_cordoned: bool,
    },
    /// Discovery loses a worker for a while.
    Flap {
        worker: usize,
        for_ms: u64,
    },
    /// Discovery reports another number of ranks for a while.
    Resize {
        worker: usize,
        ranks: usize,
        for_ms: u64,
    },
    /// Discovery reports another address: another engine under the same name.
    Move {
        worker: usize,
    },
    /// Discovery fails.
    SourceFails {
        gateway: usize,
    },
    /// The embedder excludes one worker, or none any more.
    Unavailable {
        gateway: usize,
        worker: Option<usize>,
    },
}

fn settings(draws: &mut Rng) -> Settings {
    let one_in = |draws: &mut Rng, n| draws.below(n) == 0;
    let classes = vec![
        QueueClass { busy_prefill_tokens: Some(u64::from(8 + draws.below(60))), ..QueueClass::named("first") },
        QueueClass {
            busy_prefill_tokens: Some(24),
            requests_max_per_rank: one_in(draws, 2).then_some(3),
            order: QueueOrder::Wspt,
            ..QueueClass::named("second")
        },
    ];
    let queues = one_in(draws, 2);
    let queue = QueueConfig {
        classes: if queues { classes } else { Vec::new() },
        requests_max: if one_in(draws, 4) { 4 } else { 64 },
        overlap_refresh_after_ms: if queues { [0, 50][draws.below(2) as usize] } else { 0 },
        ..QueueConfig::default()
    };
    let policy = [Policy::Kv, Policy::Latency, Policy::Kv, Policy::LeastLoaded, Policy::PowerOfTwo];
    let affinity = [SessionAffinity::Off, SessionAffinity::Soft, SessionAffinity::Hard][draws.below(3) as usize];
    let defaults = RouterConfig::default();
    let config = RouterConfig {
        block_size: Some(BLOCK_SIZE),
        seed: u64::from(draws.below(1_000)),
        policy: policy[draws.below(5) as usize].into(),
        queue,
        index: IndexConfig { shards: 1 + draws.below(2), ..IndexConfig::default() },
        load: LoadConfig { booking_liveness_ms: 4_000, ..LoadConfig::default() },
        session: SessionConfig { affinity, ..SessionConfig::default() },
        health: HealthConfig { probe_interval_ms: 1_000, ejection_ms: 2_000, ..defaults.health },
        supervision: SupervisionConfig { restarts_max: if one_in(draws, 4) { 2 } else { 100 }, hang_timeout_ms: 0 },
        ..defaults
    };
    Settings {
        gateways: 1 + draws.below(3) as usize,
        engines: 1 + draws.below(4) as usize,
        ranks_per_engine: 1 + draws.below(2) as usize,
        capacity_blocks: 12 + draws.below(36) as usize,
        replay_messages: [2, 8, 1_000][draws.below(3) as usize],
        has_replay: !one_in(draws, 8),
        is_slow: one_in(draws, 3),
        config,
    }
}

fn request(draws: &mut Rng, settings: &Settings) -> RequestSpec {
    let mut one_in = |n| draws.below(n) == 0;
    let is_detached = one_in(6);
    let vanishes = one_in(6);
    let has_deadline = one_in(4);
    let has_session = one_in(3);
    RequestSpec {
        gateway: draws.below(settings.gateways as u32) as usize,
        document: u64::from(draws.below(4)),
        shared_blocks: draws.below(7),
        own_blocks: draws.below(5),
        output_blocks: draws.below(6),
        is_detached,
        vanishes_after_ms: vanishes.then(|| u64::from(draws.below(120))),
        deadline_ms: has_deadline.then(|| 1 + u64::from(draws.below(200))),
        class: draws.below(2) as usize,
        session: has_session.then(|| draws.below(4)),
    }
}

fn fault(draws: &mut Rng, settings: &Settings) -> Fault {
    let gateway = draws.below(settings.gateways as u32) as usize;
    let engine = draws.below(settings.engines as u32) as usize;
    let (worker, nth) = (engine, draws.below(8) as usize);
    let for_ms = u64::from(20 + draws.below(600));
    match draws.below(24) {
        0 | 1 => Fault::EngineCrash { engine, is_silent: draws.below(3) == 0, down_ms: for_ms },
        2 => Fault::EngineClear { engine },
        3 => Fault::EngineFails { engine, kind: draws.below(5), for_ms },
        4 => Fault::StreamBreaks { gateway, engine },
        5 => Fault::StreamLoses { engine, for_ms },
        6 => Fault::ReplayHangs { engine, for_ms },
        7 => Fault::Partition { gateway, for_ms },
        8 => Fault::SchedulerDies { gateway },
        9 | 10 => Fault::SequenceDies { gateway, nth },
        11 => Fault::ShardDies { gateway, shard: nth % 2 },
        12 => Fault::ReaderDies { gateway, nth },
        13 => Fault::HealthDies { gateway },
        14 => Fault::GatewayDies { gateway, down_ms: for_ms },
        15 => Fault::Snapshot { gateway },
        16 => Fault::Drain { gateway, worker, deadline_ms: for_ms },
        17 => Fault::Undrain { gateway, worker },
        18 => Fault::Remove { gateway, worker },
        19 => Fault::Upsert { gateway, worker },
        20 => Fault::Cordon { gateway, worker, is_cordoned: draws.below(3) > 0 },
        21 => Fault::Flap { worker, for_ms },
        22 => match draws.below(3) {
            0 => Fault::Resize { worker, ranks: 1 + draws.below(2) as usize, for_ms },
            1 => Fault::Move { worker },
            _ => Fault::SourceFails { gateway },
        },
        _ => Fault::Unavailable { gateway, worker: (draws.below(3) > 0).then_some(worker) },
    }
}

impl Script {
    pub(crate) fn new(seed: u64) -> Self {
        let mut draws = Rng::new(seed);
        let settings = settings(&mut draws);
        let (requests, mut faults) = (5 + draws.below(50), draws.below(16));
        if draws.below(8) == 0 {
            faults *= 4;
        }
        let length_ms = [100, 600, 2_500][draws.below(3) as usize] + draws.below(2_000);
        let mut acts = Vec::new();
        for _ in 0..requests {
            acts.push((u64::from(draws.below(length_ms)), Act::Request(request(&mut draws, &settings))));
        }
        for _ in 0..faults {
            acts.push((u64::from(draws.below(length_ms)), Act::Fault(fault(&mut draws, &settings))));
        }
        acts.sort_by_key(|(at, _)| *at);
        Self { seed, settings, acts }
    }
}
