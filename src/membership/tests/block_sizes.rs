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
}

#[test]
fn a_size_before_the_first_rank_costs_no_rank() {
    let mut pool = Pool::new(RULES, 1);
    pool.source_of(&[(1, sized("a", 16)), (2, WorkerConfig::at("b"))]);
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
    assert_eq!(read.membership.workers()[&WorkerId(1)].events_block_size, Some(32));
    // Events of a worker end with its engine.
    read.source_of(&[(1, publishing("a")), (2, sized("b", 16))]);
    assert_eq!((read.size(), read.endpoints().len()), (reported(32), 2));
    read.source_of(&[(1, publishing("c")), (2, sized("d", 16))]);
    assert_eq!((read.size(), read.endpoints().len()), (reported(16), 2));
}

#[test]
fn events_confirm_an_assumed_size_without_any_replacement() {
    let mut pool = Pool::new(RULES, 1);
    pool.source_of(&[(1, publishing("a"))]);
    pool.events_sized(1, 64);
    assert_eq!((pool.size(), pool.done.replaced.len()), (reported(64), 0));
    pool.source_of(&[(1, publishing("a")), (2, sized("b", 16))]);
    assert_eq!(pool.size(), reported(64));
}

/// Context parallelism multiplies the block size of the events, not that of the engine's page.
#[test]
fn events_override_stated_sizes() {
    let stating = |endpoint: &str| WorkerConfig { block_size: Some(16), ..publishing(endpoint) };
    let mut pool = Pool::new(RULES, 1);
    pool.source_of(&[(1, stating("a")), (2, stating("b"))]);
    assert_eq!(pool.size(), reported(16));
    pool.events_sized(1, 8);
    assert_eq!(pool.size(), reported(16), "partial blocks are smaller");
    pool.events_sized(1, 32);
    assert_eq!((pool.size(), pool.endpoints().len()), (reported(32), 2), "the other worker has only stated its size");
    pool.events_sized(2, 16);
    assert_eq!(pool.size(), reported(32), "the first events hold their size");
    pool.source_of(&[(1, WorkerConfig { block_size: Some(64), ..publishing("a") }), (2, stating("b"))]);
    assert_eq!(pool.size(), reported(64), "another statement is that of a restarted engine");
    pool.events_sized(2, 16);
    assert_eq!(pool.size(), reported(16), "events precede a statement");

    let configured = PoolBlockSize { tokens: 32, origin: BlockSizeOrigin::Configured };
    let mut pool = Pool::new(MembershipRules { block_size: configured, ..RULES }, 1);
    pool.done.block_size = Some(configured);
    pool.source_of(&[(1, stating("a"))]);
    pool.events_sized(1, 64);
    assert_eq!((pool.size(), pool.endpoints().len()), (configured, 1));
}

/// SGLang's default page has one token. A pool of such blocks would be expensive; its events are folded instead.
#[test]
fn sizes_below_sixteen_count_as_multiples() {
    let sizes = [(1, 16), (2, 16), (3, 18), (8, 16), (15, 30), (16, 16), (17, 17)];
    for (stated, expected) in sizes {
        let mut pool = Pool::new(RULES, 1);
        pool.source_of(&[(1, sized("a", stated)), (2, publishing("b"))]);
        assert_eq!(pool.size(), reported(expected), "{stated}");
        pool.events_sized(2, 1);
        assert_eq!(pool.size(), if 16 == expected { reported(expected) } else { reported(16) }, "events precede");
        pool.source_of(&[(1, sized("a", stated)), (2, publishing("b")), (3, sized("c", 32))]);
        assert_eq!(pool.size().tokens, 16, "the pages of b hold the size");
    }
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
