//! Block size of the pool.
//!
//! A configured size never changes. Without one, the first worker that reports a size determines it, and a later worker
//! with another one is rejected. A size that no worker in service reports gives way to the next reported one: an assumed
//! size, because its workers report none, and that of a fleet whose engines have been restarted with another size. A
//! report is a worker's [`block_size`](crate::protocol::WorkerConfig::block_size), or, without it, the size in its KV
//! events.
//!
//! A change of the size replaces the actors that depend on it: scheduler, index shards, sequence actors and readers. It
//! spends no restart budget. Before the first rank it costs nothing. Events can change the size only a few times a minute,
//! so that the data of one engine cannot replace the actors all the time.

use std::time::Duration;

use super::{Child, Membership, MembershipEffect, MembershipReport};
use crate::config::RouterConfig;
use crate::protocol::{
    BlockSizeOrigin, Generation, PoolBlockSize, Slot, Timestamp, WorkerConfig, WorkerConfigError, WorkerId,
};

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

    /// Size that a worker with this configuration reports. Its KV events count until its configuration reports a size, and
    /// as long as it is the same engine.
    pub(super) fn reported_size(&self, worker: WorkerId, config: &WorkerConfig) -> Option<u32> {
        let same_engine = |known: &&super::RegisteredWorker| known.config.endpoint == config.endpoint;
        config.block_size.or_else(|| {
            let known = self.workers.get(&worker).filter(same_engine)?;
            known.block_size.filter(|_| known.config.block_size.is_none())
        })
    }

    /// Takes the size that a worker reports, unless another worker in service reports the present one.
    ///
    /// # Errors
    /// The present size, if the worker reports another one.
    pub(super) fn settle_block_size(
        &mut self,
        worker: WorkerId,
        reported: Option<u32>,
    ) -> Result<(), WorkerConfigError> {
        let present = self.block_size;
        let Some(tokens) = reported else {
            if present.origin == BlockSizeOrigin::Awaited {
                self.use_block_size(PoolBlockSize { origin: BlockSizeOrigin::Assumed, ..present });
            }
            return Ok(());
        };
        if present.origin.is_settled() && tokens == present.tokens {
            return Ok(());
        }
        if present.origin == BlockSizeOrigin::Configured || self.is_reported(present, worker) {
            return Err(WorkerConfigError::BlockSize { worker: tokens, pool: present });
        }
        self.use_block_size(PoolBlockSize { tokens, origin: BlockSizeOrigin::Reported });
        Ok(())
    }

    /// Whether a worker in service besides `except` reports the size.
    fn is_reported(&self, size: PoolBlockSize, except: WorkerId) -> bool {
        let mut others = self.workers.iter().filter(|(worker, known)| **worker != except && !known.draining);
        size.origin == BlockSizeOrigin::Reported && others.any(|(_, known)| known.block_size == Some(size.tokens))
    }

    /// The KV events of a rank have this block size.
    pub(super) fn on_events_sized(&mut self, slot: Slot, generation: Generation, tokens: u32, now: Timestamp) {
        let occupant = self.slots.get(slot).filter(|occupant| !occupant.retiring && occupant.generation == generation);
        let Some(worker) = occupant.map(|occupant| occupant.rank.worker) else { return };
        let Some(known) = self.workers.get_mut(&worker).filter(|known| known.config.block_size.is_none()) else {
            return;
        };
        if tokens != self.block_size.tokens && !self.size_changes.spend(now) {
            return;
        }
        known.block_size = Some(tokens);
        // A disagreement shows in the stream state of the rank: it serves, and its events do not count.
        let _ = self.settle_block_size(worker, Some(tokens));
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
            self.outbox.push(MembershipEffect::Replace { child });
        }
        running.into_iter().for_each(|slot| self.update_reader(slot));
        self.outbox.workers_changed = true; // prompt limits are in tokens
    }
}
