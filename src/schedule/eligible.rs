//! Eligibility of each rank for one request, and cost factors of preferences.
//!
//! Combines constraints, rank status, load and class. Each rank has at most one excluding [`Filter`], the first in
//! order. A request without constraints in a pool without limits and restrictions costs nothing. `admission` decides on
//! waiting, and `decide` on the choice among eligible ranks.

use std::hash::{Hash, Hasher};
use std::time::Duration;

use xxhash_rust::xxh3::Xxh3;

use super::LoadView;
use super::ResolvedOptions;
use super::rank::Rank;
use super::ranks::Ranks;
use crate::config::{QueueClass, RouterConfig, SessionAffinity};
use crate::engine_load::EngineLimits;
use crate::policy::{RankFilters, RequestFacts};
use crate::protocol::{Slot, Timestamp, WorkerRank};
use crate::queue::ClassId;
use crate::select::{Filter, Removed, preference_factor};

/// Minimum counted progress of a slow start, so that first requests on a new rank cost ten times as much.
const PROGRESS_MIN: f64 = 0.1;

/// Rules derived from the configuration.
#[derive(Debug)]
pub(super) struct Rules {
    /// Whether load and age never exclude or penalize a rank.
    pub(super) lenient: bool,
    overload: Limits,
    overload_blocks_frac: Option<f64>,
    active_requests_max: Option<u32>,
    /// Busy limits by class.
    busy: Vec<Limits>,
    filters: RankFilters,
    seed: u64,
    block_size: u32,
    slow_start: Option<SlowStart>,
    /// Duration of the slow return after an ejection.
    slow_return: Option<Duration>,
    /// Overload limits of engine-reported load.
    pub(super) engine: EngineLimits,
    pub(super) session_affinity: SessionAffinity,
    session_factor: f64,
    /// Whether ranks without KV events are credited with the contexts of their sessions.
    pub(super) credits_sessions: bool,
}

#[derive(Clone, Copy, Debug)]
struct SlowStart {
    fill: f64,
    longest: Duration,
}

/// A limit of prefill tokens.
#[derive(Clone, Copy, Debug, Default)]
struct Limits {
    prefill_tokens: Option<u64>,
    prefill_frac: Option<f64>,
    /// Base of the share for workers that do not report `max_num_batched_tokens`.
    unstated_batched_tokens: u32,
}

impl Limits {
    fn any(&self) -> bool {
        self.prefill_tokens.is_some() || self.prefill_frac.is_some()
    }

    #[expect(clippy::cast_precision_loss, reason = "token counts stay far below 2^53")]
    fn exceeded_by(&self, rank: &Rank) -> bool {
        let tokens = rank.prefill_tokens_max();
        let step = rank.about.traits.max_num_batched_tokens.unwrap_or(self.unstated_batched_tokens);
        self.prefill_tokens.is_some_and(|limit| tokens > limit)
            || self.prefill_frac.is_some_and(|frac| tokens as f64 > frac * f64::from(step))
    }
}

/// Inputs of eligibility from a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct EligibilityInputs<'a> {
    pub(super) number: u64,
    pub(super) prompt_tokens: u32,
    pub(super) options: Option<&'a ResolvedOptions>,
    /// Last rank of its session.
    pub(super) session: Option<WorkerRank>,
    /// Whether its program begins: the last rank of its session holds little of it.
    pub(super) begins: bool,
    /// Class whose busy ranks it avoids.
    pub(super) class: Option<ClassId>,
    /// Slots of ranks whose caches are full of other programs, in order.
    pub(super) full: &'a [Slot],
}

/// Eligibility of every rank for one request, by position.
#[derive(Debug, Default)]
pub(super) struct Eligibility {
    /// Number of ranks if all are eligible without cost factors: the usual case, which fills in nothing.
    all_open: Option<usize>,
    refused_by: Vec<Option<Filter>>,
    /// Cost factors; empty if all are 1.
    factors: Vec<f64>,
}

impl Eligibility {
    /// Whether all ranks are eligible without cost factors.
    #[inline]
    pub(super) fn is_plain(&self) -> bool {
        self.all_open.is_some()
    }

    #[inline]
    pub(super) fn is_open(&self, position: usize) -> bool {
        self.is_plain() || self.refused_by[position].is_none()
    }

    pub(super) fn any_open(&self) -> bool {
        self.all_open.map_or_else(|| self.refused_by.iter().any(Option::is_none), |ranks| ranks > 0)
    }

