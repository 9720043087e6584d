//! Radix actor: one per index shard, owner of the shard's prefix index.
//!
//! [`ShardShell`] decides. This module counts its effects and publishes its gauges. Replies are sent after the release of the
//! strand.

pub(crate) mod claim;
pub(crate) mod shards;

use std::sync::Arc;

use tokio::sync::OwnedSemaphorePermit;

use crate::actors::delivery::join::{Continuation, Join, ReplyToken};
use crate::actors::delivery::strand::{ActorState, DeferredReply};
use crate::actors::io::clock::Clock;
use crate::actors::telemetry::{Count, CountersOf, Pool};
use crate::actors::views::kv_source::SourceCell;
use crate::actors::views::rank::RankEntry;
use crate::config::RouterConfig;
use crate::index::{Applied, BudgetState};
use crate::predict::{SpeculationCounts, SpeculativePrompts};
use crate::protocol::{BlockHash, WorkerRank};
use crate::select::{RankOverlap, RankTraits};
use crate::shell::shard::{OverlapQueryToken, RegisteredRank, ShardEffect, ShardMsg, ShardShell, SourceState};

/// Messages to an index shard.
pub(crate) type RadixMsg = ShardMsg<OverlapToken, OwnedSemaphorePermit, Arc<SourceCell>>;

/// Reply token of an overlap query.
pub(crate) type OverlapToken = ReplyToken<RankOverlap, dyn OverlapQuery>;

/// Registration of a rank at its shard.
pub(crate) fn registered(entry: &RankEntry, traits: &RankTraits) -> RegisteredRank<Arc<SourceCell>> {
    let RankEntry { rank, slot, generation, .. } = *entry;
    let (holdings, source) = (Arc::clone(&entry.cells.holdings), Arc::clone(&entry.source));
    RegisteredRank { rank, slot, generation, holdings, source, capacity_blocks: traits.total_kv_blocks }
}

impl SourceState for Arc<SourceCell> {
    fn credited(&self, blocks: u32) -> u32 {
        SourceCell::credited(self, blocks)
    }

    fn is_read(&self) -> bool {
        self.state().is_some()
    }
}

/// Continuation of an overlap query, with the prompt's block hashes.
pub(crate) trait OverlapQuery: Continuation<RankOverlap> {
    fn hashes(&self) -> &Arc<[BlockHash]>;
    fn reusable_blocks(&self) -> u32;
}

impl OverlapQueryToken for OverlapToken {
    fn hashes(&self) -> &[BlockHash] {
        self.continuation().hashes()
    }

    fn reusable_blocks(&self) -> u32 {
        self.continuation().reusable_blocks()
    }

    fn extend(&self, overlaps: impl Iterator<Item = RankOverlap>) {
        self.extend(overlaps);
    }
}

/// Creates one more token of an overlap query, for a shard.
pub(crate) fn overlap_token<C: OverlapQuery + 'static>(query: &ReplyToken<RankOverlap, C>) -> OverlapToken {
    query.fork_unsized(|join| -> Arc<Join<RankOverlap, dyn OverlapQuery>> { join })
}

/// One shard of the index.
pub(crate) struct Radix {
    pub(crate) shell: ShardShell<Arc<SourceCell>>,
    pub(crate) clock: Clock,
    /// Called when the contents of a cold rank begin to arrive again.
    pub(crate) on_resync: Box<dyn Fn(WorkerRank) + Send>,
    pub(crate) meters: ShardMeters,
    pub(crate) effects: Vec<ShardEffect<OverlapToken>>,
}

