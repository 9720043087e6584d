//! KV event readers, restarts of dead actors, and cold ranks.
//!
//! Each reader has a restart budget of its own, so that the data of one engine cannot fail the router. After this budget
//! is spent, the rank is no longer read and its overlap does not count.

use std::collections::BTreeMap;
use std::time::Duration;

use super::readers::{EventReader, ReaderSettings};
use super::{Child, Membership, MembershipEffect, MembershipReport, RestartBudget};
use crate::config::EventMode;
use crate::protocol::{Slot, Timestamp, WorkerRank};

/// Restarts of one reader within [`READER_RESTART_WINDOW`].
const READER_RESTARTS_MAX: u32 = 5;

const READER_RESTART_WINDOW: Duration = Duration::from_secs(60);

impl<R> Membership<R> {
    /// Starts, replaces or stops the reader of a running rank as the configurations of its worker and the pool require.
    pub(super) fn update_reader(&mut self, slot: Slot) {
        let worker = self.worker_at(slot).zip(self.slots.get(slot)).filter(|_| self.rules.reads_kv_events);
        let settings = worker
            .and_then(|(worker, occupant)| ReaderSettings::of(&worker.config, occupant.rank, self.block_size.tokens));
        let current = self.readers.get(&slot).map(|reader| &reader.settings);
        if current == settings.as_ref() {
            return;
        }
        let was_read = self.stop_reader(slot);
        if let Some(settings) = settings {
            let budget = RestartBudget::new(READER_RESTARTS_MAX, READER_RESTART_WINDOW);
            self.readers.insert(slot, EventReader { settings, budget });
            self.outbox.push(MembershipEffect::StartReader(slot));
        } else if was_read {
            self.outbox.push(MembershipEffect::ClearBlocks(slot));
        }
    }

    pub(super) fn stop_reader(&mut self, slot: Slot) -> bool {
        let was_read = self.readers.remove(&slot).is_some();
        if was_read {
            self.outbox.push(MembershipEffect::StopReader(slot));
        }
        was_read
    }

    pub(super) fn on_child_died(
        &mut self,
        child: Child,
        reason: String,
        shard_ranks: &BTreeMap<WorkerRank, bool>,
        now: Timestamp,
    ) {
        if let Child::Reader(slot) = child {
            return self.on_reader_died(slot, reason, now);
        }
        if !self.budget.spend(now) {
            return self.outbox.push(MembershipEffect::Fail { child, reason });
        }
        *self.restarts.entry(child).or_default() += 1;
        let lost = self.lost_ranks(shard_ranks);
        self.outbox.cold_changed |= !lost.is_empty();
        self.cold.extend(&lost);
        self.outbox.push(MembershipEffect::Restart { child, reason, lost });
    }

    /// Ranks whose blocks must be sent again. Index entries that follow the router's own decisions fill up by themselves.
    fn lost_ranks(&self, shard_ranks: &BTreeMap<WorkerRank, bool>) -> Vec<WorkerRank> {
        let is_lost = |has_events: bool| match self.rules.event_mode {
            EventMode::Off => false,
            EventMode::On => true,
            EventMode::Auto => has_events,
        };
        let is_running =
            |rank: &WorkerRank| self.workers.get(&rank.worker).is_some_and(|worker| worker.slots.contains_key(rank));
        let lost = shard_ranks.iter().filter(|(rank, has_events)| is_lost(**has_events) && is_running(rank));
        lost.map(|(rank, _)| *rank).collect()
    }

    fn on_reader_died(&mut self, slot: Slot, reason: String, now: Timestamp) {
        let Some(reader) = self.readers.get_mut(&slot) else { return };
        if reader.budget.spend(now) {
            self.outbox.report(MembershipReport::ReaderRestarted { slot, reason });
            self.outbox.push(MembershipEffect::StartReader(slot));
        } else {
            let deaths = READER_RESTARTS_MAX + 1;
            self.outbox.push(MembershipEffect::AbandonReader { slot, deaths, reason });
        }
    }

    /// A message from a shard that has died since refers to blocks that are lost.
    pub(super) fn on_rank_warmed(&mut self, rank: WorkerRank, shard: usize, incarnation: u32) {
        if self.incarnation(Child::IndexShard(shard)) == incarnation {
            self.outbox.cold_changed |= self.cold.remove(&rank);
        }
    }
}