    /// Number of eligible ranks.
    pub(super) fn count_open(&self) -> usize {
        self.all_open.unwrap_or_else(|| self.refused_by.iter().filter(|filter| filter.is_none()).count())
    }

    /// Whether waiting can help: some rank is eligible now or could be later.
    pub(super) fn may_open(&self) -> bool {
        let may_open = || self.refused_by.iter().any(|filter| filter.is_none_or(Filter::passes));
        self.all_open.map_or_else(may_open, |ranks| ranks > 0)
    }

    /// Whether a request without an eligible rank waits for one: all are busy, full, or asleep.
    pub(super) fn waits(&self) -> bool {
        self.has(Filter::Busy) || self.has(Filter::Full) || self.has(Filter::Asleep) && !self.has(Filter::Overloaded)
    }

    pub(super) fn has(&self, filter: Filter) -> bool {
        self.refused_by.contains(&Some(filter))
    }

    pub(super) fn of(&self, position: usize) -> Option<Filter> {
        self.refused_by.get(position).copied().flatten()
    }

    #[inline]
    pub(super) fn factor(&self, position: usize) -> f64 {
        self.factors.get(position).copied().unwrap_or(1.0)
    }

    pub(super) fn removed(&self) -> Removed {
        Removed::count(self.refused_by.iter().copied())
    }

    /// Eligible positions, in rank order.
    pub(super) fn open(&self) -> impl Iterator<Item = usize> {
        let ranks = self.all_open.unwrap_or(self.refused_by.len());
        (0..ranks).filter(|&position| self.is_open(position))
    }

    /// Excludes eligible ranks for which `refuse` holds.
    pub(super) fn refuse(&mut self, filter: Filter, refuse: impl Fn(usize) -> bool) {
        for (position, refused_by) in self.refused_by.iter_mut().enumerate() {
            if refused_by.is_none() && refuse(position) {
                *refused_by = Some(filter);
            }
        }
    }

    /// If `keep` holds for any eligible rank, excludes the others.
    fn restrict(&mut self, filter: Filter, keep: impl Fn(usize) -> bool) {
        if self.open().any(&keep) {
            self.refuse(filter, |position| !keep(position));
        }
    }
}

impl Rules {
    pub(super) fn new(config: &RouterConfig, classes: &[QueueClass], filters: RankFilters) -> Self {
        let unstated_batched_tokens = config.queue.unstated_batched_tokens();
        let limits = |prefill_tokens, prefill_frac| Limits { prefill_tokens, prefill_frac, unstated_batched_tokens };
        let busy = |class: &QueueClass| limits(class.busy_prefill_tokens, class.busy_prefill_frac);
        let longest = Duration::from_millis(config.slow_start.max_ms);
        let slow_start = SlowStart { fill: config.slow_start.fill, longest };
        let overload = limits(config.overload.prefill_tokens, config.overload.prefill_frac);
        let active_requests_max = config.overload.active_requests_max;
        let overloads = overload.any() || config.overload.blocks_frac.is_some() || active_requests_max.is_some();
        Self {
            lenient: !overloads && config.slow_start.fill == 0.0 && filters.is_empty(),
            filters,
            seed: config.seed,
            block_size: config.block_size_or_assumed(),
            overload,
            overload_blocks_frac: config.overload.blocks_frac,
            active_requests_max,
            busy: classes.iter().map(busy).collect(),
            slow_start: (config.slow_start.fill > 0.0).then_some(slow_start),
            slow_return: Some(Duration::from_millis(config.slow_start.return_ms)).filter(|longest| !longest.is_zero()),
            engine: EngineLimits {
                waiting: config.overload.engine_waiting,
                kv_usage: config.overload.engine_kv_usage,
                stale_after: Duration::from_millis(config.engine_load.stale_ms),
            },
            session_affinity: config.session.affinity,
            session_factor: preference_factor(config.session.weight),
            credits_sessions: config.events.mode.reads_events(),
        }
    }

