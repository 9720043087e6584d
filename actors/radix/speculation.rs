//! Speculative entries of a shard: cache contents inferred from decisions, before or without events.
//!
//! Combines a shard's [`SpeculativePrompts`] with metrics and a clock. Expired entries are dropped at the shard's next
//! query, decision or event. There is no timer, so the gauge of speculative blocks can lag.
//!
//! Output blocks are counted at the end of a booking: one message per booking instead of one per block. A modelled
//! cache therefore appears emptier than it is, by the output in progress.

#[cfg(feature = "replicas")]
use std::sync::Arc;

use crate::actors::io::clock::Clock;
use crate::actors::telemetry::Pool;
use crate::config::{RouterConfig, SpeculativeConfig};
use crate::index::{Index, Overlaps};
use crate::predict::{SpeculationCounts, SpeculationModel, SpeculativePrompt, SpeculativePrompts};
use crate::protocol::{BlockHash, BookingId, Generation, RouterEvent, Slot, WorkerRank};
#[cfg(feature = "replicas")]
use crate::replica::{RoutedPrompt, RoutedPrompts};

/// Speculative entries of one shard.
pub(crate) struct SpeculativeEntries {
    predictions: SpeculativePrompts,
    clock: Clock,
    counters: SpeculationCounters,
    counted: SpeculationCounts,
    /// Own decisions to send to other replicas, once these exist.
    #[cfg(feature = "replicas")]
    routed: Option<RoutedPrompts>,
}

/// Maximum number of blocks of decisions to send.
#[cfg(feature = "replicas")]
const ROUTED_QUEUE_BLOCKS_MAX: usize = 65_536;

impl SpeculativeEntries {
    /// `None` if the configuration has no speculative entries.
    pub(crate) fn of(config: &RouterConfig, shard: usize, clock: Clock, pool: &Pool) -> Option<Self> {
        // The limit is divided evenly over the shards, like the ranks.
        let blocks_max = u64::from(SpeculativeConfig::BLOCKS_MAX / config.index.shards.max(1)).max(1);
        let predictions = SpeculativePrompts::new(SpeculationModel::of(config)?, blocks_max);
        Some(Self {
            predictions,
            clock,
            counters: SpeculationCounters::new(pool, shard),
            counted: SpeculationCounts::default(),
            #[cfg(feature = "replicas")]
            routed: None,
        })
    }

    pub(crate) fn register(&mut self, rank: WorkerRank, slot: Slot, generation: Generation, capacity: Option<u32>) {
        self.predictions.register(rank, slot, generation, capacity);
    }

    pub(crate) fn remove(&mut self, rank: WorkerRank) {
        self.predictions.remove_rank(rank);
        self.count();
    }

    pub(crate) fn routed(
        &mut self,
        (slot, generation): (Slot, Generation),
        booking: Option<BookingId>,
        speculative_prompt: &SpeculativePrompt,
        index: &Index,
    ) -> Option<WorkerRank> {
        let now = self.clock.now();
        let rank = self.predictions.routed(slot, generation, booking, speculative_prompt, index, now);
        self.count();
        rank
    }

    /// Queues an own decision for the other replicas.
    #[cfg(feature = "replicas")]
    pub(crate) fn queue_routed(&mut self, rank: WorkerRank, speculative_prompt: &SpeculativePrompt) {
        if let Some(routed) = &mut self.routed {
            routed.push(RoutedPrompt { rank, hashes: Arc::clone(&speculative_prompt.hashes) });
        }
    }

    /// Decisions to send, at most `blocks_max` blocks, and the number of those dropped before.
    #[cfg(feature = "replicas")]
    pub(crate) fn take_routed(&mut self, blocks_max: usize) -> (Vec<RoutedPrompt>, u64) {
        let routed = self.routed.get_or_insert_with(|| RoutedPrompts::new(ROUTED_QUEUE_BLOCKS_MAX));
        (routed.take(blocks_max), routed.take_dropped())
    }

    pub(crate) fn released(&mut self, booking: BookingId, output_blocks: u32) {
        self.predictions.output_blocks(booking, output_blocks);
        self.predictions.released(booking, self.clock.now());
        self.count();
    }

    /// Drops expired entries. Called before events, so that events do not confirm entries that had expired.
    pub(crate) fn expire(&mut self) {
        self.predictions.expire(self.clock.now());
    }

    /// Whether entries depend on the set of ranks that publish events.
    pub(crate) fn is_until_events(&self) -> bool {
        self.predictions.is_until_events()
    }

    /// Records whether a rank publishes events.
    pub(crate) fn set_publishes(&mut self, rank: WorkerRank, publishes: bool) {
        self.predictions.set_publishes(rank, publishes);
    }

    pub(crate) fn observe(&mut self, event: &RouterEvent, index: &Index) {
        self.predictions.observe(event, index);
    }

    pub(crate) fn merge_into(&mut self, hashes: &[BlockHash], found: &mut Overlaps) {
        self.predictions.expire(self.clock.now());
        self.predictions.merge_into(hashes, found);
        self.count();
    }

    /// Counts confirmed, retracted and expired entries since the last call.
    pub(crate) fn count(&mut self) {
        let counts = self.predictions.counts();
        let before = std::mem::replace(&mut self.counted, counts);
        if counts != before {
            self.counters.count(&before, &counts);
            self.counters.believed.set(self.predictions.speculative_blocks() as f64);
        }
    }
}

/// Metric handles, cached so that no message resolves one.
struct SpeculationCounters {
    confirmed: metrics::Counter,
    wrong: metrics::Counter,
    retracted: metrics::Counter,
    evicted: metrics::Counter,
    expired: metrics::Counter,
    believed: metrics::Gauge,
}

impl SpeculationCounters {
    fn new(pool: &Pool, shard: usize) -> Self {
        let blocks = |result| pool.counter("pointsman_speculative_blocks_total", &[("result", result)]);
        Self {
            confirmed: blocks("confirmed"),
            wrong: blocks("wrong"),
            retracted: blocks("retracted"),
            evicted: blocks("evicted"),
            expired: blocks("expired"),
            believed: pool.gauge("pointsman_speculative_blocks", &[("shard", &shard.to_string())]),
        }
    }

    fn count(&self, before: &SpeculationCounts, now: &SpeculationCounts) {
        let counts = [
            (&self.confirmed, now.confirmed - before.confirmed),
            (&self.wrong, now.wrong - before.wrong),
            (&self.retracted, now.retracted - before.retracted),
            (&self.evicted, now.evicted - before.evicted),
            (&self.expired, now.expired - before.expired),
        ];
        for (counter, count) in counts {
            if count > 0 {
                counter.increment(count);
            }
        }
    }
}
