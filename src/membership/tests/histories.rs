//! Random histories against the slow [reference model](super::reference).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proptest::collection::{btree_map, vec};
use proptest::prelude::*;

use super::reference::{Model, ModelWorker};
use super::{Place, Pool, RULES, at, publishing};
use crate::discovery::DiscoveryError;
use crate::membership::{Child, MembershipInput, MembershipRules, SourceUpdate};
use crate::protocol::{Slot, WorkerConfig, WorkerId, WorkerMap, WorkerRank};

/// One operation of a random history. Indexes are taken modulo the number of candidates.
#[derive(Clone, Debug)]
enum Operation {
    Upsert(u64, Variant),
    Remove(u64),
    Drain(u64),
    Undrain(u64),
    Cordon(u64, bool),
    AckDrain(usize, bool),
    TimeOut(usize),
    AckRetire(usize),
    Source(usize, BTreeMap<u64, Variant>),
    /// As `Source`, without the reconciliation.
    SourceOnly(usize, BTreeMap<u64, Variant>),
    SourceFailed(usize),
    Reconcile,
    ShardDied,
    Warmed(usize, bool),
    ReaderDied(usize),
    EventsSized(usize, u32),
}

/// Configuration of a worker: endpoint, ranks (0 breaks a rule), first rank, KV events, drain, block size.
type Variant = (bool, u32, u32, bool, bool, Option<u32>);

fn config_of((endpoint, ranks, start, publishes, drain, block_size): Variant) -> WorkerConfig {
    let endpoint = if endpoint { "a" } else { "b" };
    let base = if publishes { publishing(endpoint) } else { WorkerConfig::at(endpoint) };
    WorkerConfig { data_parallel_size: ranks, data_parallel_start_rank: start, drain, block_size, ..base }
}

fn operations() -> impl Strategy<Value = Vec<Operation>> {
    let (worker, n) = (0..4_u64, 0..8_usize);
    let tokens = prop_oneof![Just(16), Just(32), Just(64)];
    let size = prop::option::of(tokens.clone());
    let variant = (any::<bool>(), 0..4_u32, 0..2_u32, any::<bool>(), prop::bool::weighted(0.25), size);
    let set = btree_map(worker.clone(), variant.clone(), 0..4);
    let operation = prop_oneof![
        3 => (worker.clone(), variant).prop_map(|(worker, variant)| Operation::Upsert(worker, variant)),
        1 => worker.clone().prop_map(Operation::Remove),
        2 => worker.clone().prop_map(Operation::Drain),
        1 => worker.clone().prop_map(Operation::Undrain),
        1 => (worker, any::<bool>()).prop_map(|(worker, cordoned)| Operation::Cordon(worker, cordoned)),
        2 => (n.clone(), prop::bool::weighted(0.2)).prop_map(|(n, busy)| Operation::AckDrain(n, busy)),
        1 => n.clone().prop_map(Operation::TimeOut),
        5 => n.clone().prop_map(Operation::AckRetire),
        4 => (0..3_usize, set.clone()).prop_map(|(source, set)| Operation::Source(source, set)),
        1 => (0..3_usize, set).prop_map(|(source, set)| Operation::SourceOnly(source, set)),
        1 => (0..3_usize).prop_map(Operation::SourceFailed),
        1 => Just(Operation::Reconcile),
        1 => Just(Operation::ShardDied),
        1 => (n.clone(), any::<bool>()).prop_map(|(n, is_late)| Operation::Warmed(n, is_late)),
        1 => n.clone().prop_map(Operation::ReaderDied),
        2 => (n, tokens).prop_map(|(n, tokens)| Operation::EventsSized(n, tokens)),
    ];
    vec(operation, 1..60)
}

/// Pool and model, and the places of the model's start numbers.
struct Both {
    pool: Pool,
    model: Model,
    starts: BTreeMap<Place, u64>,
}

