//! Watchdog: samples the work of every actor and reports hangs.
//!
//! Runs on an OS thread of its own, so it works while every thread of the runtime is blocked. It reads relaxed counters,
//! four times per `supervision.hang_timeout_ms`, and decides nothing else: [`HangDetector`] detects hangs, and the
//! supervisor replaces hung actors. The supervisor proves its own progress by handling one ping at a time.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use ractor::ActorRef;

use super::cpu_share::CpuShare;
use super::messages::SupervisorMsg;
use crate::actors::strands::Strands;
use crate::actors::telemetry::Meters;
use crate::actors::views::published::Published;
use crate::membership::{ActorSample, Child, HangChange, HangDetector, WatchedActor};

/// State of the watchdog.
pub(super) struct Watchdog {
    pub(super) strands: Strands,
    pub(super) supervisor: ActorRef<SupervisorMsg>,
    pub(super) hung: Arc<Published<Vec<WatchedActor>>>,
    pub(super) meters: Arc<Meters>,
    /// Name of the pool, for log lines.
    pub(super) pool: String,
    pub(super) timeout_ms: u64,
    /// Number of the last ping that the supervisor has handled.
    pub(super) handled: Arc<AtomicU64>,
    /// Number of the last ping.
    pub(super) sent: u64,
}

/// Ends the watchdog when dropped.
pub(super) struct WatchdogGuard(#[expect(dead_code, reason = "the drop ends the thread")] mpsc::Sender<()>);

impl Watchdog {
    /// Starts the thread. Without one, which is logged, hangs are not detected.
    pub(super) fn start(self) -> Option<WatchdogGuard> {
        let (guard, ended) = mpsc::channel();
        let thread = std::thread::Builder::new().name("pointsman-watchdog".to_owned());
        match thread.spawn(move || self.run(&ended)) {
            Ok(_detached) => Some(WatchdogGuard(guard)),
            Err(error) => {
                tracing::error!(%error, "watchdog thread not started: hangs are not detected");
                None
            }
        }
    }

    fn run(mut self, ended: &mpsc::Receiver<()>) {
        let interval = Duration::from_millis(self.timeout_ms) / HangDetector::SAMPLES;
        let interval = interval.max(Duration::from_millis(1));
        let mut detector = HangDetector::default();
        let mut cpu = CpuShare::default();
        while ended.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
            self.sample(&mut detector, cpu.next(interval));
        }
        self.hung.set(Vec::new());
    }

    fn sample(&mut self, detector: &mut HangDetector, cpu_share: f64) {
        let samples = self.samples();
        let mut changed = false;
        for (actor, sample) in &samples {
            let Some(change) = detector.sample(*actor, *sample, cpu_share) else { continue };
            changed = true;
            self.report(*actor, change);
        }
        detector.retain(&samples.keys().copied().collect::<Vec<_>>());
        if changed || self.hung.get().len() != detector.hung().count() {
            self.hung.set(detector.hung().collect());
        }
        // A hung supervisor handles no further message. A hang that lasts is requested again.
        if changed && detector.hung().all(|actor| actor != WatchedActor::Supervisor) {
            detector.hung().for_each(|actor| self.request_replacement(actor, &samples));
        }
    }

    fn samples(&mut self) -> BTreeMap<WatchedActor, ActorSample> {
        let mut samples = BTreeMap::new();
        samples.insert(WatchedActor::Supervisor, self.ping());
        samples.insert(WatchedActor::Scheduler, self.strands.scheduler.sample());
        for (number, shard) in self.strands.shards.iter().enumerate() {
            samples.insert(WatchedActor::IndexShard(number), shard.sample());
        }
        samples.insert(WatchedActor::Health, self.strands.health.sample());
        samples.insert(WatchedActor::EngineLoads, self.strands.engine_loads.sample());
        let mut sequences = self.strands.sequences.all();
        sequences.sort_by_key(|address| address.entry.since); // of two entries of a rank, the newer one remains
        for address in sequences {
            samples.insert(WatchedActor::Sequence(address.entry.rank), address.strand.sample());
        }
        samples
    }

    /// Sample of the supervisor, and its next ping if the last one is handled.
    fn ping(&mut self) -> ActorSample {
        let handled = self.handled.load(Ordering::Relaxed);
        let sample = ActorSample { progress: handled, has_work: handled < self.sent };
        if !sample.has_work {
            self.sent += 1;
            drop(self.supervisor.send_message(SupervisorMsg::Ping(self.sent))); // a stopped one drops the guard
        }
        sample
    }

    fn report(&self, actor: WatchedActor, change: HangChange) {
        let (pool, role, timeout_ms) = (self.pool.as_str(), actor.role(), self.timeout_ms);
        match change {
            HangChange::Began => {
                self.meters.hangs.add(role, 1);
                tracing::error!(pool, role, %actor, timeout_ms, "actor hangs: no progress although work waits");
            }
            HangChange::Lasts => tracing::debug!(pool, role, %actor, "actor still hangs"),
            HangChange::Ended => tracing::info!(pool, role, %actor, "hang ended"),
        }
    }

    fn request_replacement(&self, actor: WatchedActor, samples: &BTreeMap<WatchedActor, ActorSample>) {
        let child = match actor {
            WatchedActor::Scheduler => Child::Scheduler,
            WatchedActor::IndexShard(shard) => Child::IndexShard(shard),
            WatchedActor::Supervisor | WatchedActor::Sequence(_) | WatchedActor::Health | WatchedActor::EngineLoads => {
                return;
            }
        };
        if let Some(ActorSample { progress, .. }) = samples.get(&actor) {
            drop(self.supervisor.send_message(SupervisorMsg::Hung { child, progress: *progress }));
        }
    }
}
