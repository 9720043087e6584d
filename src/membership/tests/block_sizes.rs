//! Examples of block sizes.

use super::*;

fn sized(endpoint: &str, tokens: u32) -> WorkerConfig {
    WorkerConfig { block_size: Some(tokens), ..WorkerConfig::at(endpoint) }
}

fn reported(tokens: u32) -> PoolBlockSize {
    PoolBlockSize { tokens, origin: BlockSizeOrigin::Reported }
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
