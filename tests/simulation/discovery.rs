//! Workers that discovery reports.

use std::rc::Rc;

use pointsman::protocol::{KvEventsConfig, Timestamp, WorkerConfig, WorkerId, WorkerMap};

use crate::script::Settings;

pub(crate) struct Discovery {
    settings: Rc<Settings>,
    engines: Vec<Reported>,
    /// Whether every fault has ended.
    pub(crate) is_healed: bool,
}

/// Deviations of one worker from its settings.
#[derive(Clone, Default)]
pub(crate) struct Reported {
    pub(crate) absent_until: Timestamp,
    pub(crate) ranks: usize,
    pub(crate) resized_until: Timestamp,
    /// Number of changes of its address.
    pub(crate) moves: u32,
}

impl Discovery {
    pub(crate) fn new(settings: &Rc<Settings>) -> Self {
        let engines = vec![Reported::default(); settings.engines];
        Self { settings: Rc::clone(settings), engines, is_healed: false }
    }

    pub(crate) fn reported(&mut self, engine: usize) -> &mut Reported {
        &mut self.engines[engine]
    }

    /// All workers that are reported at `now`.
    pub(crate) fn workers(&self, now: Timestamp) -> WorkerMap {
        let is_present = |engine: &usize| self.is_healed || now >= self.engines[*engine].absent_until;
        let of = |engine: usize| (WorkerId(engine as u64), self.worker(engine, now));
        (0..self.engines.len()).filter(is_present).map(of).collect()
    }

    pub(crate) fn worker(&self, engine: usize, now: Timestamp) -> WorkerConfig {
        let Reported { ranks, resized_until, moves, .. } = self.engines[engine];
        let is_resized = !self.is_healed && now < resized_until;
        let ranks = if is_resized { ranks } else { self.settings.ranks_per_engine };
        let replay_endpoint = self.settings.has_replay.then(|| format!("tcp://10.0.0.{engine}:6000"));
        WorkerConfig {
            data_parallel_size: ranks as u32,
            total_kv_blocks: Some(self.settings.capacity_blocks as u32),
            kv_events: Some(KvEventsConfig {
                endpoint: format!("tcp://10.0.0.{engine}:5000"),
                replay_endpoint,
                topic: String::new(),
            }),
            ..WorkerConfig::at(format!("http://10.0.0.{engine}:{}", 8_000 + moves))
        }
    }
}
