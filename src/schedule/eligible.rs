//! Who may serve one request: each rank's verdict, and what preferences do to its cost.
//!
//! Owns how constraints, standings, load and class come together. Promises one verdict a rank, that of the first
//! [`Filter`] that refuses it, and that a request without options in a pool without limits and troubles costs nothing.
//! Leaves to `admission` what a verdict means for a wait, and to `decide` the choice among those left.

use std::time::Duration;

use super::LoadView;
use super::ResolvedOptions;
use super::rank::{Rank, Ranks};
use crate::config::{QueueClass, RouterConfig, SessionAffinity};
use crate::engine_load::EngineLimits;
use crate::protocol::{Timestamp, WorkerRank};
use crate::queue::ClassId;
use crate::select::{Filter, Removed, preference_factor};

/// The least progress that a slow start counts as, so that the first requests of a new rank cost ten times as much.
const PROGRESS_MIN: f64 = 0.1;

/// The rules that a configuration makes.
#[derive(Debug)]
pub(super) struct Rules {
    /// Whether load and age stand against nobody, ever.
    lenient: bool,
    overload: Limits,
    overload_blocks_frac: Option<f64>,
    /// Beyond what a rank is busy, by class.
    busy: Vec<Limits>,
    slow_start: Option<SlowStart>,
    /// How long a return from an ejection is slow.
    slow_return: Option<Duration>,
    /// Beyond what a rank is overloaded by its engine's account.
    pub(super) engine: EngineLimits,
    pub(super) session_affinity: SessionAffinity,
    session_factor: f64,
}

#[derive(Clone, Copy, Debug)]
struct SlowStart {
    fill: f64,
    longest: Duration,
}

/// Prefill tokens beyond which something holds of a rank.
#[derive(Clone, Copy, Debug, Default)]
struct Limits {
    prefill_tokens: Option<u64>,
    prefill_frac: Option<f64>,
    /// What the share is of where the rank's worker states no `max_num_batched_tokens`.
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

/// What of a request its eligibility depends on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked<'a> {
    pub(super) options: Option<&'a ResolvedOptions>,
    /// Where its session was served last.
    pub(super) session: Option<WorkerRank>,
    /// The class whose busy ranks it keeps away from.
    pub(super) class: Option<ClassId>,
}

/// Every rank's verdict on one request, by position.
#[derive(Debug, Default)]
pub(super) struct Verdicts {
    /// How many ranks there are, where all of them are open at their own cost: the usual case fills in nothing.
    all_open: Option<usize>,
    refused_by: Vec<Option<Filter>>,
    /// What each cost is multiplied by; empty where no cost is.
    factors: Vec<f64>,
}

impl Verdicts {
    /// Whether all are open, at their own cost.
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

    /// Whether waiting can help: somebody is open, or would be in another moment.
    pub(super) fn may_open(&self) -> bool {
        let may_open = || self.refused_by.iter().any(|verdict| verdict.is_none_or(Filter::passes));
        self.all_open.map_or_else(may_open, |ranks| ranks > 0)
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

    /// Positions that may be chosen, in rank order.
    pub(super) fn open(&self) -> impl Iterator<Item = usize> {
        let ranks = self.all_open.unwrap_or(self.refused_by.len());
        (0..ranks).filter(|&position| self.is_open(position))
    }

    /// Refuses those that are open and for whom `refuse` holds.
    fn refuse(&mut self, filter: Filter, refuse: impl Fn(usize) -> bool) {
        for (position, verdict) in self.refused_by.iter_mut().enumerate() {
            if verdict.is_none() && refuse(position) {
                *verdict = Some(filter);
            }
        }
    }

    /// If `keep` holds for anybody open, refuses the others.
    fn narrow(&mut self, filter: Filter, keep: impl Fn(usize) -> bool) {
        if self.open().any(&keep) {
            self.refuse(filter, |position| !keep(position));
        }
    }
}

impl Rules {
    pub(super) fn new(config: &RouterConfig, classes: &[QueueClass]) -> Self {
        let unstated_batched_tokens = config.queue.unstated_batched_tokens();
        let limits = |prefill_tokens, prefill_frac| Limits { prefill_tokens, prefill_frac, unstated_batched_tokens };
        let busy = |class: &QueueClass| limits(class.busy_prefill_tokens, class.busy_prefill_frac);
        let longest = Duration::from_millis(config.slow_start.max_ms);
        let slow_start = SlowStart { fill: config.slow_start.fill, longest };
        let overload = limits(config.overload.prefill_tokens, config.overload.prefill_frac);
        let overloads = overload.any() || config.overload.blocks_frac.is_some();
        Self {
            lenient: !overloads && config.slow_start.fill == 0.0,
            overload,
            overload_blocks_frac: config.overload.blocks_frac,
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
        }
    }

