//! Registration, change, cordon and removal of workers.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::{BY_HAND, Child, Membership, MembershipEffect, MembershipReport, RankDescription, RegisteredWorker};
use crate::error::MembershipError;
use crate::protocol::{Generation, Slot, WorkerConfig, WorkerConfigError, WorkerId, WorkerRank};
use crate::select::RankTraits;

impl<R> Membership<R> {
    pub(super) fn on_upsert(&mut self, worker: WorkerId, config: WorkerConfig, reply: R) {
        let result = self.upsert(worker, config, None);
        self.refresh_removed();
        self.outbox.reply(reply, result.map(|()| 0));
    }

    /// Registers or changes a worker. A rejected configuration changes nothing.
    pub(super) fn upsert(
        &mut self,
        worker: WorkerId,
        config: WorkerConfig,
        source: Option<usize>,
    ) -> Result<(), MembershipError> {
        let is_valid = match config.drain {
            true => Err(WorkerConfigError::Drain),
            false => self.rules.check(&config),
        };
        is_valid.map_err(|error| MembershipError::Config { worker, error })?;
        let known = self.workers.get(&worker);
        if known.is_some_and(|known| known.draining) {
            return Err(MembershipError::Draining(worker));
        }
        let cordoned = known.is_some_and(|known| known.cordoned);
        let events_block_size = self.events_size(worker, &config);
        self.settle_block_size(worker, config.block_size, events_block_size);
        let known = self.workers.get(&worker);
        // Another endpoint is another engine: cache contents and requests of the old one are lost.
        if known.is_some_and(|known| known.config.endpoint != config.endpoint) {
            self.unregister(worker);
        }
        let is_new = !self.workers.contains_key(&worker);
        let slots = self.assign_ranks(worker, &config, cordoned);
        self.withheld.remove(&worker);
        if is_new {
            let (endpoint, source) = (config.endpoint.clone(), self.source_name(source));
            self.outbox.report(MembershipReport::Joined { worker, endpoint, ranks: slots.len(), source });
            self.report_unstated_capacity(&config);
        }
        let running: Vec<Slot> = slots.values().copied().collect();
        let traits = Arc::new(RankTraits::of(&config));
        let registered =
            RegisteredWorker { config, traits, slots, draining: false, cordoned, source, events_block_size };
        self.workers.insert(worker, registered);
        running.into_iter().for_each(|slot| self.update_reader(slot));
        self.outbox.workers_changed = true;
        Ok(())
    }

    /// Retires ranks that the configuration lacks, describes those that stay, and starts new ones.
    fn assign_ranks(
        &mut self,
        worker: WorkerId,
        config: &WorkerConfig,
        restricted: bool,
    ) -> BTreeMap<WorkerRank, Slot> {
        let wanted: BTreeSet<WorkerRank> = config.ranks(worker).collect();
        let mut slots = self.workers.get(&worker).map(|known| known.slots.clone()).unwrap_or_default();
        slots.iter().filter(|(rank, _)| !wanted.contains(rank)).for_each(|(_, slot)| self.retire(*slot));
        slots.retain(|rank, _| wanted.contains(rank));
        let traits = Arc::new(RankTraits::of(config));
        let description = |rank: WorkerRank| RankDescription {
            number_at_worker: (config.data_parallel_size > 1).then(|| rank.rank - config.data_parallel_start_rank),
            traits: Arc::clone(&traits),
        };
        for (rank, slot) in &slots {
            if let Some(occupant) = self.slots.get(*slot) {
                let (slot, generation, description) = (*slot, occupant.generation, description(*rank));
                self.outbox.push(MembershipEffect::DescribeRank { slot, generation, description });
            }
        }
        let endpoint = Arc::<str>::from(config.endpoint.as_str());
        for rank in wanted {
            if let std::collections::btree_map::Entry::Vacant(vacant) = slots.entry(rank) {
                let (slot, generation) = self.slots.assign(rank);
                vacant.insert(slot);
                let (endpoint, description) = (Arc::clone(&endpoint), description(rank));
                let start = MembershipEffect::StartRank { rank, slot, generation, endpoint, description, restricted };
                self.outbox.push(start);
            }
        }
        slots
    }

    fn report_unstated_capacity(&mut self, config: &WorkerConfig) {
        let is_unstated = config.max_num_batched_tokens.is_none() && self.rules.needs_batched_tokens;
        if is_unstated && !std::mem::replace(&mut self.capacity_reported, true) {
            self.outbox.report(MembershipReport::CapacityUnstated { endpoint: config.endpoint.clone() });
        }
    }

    pub(super) fn on_cordon(&mut self, worker: WorkerId, cordoned: bool, reply: R) {
        let result = self.cordon(worker, cordoned);
        self.outbox.reply(reply, result.map(|()| 0));
    }

    fn cordon(&mut self, worker: WorkerId, cordoned: bool) -> Result<(), MembershipError> {
        let known = self.workers.get_mut(&worker).ok_or(MembershipError::UnknownWorker(worker))?;
        if known.draining {
            return Err(MembershipError::Draining(worker));
        }
        if std::mem::replace(&mut known.cordoned, cordoned) != cordoned {
            self.restrict_ranks(worker, cordoned);
            self.outbox.workers_changed = true;
        }
        Ok(())
    }

    pub(super) fn restrict_ranks(&mut self, worker: WorkerId, restricted: bool) {
        for (slot, generation) in self.slots.running_of(worker) {
            self.outbox.effects.push(MembershipEffect::RestrictRank { slot, generation, restricted });
        }
    }

    /// Unregisters a worker, retires its ranks and ends its drain. Returns the slots of all its retiring ranks.
    pub(super) fn unregister(&mut self, worker: WorkerId) -> BTreeSet<(Slot, Generation)> {
        if let Some(RegisteredWorker { config, slots, source, .. }) = self.workers.remove(&worker) {
            let (endpoint, source) = (config.endpoint, self.source_name(source));
            self.outbox.report(MembershipReport::Left { worker, endpoint, ranks: slots.len(), source });
            for slot in slots.into_values() {
                self.retire(slot);
            }
            self.outbox.workers_changed = true;
        }
        self.end_drain(worker, MembershipError::UnknownWorker(worker));
        self.slots.all_of(worker).collect()
    }

    fn retire(&mut self, slot: Slot) {
        self.stop_reader(slot);
        let Some(generation) = self.slots.set_retiring(slot) else { return };
        if let Some(occupant) = self.slots.get(slot) {
            self.outbox.cold_changed |= self.cold.remove(&occupant.rank);
        }
        self.outbox.push(MembershipEffect::RetireRank { slot, generation });
    }

    pub(super) fn on_rank_retired(&mut self, slot: Slot, generation: Generation) {
        if !self.slots.release(slot, generation) {
            return;
        }
        self.restarts.remove(&Child::Sequence(slot));
        self.outbox.push(MembershipEffect::ReleaseRank { slot, generation });
        for removal in &mut self.removals {
            removal.left.remove(&(slot, generation));
        }
        self.finish_removals();
    }

    pub(super) fn source_name(&self, source: Option<usize>) -> String {
        let status = source.and_then(|source| self.statuses.get(source));
        status.map_or(BY_HAND, |status| &status.source).to_owned()
    }
}