/// A complete query, whose token is dropped after the shard's strand is released.
pub(crate) struct RadixReply(#[expect(dead_code, reason = "dropping it is the reply")] OverlapToken);

impl ActorState for Radix {
    type Msg = RadixMsg;
    type Deferred = RadixReply;

    fn step(&mut self, msg: RadixMsg) -> Option<RadixReply> {
        let changes_contents = matches!(msg, ShardMsg::Apply { .. } | ShardMsg::Register(_) | ShardMsg::Remove(_));
        self.shell.step(msg, &self.clock, &mut self.effects);
        let mut reply = None;
        for effect in self.effects.drain(..) {
            match effect {
                ShardEffect::Replied(token) => reply = Some(RadixReply(token)),
                ShardEffect::Applied(applied) => self.meters.events.add(&applied, &Applied::default()),
                ShardEffect::UnknownRank(unknown_ranks) => {
                    self.meters.events.add(&Applied { unknown_ranks, ..Applied::default() }, &Applied::default());
                }
                ShardEffect::Resynced(rank) => (self.on_resync)(rank),
            }
        }
        self.meters.show(&self.shell, changes_contents);
        reply
    }
}

impl DeferredReply for RadixReply {
    fn deliver(self) {}
}

/// Instruments of a shard.
pub(crate) struct ShardMeters {
    events: CountersOf<Applied>,
    /// `None` without speculative entries.
    speculation: Option<SpeculationCounters>,
    /// `None` without a byte budget.
    budget: Option<BudgetGauges>,
}

impl ShardMeters {
    pub(crate) fn new(pool: &Pool, config: &RouterConfig, shell: &ShardShell<Arc<SourceCell>>, shard: usize) -> Self {
        Self {
            events: CountersOf::new(pool, EVENT_COUNTS),
            speculation: shell.speculative().map(|_| SpeculationCounters::new(pool, shard)),
            budget: config.index.bytes_max.map(|_| BudgetGauges::new(pool, shard)),
        }
    }

    fn show(&mut self, shell: &ShardShell<Arc<SourceCell>>, changes_contents: bool) {
        if let Some((counters, speculative)) = self.speculation.as_mut().zip(shell.speculative()) {
            counters.show(speculative);
        }
        if changes_contents
            && let Some(gauges) = &mut self.budget
            && let Some(state) = shell.index().budget_state()
            && !shell.is_replaced()
        {
            gauges.show(state);
        }
    }
}

/// Counters of what events change.
const EVENT_COUNTS: &[Count<Applied>] = &[
    ("pointsman_kv_event_blocks_total", ("result", "stored"), |applied| applied.stored + applied.adopted),
    ("pointsman_kv_event_blocks_total", ("result", "duplicate"), |applied| applied.duplicates),
    ("pointsman_kv_event_blocks_total", ("result", "copy"), |applied| applied.copies),
    ("pointsman_kv_event_blocks_total", ("result", "waiting"), |applied| applied.waiting),
    ("pointsman_kv_event_blocks_total", ("result", "proven"), |applied| applied.proven),
    ("pointsman_kv_event_blocks_total", ("result", "unknown_content"), |applied| applied.unknown_contents),
    ("pointsman_kv_event_blocks_total", ("result", "group"), |applied| applied.grouped),
    ("pointsman_kv_event_blocks_total", ("result", "removed"), |applied| applied.removed),
    ("pointsman_kv_event_blocks_total", ("result", "gone"), |applied| applied.gone),
    ("pointsman_kv_event_blocks_total", ("result", "unknown_removal"), |applied| applied.unknown_removals),
    ("pointsman_kv_event_blocks_total", ("result", "evicted_removal"), |applied| applied.evicted_removals),
    ("pointsman_kv_events_refused_total", ("reason", "unknown_parent"), |applied| applied.unknown_parents),
    ("pointsman_kv_events_refused_total", ("reason", "unknown_rank"), |applied| applied.unknown_ranks),
];

/// Counters of speculative entries.
const SPECULATION_COUNTS: &[Count<SpeculationCounts>] = &[
    ("pointsman_speculative_blocks_total", ("result", "confirmed"), |counts| counts.confirmed),
    ("pointsman_speculative_blocks_total", ("result", "wrong"), |counts| counts.wrong),
    ("pointsman_speculative_blocks_total", ("result", "retracted"), |counts| counts.retracted),
    ("pointsman_speculative_blocks_total", ("result", "evicted"), |counts| counts.evicted),
    ("pointsman_speculative_blocks_total", ("result", "expired"), |counts| counts.expired),
];

/// Metric handles of speculative entries.
struct SpeculationCounters {
    counters: CountersOf<SpeculationCounts>,
    believed: metrics::Gauge,
    counted: SpeculationCounts,
}

impl SpeculationCounters {
    fn new(pool: &Pool, shard: usize) -> Self {
        Self {
            counters: CountersOf::new(pool, SPECULATION_COUNTS),
            believed: pool.gauge("pointsman_speculative_blocks", &[("shard", &shard.to_string())]),
            counted: SpeculationCounts::default(),
        }
    }

    /// Counts confirmed, retracted and expired entries since the last call.
    fn show(&mut self, speculative: &SpeculativePrompts) {
        let now = speculative.counts();
        let before = std::mem::replace(&mut self.counted, now);
        if now != before {
            self.believed.set(speculative.speculative_blocks() as f64);
            self.counters.add(&now, &before);
        }
    }
}

/// Gauges of a shard with a byte budget.
struct BudgetGauges {
    bytes: metrics::Gauge,
    evicted_blocks: metrics::Counter,
    /// Evicted blocks counted so far.
    shown: u64,
}

impl BudgetGauges {
    fn new(pool: &Pool, shard: usize) -> Self {
        let shard = shard.to_string();
        Self {
            bytes: pool.gauge("pointsman_index_bytes", &[("shard", &shard)]),
            evicted_blocks: pool.counter("pointsman_index_evicted_blocks_total", &[("shard", &shard)]),
            shown: 0,
        }
    }

    fn show(&mut self, state: BudgetState) {
        self.bytes.set(state.bytes as f64);
        if state.evicted_blocks > self.shown {
            self.evicted_blocks.increment(state.evicted_blocks - self.shown);
            self.shown = state.evicted_blocks;
        }
    }
}
