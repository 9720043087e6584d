//! Choice of a rank by the `latency` cost without a look at most ranks.
//!
//! Lower bounds exclude the ranks that cannot win. Of the others the cost is computed, and the exact load is queried
//! only where it could lower the best cost significantly. Decisions depend on the boards and on replies that they asked
//! for themselves, so a batch decides like a serial run.

use smallvec::SmallVec;

use super::columns::SHARED_BLOCKS_ASSUMED;
use super::formula::{LatencyCost, LatencyFacts, Real};
use super::lanes::{GroupCost, Lanes, RankGroup, WorkGroup};
use crate::policy::Bounds;
use crate::protocol::Slot;
use crate::schedule::LoadView;
use crate::schedule::case::Case;
use crate::schedule::choice::Choice;
use crate::schedule::eligible::Eligibility;
use crate::select::{RankOverlap, TierOverlap};

/// A rank is a contender if its cost may be below this multiple of the lowest known cost. Costs are estimates, and
/// smaller differences do not matter.
const CONTENDER_FACTOR: f64 = 0.98;

/// A rank is queried if its cost may be below this multiple of the lowest known cost. A query costs a message, and
/// delays the decision. Choices of a busy fleet of 512 ranks were equal at 0.9 and 1.0, with a sixth of the queries.
const QUERY_FACTOR: f64 = 0.9;

/// Attempts to find a rank that ties with the lowest cost.
const TIES_TRIED_MAX: usize = 4;

/// The ranks that may win a request.
#[derive(Debug, Default)]
pub(in crate::schedule) struct LatencySearch {
    /// Cost of the request.
    cost: Option<LatencyCost>,
    /// Overlap of each rank, by position.
    overlaps: Vec<TierOverlap>,
    /// Work of the request on each rank, at least.
    work: Vec<WorkGroup>,
    /// Lower bound of the cost of each rank, and the least of each group.
    bounds: Vec<(Lanes, f32)>,
    /// The ranks whose costs were computed.
    found: SmallVec<[Contender; 16]>,
}

/// A rank that may win a request.
#[derive(Clone, Copy, Debug)]
struct Contender {
    position: usize,
    bounds: Bounds,
    /// The facts of the upper bound.
    facts: LatencyFacts,
}

impl LatencySearch {
    /// Lists the contenders whose exact load could lower the best cost significantly.
    pub(in crate::schedule) fn list<T, V: LoadView>(
        &mut self,
        case: &Case<'_, T, V>,
        eligibility: &Eligibility,
        slots: &mut Vec<Slot>,
    ) {
        self.find(case, eligibility);
        let most = QUERY_FACTOR * self.least_hi();
        let inexact = self.found.iter().filter(|known| known.bounds.lo < known.bounds.hi && known.bounds.lo < most);
        slots.extend(inexact.map(|known| case.ranks().as_slice()[known.position].slot()));
    }

    /// The contender of the lowest cost, or a tie with it.
    pub(in crate::schedule) fn choose<T, V: LoadView>(
        &mut self,
        case: &Case<'_, T, V>,
        eligibility: &Eligibility,
        settle: bool,
        is_listed: bool,
    ) -> Choice {
        // A reply, or its absence, may have made a queried rank ineligible.
        if !is_listed || self.found.iter().any(|known| !eligibility.is_open(known.position)) {
            self.find(case, eligibility);
        }
        if !self.resolve(case, eligibility, settle) {
            return Choice::QueryAgain;
        }
        let ranks = case.ranks().as_slice();
        let costs = self.found.iter().map(|known| (known.position, ranks[known.position].rank, known.bounds.hi));
        let Some(cheapest) = case.draw().cheapest(costs) else { return case.drawn(eligibility) };
        let room = case.room_to_begin(cheapest);
        if ranks[cheapest].requests() > 0 && room.is_none() {
            return Choice::Rank(cheapest);
        }
        let least = self.least_hi();
        let cached_tokens = case.own_hit(self.cached_tokens_at(case, cheapest));
        Choice::Rank(self.tie(case, eligibility, (least, cached_tokens), room).unwrap_or(cheapest))
    }

    /// Forgets the last request.
    pub(in crate::schedule) fn clear(&mut self) {
        self.found.clear();
    }

    /// The cost of the request and the facts of the rank at `position`, if that is one of the contenders.
    pub(in crate::schedule) fn evaluated(&self, position: usize) -> Option<(LatencyCost, LatencyFacts)> {
        let known = self.found.iter().find(|known| known.position == position)?;
        self.cost.map(|cost| (cost, known.facts))
    }

    /// Lowest upper bound.
    fn least_hi(&self) -> f64 {
        self.found.iter().map(|contender| contender.bounds.hi).fold(f64::INFINITY, f64::min)
    }