fn pick<T: Copy>(items: &[T], n: usize) -> Option<T> {
    (!items.is_empty()).then(|| items[n % items.len()])
}

impl Both {
    fn apply(&mut self, operation: Operation) {
        match operation {
            Operation::Upsert(worker, variant) => {
                let reply = self.pool.upsert(worker, config_of(variant));
                self.model.upsert(WorkerId(worker), &config_of(variant), reply);
            }
            Operation::Remove(worker) => {
                let worker = WorkerId(worker);
                let reply = self.pool.request(|reply| MembershipInput::Remove { worker, reply });
                self.model.remove(worker, reply);
            }
            Operation::Drain(worker) => {
                let (worker, deadline) = (WorkerId(worker), Duration::from_secs(1));
                let reply = self.pool.request(|reply| MembershipInput::Drain { worker, deadline, reply });
                self.model.drain(worker, reply);
            }
            Operation::Undrain(worker) => {
                let worker = WorkerId(worker);
                let reply = self.pool.request(|reply| MembershipInput::Undrain { worker, reply });
                self.model.undrain(worker, reply);
            }
            Operation::Cordon(worker, cordoned) => {
                let worker = WorkerId(worker);
                let reply = self.pool.request(|reply| MembershipInput::Cordon { worker, cordoned, reply });
                self.model.cordon(worker, cordoned, reply);
            }
            Operation::AckDrain(n, busy) => self.ack_drain(n, busy),
            Operation::TimeOut(n) => {
                let Some((worker, drain)) = pick(&self.pool.done.timers, n) else { return };
                self.pool.step(MembershipInput::DrainTimedOut { worker, drain, worker_bookings: 3 });
                self.model.drain_timed_out(worker, drain, 3);
            }
            Operation::AckRetire(n) => {
                let Some(place) = pick(&self.pool.done.retiring, n) else { return };
                self.pool.step(MembershipInput::RankRetired { slot: place.0, generation: place.1 });
                self.model.retired(self.starts[&place]);
            }
            Operation::Source(source, set) => {
                self.set_source(source, &set);
                self.reconcile();
            }
            Operation::SourceOnly(source, set) => self.set_source(source, &set),
            Operation::SourceFailed(source) => {
                let update = SourceUpdate::Failed(DiscoveryError::Other("gone".to_owned()));
                self.pool.step(MembershipInput::SourceUpdated { source, update });
            }
            Operation::Reconcile => self.reconcile(),
            Operation::ShardDied => {
                self.pool.die(Child::IndexShard(0), at(0));
                self.model.cold = self.model.running().into_keys().collect();
            }
            Operation::Warmed(n, is_late) => self.warm(n, is_late),
            Operation::ReaderDied(n) => {
                let readers: Vec<Slot> = self.pool.done.readers.iter().copied().collect();
                let Some(slot) = pick(&readers, n) else { return };
                self.pool.die(Child::Reader(slot), at(0));
            }
            Operation::EventsSized(n, tokens) => {
                let running: Vec<(WorkerRank, Place)> =
                    self.pool.done.running.iter().map(|(rank, (place, _))| (*rank, *place)).collect();
                let Some((rank, (slot, generation))) = pick(&running, n) else { return };
                self.pool.step(MembershipInput::EventsSized { slot, generation, tokens });
                self.model.events_sized(rank.worker, tokens);
            }
        }
    }

    fn ack_drain(&mut self, n: usize, busy: bool) {
        let Some(place) = pick(&self.pool.done.draining, n) else { return };
        self.pool.done.draining.retain(|known| *known != place);
        let (slot, generation, rank_bookings) = (place.0, place.1, usize::from(busy));
        self.pool.step(MembershipInput::RankDrained { slot, generation, rank_bookings, worker_bookings: 1 });
        if !busy {
            self.model.drained(self.starts[&place], 1);
        }
    }