    /// Fills in every rank's verdict and factor.
    pub(super) fn judge(&self, ranks: &Ranks, asked: Asked<'_>, verdicts: &mut Verdicts) {
        let (all, standings) = (ranks.as_slice(), ranks.standings());
        verdicts.factors.clear();
        verdicts.refused_by.clear();
        let plain = self.lenient && asked.options.is_none() && asked.class.is_none();
        let good = ranks.all_good();
        verdicts.all_open = (plain && good).then_some(all.len());
        if verdicts.is_plain() {
            return;
        }
        verdicts.refused_by.resize(all.len(), None);
        if let Some(options) = asked.options {
            for (verdict, rank) in verdicts.refused_by.iter_mut().zip(all) {
                *verdict = options.constraints.refused_by(rank.rank, &rank.about.traits);
            }
        }
        if !good {
            verdicts.refuse(Filter::Unavailable, |position| standings[position].unavailable);
            verdicts.refuse(Filter::Draining, |position| standings[position].draining);
            // Before the session: a rank that is down keeps none.
            verdicts.narrow(Filter::Unavailable, |position| !standings[position].down);
        }
        if let Some(bound) = asked.session.filter(|_| self.session_affinity == SessionAffinity::Hard) {
            verdicts.narrow(Filter::Pin, |position| all[position].rank == bound);
        }
        if !good {
            // When nobody answers, the board must do.
            verdicts.narrow(Filter::Unresponsive, |position| !standings[position].suspect);
            // When every rank refuses, the load is spread over all of them.
            verdicts.narrow(Filter::Refusing, |position| !standings[position].refusing);
        }
        if let Some(adapter) = asked.options.and_then(|options| options.lora_name.as_deref()) {
            verdicts.narrow(Filter::Lora, |position| all[position].about.traits.lora_adapters.contains(adapter));
        }
        verdicts.refuse(Filter::Overloaded, |position| {
            let standing = standings[position];
            let says_so = standing.overloaded || standing.engine_overloaded;
            says_so || !self.lenient && self.is_overloaded(&all[position])
        });
        if let Some(limits) = asked.class.and_then(|class| self.busy.get(class.0 as usize)) {
            verdicts.refuse(Filter::Busy, |position| limits.exceeded_by(&all[position]));
        }
        if let Some(options) = asked.options.filter(|options| options.constraints.pin.is_some()) {
            verdicts.narrow(Filter::Pin, |position| options.constraints.prefers(all[position].rank));
        }
        self.weigh(ranks, asked, verdicts);
    }

    /// Whether anybody would be open to the request. The same as judging it, but a look at one rank where it is pinned to
    /// one: many may wait so.
    pub(super) fn is_open_to(&self, ranks: &Ranks, asked: Asked<'_>, verdicts: &mut Verdicts) -> bool {
        let pin = asked.options.and_then(|options| options.constraints.hard_pin());
        let Some((options, rank)) = asked.options.zip(pin.and_then(|pin| Some(WorkerRank::new(pin.worker, pin.rank?))))
        else {
            self.judge(ranks, asked, verdicts);
            return verdicts.any_open();
        };
        let Some(position) = ranks.position(rank) else { return false };
        let (rank, standing) = (&ranks.as_slice()[position], ranks.standings()[position]);
        let busy = asked.class.and_then(|class| self.busy.get(class.0 as usize));
        let refused = options.constraints.refused_by(rank.rank, &rank.about.traits).is_some();
        let stands_against =
            standing.unavailable || standing.draining || standing.overloaded || standing.engine_overloaded;
        let loaded = self.is_overloaded(rank) || busy.is_some_and(|limits| limits.exceeded_by(rank));
        !refused && !stands_against && !loaded
    }

    fn weigh(&self, ranks: &Ranks, asked: Asked<'_>, verdicts: &mut Verdicts) {
        let liked = asked.options.filter(|options| !options.constraints.preferred_taints.is_empty());
        let session = asked.session.filter(|_| self.session_affinity == SessionAffinity::Soft);
        if liked.is_none() && session.is_none() && self.slow_start.is_none() && !ranks.any_returning() {
            return;
        }
        verdicts.factors.extend(ranks.as_slice().iter().map(|rank| {
            let taints = liked.map_or(1.0, |options| options.constraints.cost_factor(&rank.about.traits));
            let session = if session == Some(rank.rank) { self.session_factor } else { 1.0 };
            taints * session * rank.about.start_factor()
        }));
    }

    #[expect(clippy::cast_precision_loss, reason = "block counts stay far below 2^53")]
    fn is_overloaded(&self, rank: &Rank) -> bool {
        let full = self.overload_blocks_frac.zip(rank.about.traits.total_kv_blocks);
        self.overload.exceeded_by(rank)
            || full.is_some_and(|(frac, blocks)| rank.active_blocks_max() as f64 > frac * f64::from(blocks))
    }

    /// What the cost of a rank is multiplied by when it joins.
    pub(super) fn slow_start_factor(&self) -> f64 {
        if self.slow_start.is_some() { 1.0 / PROGRESS_MIN } else { 1.0 }
    }

    /// What the cost of a rank is multiplied by when it returns from an ejection.
    pub(super) fn slow_return_factor(&self) -> f64 {
        if self.slow_return.is_some() { 1.0 / PROGRESS_MIN } else { 1.0 }
    }

    /// Looks at what engines say of themselves, where anything follows from it.
    pub(super) fn look_at_engines<V: LoadView>(&self, ranks: &mut Ranks, loads: &V, now: Timestamp) {
        if self.engine.any() {
            ranks.look_at_engines(&self.engine, loads, now);
        }
    }

    /// Moves slow starts on.
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