    /// Replaces the bounds of the queried contenders by their exact costs. Returns whether all replies are there.
    fn resolve<T, V: LoadView>(&mut self, case: &Case<'_, T, V>, eligibility: &Eligibility, settle: bool) -> bool {
        let Some(cost) = self.cost else { return true };
        let before = self.least_hi();
        let most = QUERY_FACTOR * before;
        for known in &mut self.found {
            if known.bounds.lo >= known.bounds.hi || known.bounds.lo >= most {
                continue;
            }
            let rank = &case.ranks().as_slice()[known.position];
            if !settle && !rank.has_reply() && !case.ranks().statuses()[known.position].unresponsive {
                return false;
            }
            let mut projected = rank.project(case.candidate);
            if projected.potential_blocks.0 < projected.potential_blocks.1 {
                projected.take_worst();
            }
            known.facts = case.latency_facts(rank, self.overlaps[known.position], &projected);
            let bounds = case.latency_bounds(&cost, rank, &projected, &known.facts);
            known.bounds = bounds.times(eligibility.factor(known.position));
        }
        let after = self.least_hi();
        if after > before {
            // The loads have increased since the boards were read, so other ranks may win.
            self.add_all(case, eligibility, CONTENDER_FACTOR * after);
        }
        true
    }

    /// Finds the ranks that may win, with bounds of their costs by the boards alone.
    fn find<T, V: LoadView>(&mut self, case: &Case<'_, T, V>, eligibility: &Eligibility) {
        let cost = case.latency_cost();
        self.found.clear();
        self.cost = Some(cost);
        self.fill_work(case, &cost);
        self.fill_bounds(case, eligibility, &cost);
        let least = self.bounds.iter().enumerate().min_by(|a, b| a.1.1.total_cmp(&b.1.1));
        let Some((group, (lanes, least))) = least.filter(|(_, (_, least))| least.is_finite()) else { return };
        let Some(lane) = lanes.iter().position(|bound| bound == least) else { return };
        if group * RankGroup::RANKS + lane >= case.ranks().as_slice().len() {
            return; // a group without ranks
        }
        let hi = self.add(case, eligibility, group * RankGroup::RANKS + lane);
        self.add_all(case, eligibility, CONTENDER_FACTOR * hi);
    }

    /// Computes the least work of the request on each rank.
    fn fill_work<T, V: LoadView>(&mut self, case: &Case<'_, T, V>, cost: &LatencyCost) {
        let (prompt_tokens, fingerprint) = (case.pending.request.prompt_tokens, case.candidate.fingerprint);
        let reusable_tokens = case.settings.pool.reusable_tokens(prompt_tokens);
        let split = |cached_tokens: u32| {
            let (copied, rest) = cost.work_split(prompt_tokens, cached_tokens.min(reusable_tokens));
            (f32::of(copied), f32::of(rest))
        };
        let counts = case.counts_overlap();
        let shared_blocks = if fingerprint.block_count() > 0 { SHARED_BLOCKS_ASSUMED } else { 0 };
        let usual_blocks = usual_blocks(&case.pending.request.overlaps, case.ranks().as_slice().len());
        let assumed_blocks = if counts { shared_blocks.max(usual_blocks) } else { 0 };
        let assumed_tokens = case.tokens(assumed_blocks.into());
        let (copied, rest) = split(assumed_tokens);
        let Some(columns) = case.ranks().columns() else { return };
        let (pool, Self { work, overlaps, .. }) = (case.settings.pool, self);
        work.clear();
        let same = WorkGroup { copied: [copied; RankGroup::RANKS], rest: [rest; RankGroup::RANKS] };
        work.resize(columns.groups().len(), same);
        if !counts {
            return case.visit_overlaps(overlaps, |_, _| ());
        }
        let (work, mut last) = (work.as_mut_slice(), (0, (copied, rest)));
        let mut lower = |position: usize, cached_tokens: u32| {
            if last.0 != cached_tokens {
                last = (cached_tokens, split(cached_tokens));
            }
            let (group, lane) = (&mut work[position / RankGroup::RANKS], position % RankGroup::RANKS);
            let (copied, rest) = last.1;
            group.copied[lane] = group.copied[lane].lesser(copied);
            group.rest[lane] = group.rest[lane].lesser(rest);
        };
        case.visit_overlaps(overlaps, |position, overlap| {
            let cached_tokens = pool.cached_tokens(overlap, prompt_tokens);
            if cached_tokens > assumed_tokens {
                lower(position, cached_tokens);
            }
        });
        // Up to the longest overlap, shared blocks do not count.
        let ignored_blocks = assumed_blocks.max(case.pending.longest_blocks);
        columns.visit_sharers(fingerprint, ignored_blocks, |position, blocks| {
            lower(position, case.tokens(blocks.into()));
        });
    }

