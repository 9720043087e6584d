//! Block size of the pool.
//!
//! A configured size never changes. Without one, the first worker that reports a size determines it. A report is the size
//! in a worker's KV events, or, before them, its [`block_size`](crate::protocol::WorkerConfig::block_size): a hint, because
//! context parallelism multiplies the size of the events. A size gives way to the next report once no worker in service
//! reports it, and to events once no events have it. A worker with another size serves; its events count if its size divides
//! the pool's ([`PoolBlockSize::of_engine`], and folding in `wire`).
//!
//! A change of the size replaces the actors that depend on it: scheduler, index shards, sequence actors and readers. It
//! spends no restart budget. Before the first rank it costs nothing. Events can change the size only a few times a minute,
//! so that the data of one engine cannot replace the actors all the time.

use std::time::Duration;

use super::{Child, Membership, MembershipEffect, MembershipReport, RegisteredWorker};
use crate::config::RouterConfig;
use crate::protocol::{BlockSizeOrigin, Generation, PoolBlockSize, Slot, Timestamp, WorkerConfig, WorkerId};

/// Changes of the block size by KV events within [`EVENT_CHANGES_WINDOW`].
pub(super) const EVENT_CHANGES_MAX: u32 = 5;

pub(super) const EVENT_CHANGES_WINDOW: Duration = Duration::from_secs(60);

/// Initial block size of a router with this configuration.
#[must_use]
pub fn initial_block_size(config: &RouterConfig) -> PoolBlockSize {
    let origin = if config.block_size.is_some() { BlockSizeOrigin::Configured } else { BlockSizeOrigin::Awaited };
    PoolBlockSize { tokens: config.block_size_or_assumed(), origin }
}

impl<R> Membership<R> {
    /// Block size in force.
    #[must_use]
    pub fn block_size(&self) -> PoolBlockSize {
        self.block_size
    }

    /// Takes the size of a worker's KV events, or else of its configuration, unless another worker in service has the
    /// present one from a source that is as good.
    pub(super) fn settle_block_size(&mut self, worker: WorkerId, stated: Option<u32>, of_events: Option<u32>) {
        let present = self.block_size;
        let is_held = |known: &RegisteredWorker| {
            let held = known.events_block_size.or(known.config.block_size.filter(|_| of_events.is_none()));
            held.map(PoolBlockSize::of_engine) == Some(present.tokens)
        };
        let size = match (of_events.or(stated).map(PoolBlockSize::of_engine), present.origin) {
            (_, BlockSizeOrigin::Configured) => return,
            (None, BlockSizeOrigin::Awaited) => PoolBlockSize { origin: BlockSizeOrigin::Assumed, ..present },
            (None, BlockSizeOrigin::Assumed | BlockSizeOrigin::Reported) => return,
            (Some(tokens), origin) => {
                let mut others = self.workers.iter().filter(|(id, known)| **id != worker && !known.draining);
                let is_taken = tokens == present.tokens || others.any(|(_, known)| is_held(known));
                if origin == BlockSizeOrigin::Reported && is_taken {
                    return;
                }
                PoolBlockSize { tokens, origin: BlockSizeOrigin::Reported }
            }
        };
        self.use_block_size(size);
    }

    /// Block size of the events that this configuration's engine has published.
    pub(super) fn events_size(&self, worker: WorkerId, config: &WorkerConfig) -> Option<u32> {
        let known = self.workers.get(&worker)?;
        let stated = |config: &WorkerConfig| (config.endpoint.clone(), config.block_size);
        known.events_block_size.filter(|_| stated(&known.config) == stated(config))
    }

    /// The KV events of a rank have this block size. Below the stated size it is that of partial blocks.
    pub(super) fn on_events_sized(&mut self, slot: Slot, generation: Generation, tokens: u32, now: Timestamp) {
        let occupant = self.slots.get(slot).filter(|occupant| !occupant.retiring && occupant.generation == generation);
        let Some(worker) = occupant.map(|occupant| occupant.rank.worker) else { return };
        let Some(known) = self.workers.get_mut(&worker) else { return };
        let stated = known.config.block_size;
        if stated.is_some_and(|stated| tokens < stated)
            || PoolBlockSize::of_engine(tokens) != self.block_size.tokens && !self.size_changes.spend(now)
        {
            return;
        }
        known.events_block_size = Some(tokens);
        self.settle_block_size(worker, stated, Some(tokens));
    }

    /// Changes the size, and replaces the actors that depend on it.
    fn use_block_size(&mut self, size: PoolBlockSize) {
        let before = std::mem::replace(&mut self.block_size, size);
        self.outbox.push(MembershipEffect::UseBlockSize(size));
        self.outbox.report(MembershipReport::BlockSize { before, now: size });
        if before.tokens == size.tokens {
            return;
        }
        let running: Vec<Slot> =
            self.slots.iter().filter(|(_, occupant)| !occupant.retiring).map(|(slot, _)| slot).collect();
        let actors = (0..self.rules.index_shards as usize).map(Child::IndexShard).chain([Child::Scheduler]);
        for child in actors.chain(running.iter().map(|slot| Child::Sequence(*slot))) {
            *self.restarts.entry(child).or_default() += 1;
            self.outbox.push(MembershipEffect::Replace(child));
        }
        running.into_iter().for_each(|slot| self.update_reader(slot));
        self.outbox.workers_changed = true; // prompt limits are in tokens
    }
}