    /// Evaluates eligibility and cost factor of every rank.
    pub(super) fn evaluate(&self, ranks: &Ranks, inputs: EligibilityInputs<'_>, eligibility: &mut Eligibility) {
        let (all, statuses) = (ranks.as_slice(), ranks.statuses());
        eligibility.factors.clear();
        eligibility.refused_by.clear();
        let restricts = inputs.options.is_some_and(ResolvedOptions::restricts_ranks);
        let plain = self.lenient && !restricts && inputs.session.is_none() && inputs.class.is_none();
        let good = !ranks.troubled;
        eligibility.all_open = (plain && good).then_some(all.len());
        if eligibility.is_plain() {
            return;
        }
        eligibility.refused_by.resize(all.len(), None);
        if let Some(options) = inputs.options {
            for (refused_by, rank) in eligibility.refused_by.iter_mut().zip(all) {
                *refused_by = options.constraints.refused_by(rank.rank, &rank.about.traits);
            }
        }
        if !self.filters.is_empty() {
            let facts = self.request_facts(&inputs);
            eligibility.refuse(Filter::Custom, |position| {
                !self.filters.accept(&facts, all[position].rank, &all[position].about.traits)
            });
        }
        if !good {
            eligibility.refuse(Filter::Unavailable, |position| statuses[position].unavailable);
            eligibility.refuse(Filter::Draining, |position| statuses[position].draining);
            eligibility.refuse(Filter::Asleep, |position| statuses[position].asleep);
            // Before the session filter: a down rank keeps no session.
            eligibility.restrict(Filter::Unavailable, |position| !statuses[position].down);
        }
        if let Some(bound) = inputs.session.filter(|_| self.session_affinity == SessionAffinity::Hard) {
            eligibility.restrict(Filter::Pin, |position| all[position].rank == bound);
        }
        if !good {
            // If no rank responds, the board decides.
            eligibility.restrict(Filter::Unresponsive, |position| !statuses[position].unresponsive);
            // If every rank refuses, the load is spread over all of them.
            eligibility.restrict(Filter::Refusing, |position| !statuses[position].refusing);
        }
        if let Some(adapter) = inputs.options.and_then(|options| options.lora_name.as_deref()) {
            eligibility.restrict(Filter::Lora, |position| all[position].about.traits.lora_adapters.contains(adapter));
        }
        eligibility.refuse(Filter::Overloaded, |position| {
            let status = statuses[position];
            let reported = status.overloaded || status.engine_overloaded;
            reported || !self.lenient && self.is_overloaded(&all[position])
        });
        if let Some(limits) = inputs.class.and_then(|class| self.busy.get(class.0 as usize)) {
            eligibility.refuse(Filter::Busy, |position| limits.exceeded_by(&all[position]));
        }
        if !inputs.full.is_empty() {
            eligibility.refuse(Filter::Full, |position| inputs.full.binary_search(&all[position].slot()).is_ok());
        }
        if let Some(options) = inputs.options.filter(|options| options.constraints.pin.is_some()) {
            eligibility.restrict(Filter::Pin, |position| options.constraints.prefers(all[position].rank));
        }
        self.weigh(ranks, inputs, eligibility);
    }

    /// Number of ranks that would be eligible. Same result as a full evaluation, but with a single rank for pinned
    /// requests, of which many may wait.
    pub(super) fn count_open_to(
        &self,
        ranks: &Ranks,
        inputs: EligibilityInputs<'_>,
        eligibility: &mut Eligibility,
    ) -> usize {
        let pin = inputs.options.and_then(|options| options.constraints.hard_pin());
        let Some((options, rank)) =
            inputs.options.zip(pin.and_then(|pin| Some(WorkerRank::new(pin.worker, pin.rank?))))
        else {
            self.evaluate(ranks, inputs, eligibility);
            return eligibility.count_open();
        };
        let Some(position) = ranks.position(rank) else { return 0 };
        let (rank, status) = (&ranks.as_slice()[position], ranks.statuses()[position]);
        let busy = inputs.class.and_then(|class| self.busy.get(class.0 as usize));
        let refused = options.constraints.refused_by(rank.rank, &rank.about.traits).is_some();
        let restricted = status.unavailable || status.draining || status.asleep;
        let restricted = restricted || status.overloaded || status.engine_overloaded;
        let busy = busy.is_some_and(|limits| limits.exceeded_by(rank));
        let loaded = self.is_overloaded(rank) || busy || inputs.full.binary_search(&rank.slot()).is_ok();
        let accepted =
            self.filters.is_empty() || self.filters.accept(&self.request_facts(&inputs), rank.rank, &rank.about.traits);
        usize::from(!refused && accepted && !restricted && !loaded)
    }