    /// Computes lower bounds of the cost of each rank, infinite for ineligible ones.
    fn fill_bounds<T, V: LoadView>(&mut self, case: &Case<'_, T, V>, eligibility: &Eligibility, cost: &LatencyCost) {
        let Some(columns) = case.ranks().columns() else { return };
        let own_blocks = f64::from(case.pending.request.prompt_tokens) / f64::from(cost.block_size);
        let now_seconds = columns.seconds(case.ranks().refreshed_at());
        let cost = GroupCost::new(cost, now_seconds, columns.least_own_step_seconds(own_blocks));
        let Self { work, bounds, .. } = self;
        bounds.clear();
        bounds.extend(columns.groups().iter().zip(work.iter()).map(|(loads, work)| cost.bounds(loads, work)));
        if eligibility.is_plain() {
            return;
        }
        let ranks = case.ranks().as_slice().len();
        let weighed = |position: usize, bound: f32| {
            let is_open = position < ranks && eligibility.is_open(position);
            if is_open { bound * f32::of(eligibility.factor(position)) } else { f32::INFINITY }
        };
        for (group, (lanes, least)) in bounds.iter_mut().enumerate() {
            *least = f32::INFINITY;
            for (lane, bound) in lanes.iter_mut().enumerate() {
                *bound = weighed(group * RankGroup::RANKS + lane, *bound);
                *least = least.min(*bound);
            }
        }
    }

    /// Adds the ranks whose cost may be below `most`.
    fn add_all<T, V: LoadView>(&mut self, case: &Case<'_, T, V>, eligibility: &Eligibility, most: f64) {
        let mut most = GroupCost::limit(most);
        for group in 0..self.bounds.len() {
            let (lanes, least) = self.bounds[group];
            if f64::from(least) >= most {
                continue;
            }
            for (lane, bound) in lanes.into_iter().enumerate() {
                if f64::from(bound) < most {
                    let hi = self.add(case, eligibility, group * RankGroup::RANKS + lane);
                    most = most.min(GroupCost::limit(CONTENDER_FACTOR * hi));
                }
            }
        }
    }

    /// The idle rank with the least recent work among those that tie with the lowest cost `least` and have no fewer than
    /// `cached_tokens` cached, so that neither load nor a hit is traded for an even distribution. If a program begins, the
    /// rank with the most `room` for its context, idle or not.
    fn tie<T, V: LoadView>(
        &mut self,
        case: &Case<'_, T, V>,
        eligibility: &Eligibility,
        (least, cached_tokens): (f64, u32),
        room: Option<u32>,
    ) -> Option<usize> {
        let columns = case.ranks().columns()?;
        let most = least * case.settings.tie_factor;
        let most_bound = f32::of(GroupCost::limit(most));
        let draw = case.draw();
        let mut tried: SmallVec<[usize; TIES_TRIED_MAX]> = SmallVec::new();
        while tried.len() < TIES_TRIED_MAX {
            let groups = columns.groups().iter().zip(&self.bounds).enumerate();
            let ties = groups.flat_map(|(group, (loads, (bounds, _)))| {
                let is_tie =
                    move |lane: &usize| bounds[*lane] <= most_bound && (room.is_some() || loads.requests[*lane] == 0.0);
                (0..RankGroup::RANKS).filter(is_tie).map(move |lane| group * RankGroup::RANKS + lane)
            });
            let key = |position: usize| draw.key(case.ranks().as_slice()[position].rank);
            let position = ties.filter(|position| !tried.contains(position)).min_by(|a, b| {
                let order = case.order_by_room(room, *a, *b);
                let order = order.then_with(|| columns.recent_work(*a).order(columns.recent_work(*b)));
                order.then_with(|| key(*a).cmp(&key(*b)))
            })?;
            if self.add(case, eligibility, position) <= most && self.cached_tokens_at(case, position) >= cached_tokens {
                return Some(position);
            }
            tried.push(position);
        }
        None
    }

    fn cached_tokens_at<T, V: LoadView>(&self, case: &Case<'_, T, V>, position: usize) -> u32 {
        let rank = &case.ranks().as_slice()[position];
        case.expected_cached_tokens(rank, self.overlaps[position], &rank.project(case.candidate))
    }

    /// Adds a rank with the bounds of its cost, unless it is there. Returns the upper bound.
    fn add<T, V: LoadView>(&mut self, case: &Case<'_, T, V>, eligibility: &Eligibility, position: usize) -> f64 {
        if let Some(known) = self.found.iter().find(|known| known.position == position) {
            return known.bounds.hi;
        }
        let Some(cost) = &self.cost else { return f64::INFINITY };
        let rank = &case.ranks().as_slice()[position];
        let mut projected = rank.project_board(case.candidate);
        if case.ranks().statuses()[position].unresponsive {
            projected.take_worst();
        }
        let facts = case.latency_facts(rank, self.overlaps[position], &projected);
        let bounds = case.latency_bounds(cost, rank, &projected, &facts).times(eligibility.factor(position));
        self.found.push(Contender { position, bounds, facts });
        bounds.hi
    }
}

/// Blocks of a prefix that most of `ranks` ranks hold, such as a system prompt; 0 if there is none.
fn usual_blocks(overlaps: &[RankOverlap], ranks: usize) -> u32 {
    if overlaps.len() < ranks / 4 * 3 {
        return 0;
    }
    overlaps.iter().map(|known| known.overlap.device_blocks).min().unwrap_or(0)
}