    fn warm(&mut self, n: usize, is_late: bool) {
        let cold: Vec<WorkerRank> = self.model.cold.iter().copied().collect();
        let Some(rank) = pick(&cold, n) else { return };
        let incarnation = self.pool.membership.incarnation(Child::IndexShard(0)) - u32::from(is_late);
        self.pool.step(MembershipInput::RankWarmed { rank, shard: 0, incarnation });
        if !is_late {
            self.model.cold.remove(&rank);
        }
    }

    fn set_source(&mut self, source: usize, set: &BTreeMap<u64, Variant>) {
        let set: WorkerMap = set.iter().map(|(id, variant)| (WorkerId(*id), config_of(*variant))).collect();
        let update = SourceUpdate::Workers(set.clone());
        self.pool.step(MembershipInput::SourceUpdated { source, update });
        self.model.sets[source] = Some(set);
    }

    fn reconcile(&mut self) {
        self.pool.step(MembershipInput::Reconcile);
        self.model.reconcile();
    }

    /// Compares performed effects with the model.
    fn compare(&mut self, reconciled: bool) {
        self.model.settle();
        let (done, model) = (&mut self.pool.done, &mut self.model);
        done.replies.sort_by_key(|(reply, _)| *reply);
        model.replies.sort_by_key(|(reply, _)| *reply);
        assert_eq!(done.replies, model.replies);
        let running = model.running();
        assert_eq!(done.running.keys().collect::<Vec<_>>(), running.keys().collect::<Vec<_>>());
        for (rank, (place, endpoint)) in &done.running {
            let worker = &model.workers[&rank.worker];
            let start = *self.starts.entry(*place).or_insert(running[rank]);
            assert_eq!(start, running[rank], "{rank} is restarted exactly if its engine is replaced");
            assert_eq!(**endpoint, *worker.config.endpoint);
            let restricted = worker.cordoned || worker.drain.is_some();
            assert_eq!(done.restricted.contains(place), restricted, "{rank}");
            assert_eq!(done.readers.contains(&place.0), worker.config.has_kv_events(), "{rank}");
        }
        assert!(done.restricted.len() <= done.running.len() && done.readers.len() <= done.running.len());
        assert_eq!(done.cold, model.cold);
        assert_eq!(done.block_size.unwrap_or(model.size), model.size);
        for (source, status) in done.sources.iter().enumerate() {
            assert_eq!(status.leaving, model.leaving(source), "source {source}");
            if reconciled {
                assert_eq!(status.removed.keys().copied().collect::<BTreeSet<_>>(), model.removed(source));
                let refused = model.refused.iter().filter(|(of, _)| *of == source).map(|(_, worker)| *worker);
                assert_eq!(status.refused.keys().copied().collect::<BTreeSet<_>>(), refused.collect());
            }
        }
    }
}

proptest! {
    #[test]
    fn random_histories_agree_with_the_reference_model(operations in operations()) {
        let rules = MembershipRules { restarts_max: 1_000, ..RULES };
        let model = Model::new(3);
        let mut both = Both { pool: Pool::new(rules, 3), model, starts: BTreeMap::new() };
        for operation in operations {
            let reconciled = matches!(operation, Operation::Source(..) | Operation::Reconcile);
            both.apply(operation);
            both.compare(reconciled);
        }
        both.pool.retire_all();
        let retiring: Vec<u64> = both.starts.values().copied().collect();
        let running: BTreeSet<u64> = both.model.running().into_values().collect();
        retiring.into_iter().filter(|start| !running.contains(start)).for_each(|start| both.model.retired(start));
        both.compare(false);
        let is_answered = |worker: &&ModelWorker| worker.drain.as_ref().is_some_and(|drain| drain.reply.is_some());
        let draining = both.model.workers.values().filter(is_answered).count();
        assert_eq!(both.pool.done.replies.len() + draining, both.pool.next_reply as usize, "one reply a request");
    }
}