    /// Attributes of a request for policies, scorers and filters.
    pub(super) fn request_facts<'a>(&self, inputs: &EligibilityInputs<'a>) -> RequestFacts<'a> {
        RequestFacts {
            request: inputs.number,
            seed: self.seed,
            prompt_tokens: inputs.prompt_tokens,
            block_size: self.block_size,
            expected_output_tokens: inputs.options.and_then(|options| options.expected_output_tokens),
            lora_name: inputs.options.and_then(|options| options.lora_name.as_deref()),
            session_id: inputs.options.and_then(|options| options.session_id.as_deref()),
        }
    }

    /// A number that requests share for which the custom filters accept the same ranks; 0 without filters.
    pub(super) fn filter_lane(&self, ranks: &Ranks, inputs: &EligibilityInputs<'_>) -> u64 {
        if self.filters.is_empty() {
            return 0;
        }
        let facts = self.request_facts(inputs);
        let mut hasher = Xxh3::new();
        for rank in ranks.as_slice() {
            self.filters.accept(&facts, rank.rank, &rank.about.traits).hash(&mut hasher);
        }
        hasher.finish()
    }

    fn weigh(&self, ranks: &Ranks, inputs: EligibilityInputs<'_>, eligibility: &mut Eligibility) {
        let liked = inputs.options.filter(|options| !options.constraints.preferred_taints.is_empty());
        let traits_of = |bound| Some(&ranks.as_slice()[ranks.position(bound)?].about.traits);
        let goes_by_room =
            |bound| inputs.begins && traits_of(bound).is_some_and(|traits| traits.total_kv_blocks.is_some());
        let is_soft = self.session_affinity == SessionAffinity::Soft;
        let session = inputs.session.filter(|bound| is_soft && !goes_by_room(*bound));
        if liked.is_none() && session.is_none() && self.slow_start.is_none() && !ranks.any_returning() {
            return;
        }
        eligibility.factors.extend(ranks.as_slice().iter().map(|rank| {
            let taints = liked.map_or(1.0, |options| options.constraints.cost_factor(&rank.about.traits));
            let session = if session == Some(rank.rank) { self.session_factor } else { 1.0 };
            taints * session * rank.about.slow_start_factor.max(rank.about.return_factor)
        }));
    }

    #[expect(clippy::cast_precision_loss, reason = "block counts stay far below 2^53")]
    fn is_overloaded(&self, rank: &Rank) -> bool {
        let full = self.overload_blocks_frac.zip(rank.about.traits.total_kv_blocks);
        self.overload.exceeded_by(rank)
            || self.active_requests_max.is_some_and(|max| rank.requests() >= max)
            || full.is_some_and(|(frac, blocks)| rank.active_blocks_max() as f64 > frac * f64::from(blocks))
    }

    /// Cost factor of a joining rank.
    pub(super) fn slow_start_factor(&self) -> f64 {
        if self.slow_start.is_some() { 1.0 / PROGRESS_MIN } else { 1.0 }
    }

    /// Cost factor of a rank that returns from an ejection.
    pub(super) fn slow_return_factor(&self) -> f64 {
        if self.slow_return.is_some() { 1.0 / PROGRESS_MIN } else { 1.0 }
    }

    /// Reads engine-reported load, if any limit uses it.
    pub(super) fn look_at_engines<V: LoadView>(&self, ranks: &mut Ranks, loads: &V, now: Timestamp) {
        if self.engine.any() {
            ranks.look_at_engines(&self.engine, loads, now);
        }
    }

    /// Advances slow starts.
    pub(super) fn warm_up<V: LoadView>(&self, ranks: &mut Ranks, loads: &V, now: Timestamp) {
        if let Some(longest) = self.slow_return {
            let progress = |passed: Duration| passed.as_secs_f64() / longest.as_secs_f64();
            ranks.warm_returning(|passed| 1.0 / progress(passed).clamp(PROGRESS_MIN, 1.0), now);
        }
        let Some(SlowStart { fill, longest }) = self.slow_start else { return };
        if !ranks.as_slice().iter().any(Rank::is_starting) {
            return;
        }
        let mut held: Vec<u32> = ranks.as_slice().iter().map(|rank| loads.held_blocks(rank.slot())).collect();
        held.sort_unstable();
        let median = held.get(held.len() / 2).copied().unwrap_or(0);
        for rank in ranks.iter_mut().filter(|rank| rank.is_starting()) {
            let wanted = fill * f64::from(rank.about.traits.total_kv_blocks.unwrap_or(median));
            let filled = if wanted > 0.0 { f64::from(loads.held_blocks(rank.slot())) / wanted } else { 1.0 };
            let waited = now.since(rank.about.since).as_secs_f64() / longest.as_secs_f64();
            rank.about.slow_start_factor = 1.0 / filled.max(waited).clamp(PROGRESS_MIN, 1.0);
        }
    }
}
