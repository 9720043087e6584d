//! Examples of block sizes.

use super::*;

fn sized(endpoint: &str, tokens: u32) -> WorkerConfig {
    WorkerConfig { block_size: Some(tokens), ..WorkerConfig::at(endpoint) }
}

fn reported(tokens: u32) -> PoolBlockSize {
    PoolBlockSize { tokens, origin: BlockSizeOrigin::Reported }
}

fn assumed() -> PoolBlockSize {
    PoolBlockSize { tokens: 64, origin: BlockSizeOrigin::Assumed }
}

impl Pool {
    fn source_of(&mut self, workers: &[(u64, WorkerConfig)]) {
        let set = workers.iter().map(|(id, config)| (WorkerId(*id), config.clone())).collect();
        self.step(MembershipInput::SourceUpdated { source: 0, update: SourceUpdate::Workers(set) });
        self.step(MembershipInput::Reconcile);
    }

    fn events_sized(&mut self, worker: u64, tokens: u32) {
        let (slot, generation) = self.done.running[&WorkerRank::new(WorkerId(worker), 0)].0;
        self.step(MembershipInput::EventsSized { slot, generation, tokens });
    }

    fn size(&self) -> PoolBlockSize {
        assert_eq!(self.done.block_size, Some(self.membership.block_size()), "the size is performed");
        self.membership.block_size()
    }

    fn refused(&self) -> Vec<(u64, &str)> {
        self.done.sources[0].refused.iter().map(|(worker, reason)| (worker.0, reason.as_str())).collect()
    }
}

#[test]
fn a_size_before_the_first_rank_costs_no_rank() {
    let mut pool = Pool::new(RULES, 1);
    pool.source_of(&[(1, WorkerConfig::at("a")), (2, sized("b", 16))]);
    assert_eq!(pool.size(), reported(16));
    assert_eq!(pool.done.replaced, [Child::IndexShard(0), Child::Scheduler], "no sequence actor runs yet");
    let mut equal = Pool::new(RULES, 1);
    equal.source_of(&[(1, sized("a", 64))]);
    assert_eq!((equal.size(), equal.done.replaced.len()), (reported(64), 0));
}

#[test]
fn an_assumed_size_gives_way_to_a_probe_or_to_events() {
    let mut probed = Pool::new(RULES, 1);
    probed.source_of(&[(1, WorkerConfig::at("a"))]);
    assert_eq!(probed.size(), assumed());
    probed.source_of(&[(1, WorkerConfig::at("a")), (2, sized("b", 16))]);
    assert_eq!((probed.size(), probed.endpoints().len()), (reported(16), 2));
    let slot = probed.done.running[&WorkerRank::new(WorkerId(1), 0)].0.0;
    assert_eq!(probed.done.replaced, [Child::IndexShard(0), Child::Scheduler, Child::Sequence(slot)]);
    assert_eq!(probed.membership.incarnation(Child::Scheduler), 1);

    let mut read = Pool::new(RULES, 1);
    read.source_of(&[(1, publishing("a")), (2, WorkerConfig::at("b"))]);
    read.events_sized(1, 32);
    assert_eq!((read.size(), read.done.readers.len()), (reported(32), 1));
    assert_eq!(read.membership.workers()[&WorkerId(1)].block_size, Some(32));
    // Events of a worker are as good as its configuration, and end with its engine.
    read.source_of(&[(1, publishing("a")), (2, sized("b", 16))]);
    assert_eq!((read.size(), read.refused().len(), read.endpoints().len()), (reported(32), 1, 1));
    read.source_of(&[(1, publishing("c")), (2, sized("b", 16))]);
    assert_eq!((read.size(), read.endpoints().len()), (reported(16), 2));
}

#[test]
fn events_confirm_an_assumed_size_without_any_replacement() {
    let mut pool = Pool::new(RULES, 1);
    pool.source_of(&[(1, publishing("a"))]);
    pool.events_sized(1, 64);
    assert_eq!((pool.size(), pool.done.replaced.len()), (reported(64), 0));
    pool.source_of(&[(1, publishing("a")), (2, sized("b", 16))]);
    assert_eq!((pool.size(), pool.refused().len()), (reported(64), 1));
}

#[test]
fn events_of_one_engine_cannot_replace_the_actors_all_the_time() {
    let mut pool = Pool::new(RULES, 1);
    pool.source_of(&[(1, publishing("a"))]);
    for n in 0..20 {
        pool.events_sized(1, 16 + n);
    }
    assert_eq!(pool.size(), reported(20));
    assert_eq!(pool.done.replaced.iter().filter(|child| **child == Child::Scheduler).count(), 5);
}
