//! Choice of a rank by the `latency` cost without a look at most ranks.
//!
//! Lower bounds exclude the ranks that cannot win. Of the others the cost is computed, and the exact load is queried
//! only where it could lower the best cost significantly. Decisions depend on the boards and on replies that they asked
//! for themselves, so a batch decides like a serial run.

use smallvec::SmallVec;

use super::columns::SHARED_BLOCKS_ASSUMED;
use super::formula::{LatencyCost, Real};
use super::lanes::{GroupCost, RankGroup, WorkGroup};
use crate::schedule::decide::Choice;
use crate::schedule::pending::Case;
use crate::schedule::search::scratch::{Contender, Contenders, Scratch};
use crate::schedule::{LoadView, Schedule};
use crate::select::{Draw, RankOverlap, TierOverlap};

/// A rank is a contender if its cost may be below this multiple of the lowest known cost. Costs are estimates, and
/// smaller differences do not matter.
const CONTENDER_FACTOR: f64 = 0.98;

/// A rank is queried if its cost may be below this multiple of the lowest known cost. A query costs a message, and
/// delays the decision. Choices of a busy fleet of 512 ranks were equal at 0.9 and 1.0, with a sixth of the queries.
const QUERY_FACTOR: f64 = 0.9;

/// Attempts to find an idle rank that ties with the lowest cost.
const IDLE_TIES_MAX: usize = 4;

impl<T> Schedule<T> {
    /// Lists the contenders whose exact load could lower the best cost significantly.
    pub(in crate::schedule) fn list_contenders<V: LoadView>(&self, case: Case<'_, T, V>, scratch: &mut Scratch) {
        self.rules.evaluate(&self.ranks, case.pending.eligibility_inputs(), &mut scratch.eligibility);
        self.find_contenders(case, scratch);
        let Scratch { contenders, listed, .. } = scratch;
        let most = QUERY_FACTOR * contenders.least_hi();
        let inexact =
            contenders.found.iter().filter(|known| known.bounds.lo < known.bounds.hi && known.bounds.lo < most);
        listed.extend(inexact.map(|known| self.ranks.as_slice()[known.position].slot()));
    }

    /// The contender of the lowest cost, or a tie with it. Requires the request's eligibility in `scratch`.
    pub(in crate::schedule) fn choose_contender<V: LoadView>(
        &self,
        case: Case<'_, T, V>,
        settle: bool,
        draw: Draw,
        scratch: &mut Scratch,
    ) -> Choice {
        let is_known = scratch.bounds_of.take() == Some(case.pending.number);
        let Scratch { contenders, eligibility, .. } = &*scratch;
        // A reply, or its absence, may have made a queried rank ineligible.
        if !is_known || contenders.found.iter().any(|known| !eligibility.is_open(known.position)) {
            self.find_contenders(case, scratch);
        }
        if !self.resolve(case, settle, scratch) {
            return Choice::QueryAgain;
        }
        let costs = scratch
            .contenders
            .found
            .iter()
            .map(|known| (known.position, self.ranks.as_slice()[known.position].rank, known.bounds.hi));
        let Some(cheapest) = draw.cheapest(costs) else { return self.drawn(draw, &scratch.eligibility) };
        if self.ranks.as_slice()[cheapest].requests() > 0 {
            return Choice::Rank(cheapest);
        }
        let least = scratch.contenders.least_hi();
        let cached_tokens = self.own_hit(case.pending, self.cached_tokens_at(case, cheapest, scratch));
        let tie = self.idle_tie(case, (least, cached_tokens), draw, scratch);
        Choice::Rank(tie.unwrap_or(cheapest))
    }

    /// Replaces the bounds of the queried contenders by their exact costs. Returns whether all replies are there.
    fn resolve<V: LoadView>(&self, case: Case<'_, T, V>, settle: bool, scratch: &mut Scratch) -> bool {
        let Scratch { contenders, overlaps, eligibility, .. } = scratch;
        let Some((_, cost)) = contenders.cost else { return true };
        let before = contenders.least_hi();
        let most = QUERY_FACTOR * before;
        for known in &mut contenders.found {
            if known.bounds.lo >= known.bounds.hi || known.bounds.lo >= most {
                continue;
            }
            let rank = &self.ranks.as_slice()[known.position];
            if !settle && !rank.has_reply() && !self.ranks.statuses()[known.position].unresponsive {
                return false;
            }
            let mut projected = rank.project(case.candidate);
            if projected.potential_blocks.0 < projected.potential_blocks.1 {
                projected.take_worst();
            }
            let factor = eligibility.factor(known.position);
            known.facts = self.latency_facts(case.pending, rank, overlaps[known.position], &projected);
            known.bounds = self.latency_bounds(&cost, &case, rank, &projected, &known.facts).times(factor);
        }
        let after = contenders.least_hi();
        if after > before {
            // The loads have increased since the boards were read, so other ranks may win.
            self.add_contenders(case, CONTENDER_FACTOR * after, scratch);
        }
        true
    }

    /// Finds the ranks that may win, with bounds of their costs by the boards alone.
    fn find_contenders<V: LoadView>(&self, case: Case<'_, T, V>, scratch: &mut Scratch) {
        let cost = self.latency_cost_of(case.pending);
        scratch.contenders.found.clear();
        scratch.contenders.cost = Some((case.pending.number, cost));
        self.fill_work(case, &cost, scratch);
        self.fill_lower_bounds(case, &cost, scratch);
        let bounds = &scratch.contenders.bounds;
        let least = bounds.iter().enumerate().min_by(|a, b| a.1.1.total_cmp(&b.1.1));
        let Some((group, (lanes, least))) = least.filter(|(_, (_, least))| least.is_finite()) else { return };
        let Some(lane) = lanes.iter().position(|bound| bound == least) else { return };
        if group * RankGroup::RANKS + lane >= self.ranks.as_slice().len() {
            return; // a group without ranks
        }
        self.add_contender(case, group * RankGroup::RANKS + lane, scratch);
        self.add_contenders(case, CONTENDER_FACTOR * scratch.contenders.least_hi(), scratch);
    }

    /// Work of the request on each rank, at least.
    #[expect(clippy::cast_possible_truncation, reason = "the margin of the bounds covers the rounding")]
    fn fill_work<V: LoadView>(&self, case: Case<'_, T, V>, cost: &LatencyCost, scratch: &mut Scratch) {
        let (prompt_tokens, fingerprint) = (case.pending.request.prompt_tokens, case.candidate.fingerprint);
        let split = |cached_tokens: u32| {
            let (copied, rest) = cost.work_split(prompt_tokens, cached_tokens.min(prompt_tokens));
            (copied as f32, rest as f32)
        };
        let credits = self.credits_cache(case.pending);
        let overlaps = &case.pending.request.overlaps;
        let shared_blocks = if fingerprint.block_count() > 0 { SHARED_BLOCKS_ASSUMED } else { 0 };
        let assumed_blocks = if credits { shared_blocks.max(self.usual_blocks(overlaps)) } else { 0 };
        let assumed_tokens = self.tokens(assumed_blocks.into());
        let (copied, rest) = split(assumed_tokens);
        let Some(columns) = self.ranks.columns() else { return };
        let mut work = std::mem::take(&mut scratch.contenders.work);
        work.clear();
        let same = WorkGroup { copied: [copied; RankGroup::RANKS], rest: [rest; RankGroup::RANKS] };
        work.resize(columns.groups().len(), same);
        let mut last = (0, (copied, rest));
        let mut lower = |position: usize, cached_tokens: u32| {
            if last.0 != cached_tokens {
                last = (cached_tokens, split(cached_tokens));
            }
            let (group, lane) = (&mut work[position / RankGroup::RANKS], position % RankGroup::RANKS);
            let (copied, rest) = last.1;
            group.copied[lane] = group.copied[lane].lesser(copied);
            group.rest[lane] = group.rest[lane].lesser(rest);
        };
        if credits {
            let weights = self.settings.cost.tier_weights;
            self.visit_overlaps(overlaps, scratch, |position, overlap| {
                let cached_tokens = overlap.cached_tokens(weights, cost.block_size);
                if cached_tokens > assumed_tokens {
                    lower(position, cached_tokens);
                }
            });
            // Up to the longest overlap, shared blocks do not count.
            let ignored_blocks = assumed_blocks.max(case.pending.longest_blocks);
            columns.visit_sharers(fingerprint, ignored_blocks, |position, blocks| {
                lower(position, self.tokens(blocks.into()));
            });
        } else {
            self.fill_overlaps(overlaps, scratch);
        }
        scratch.contenders.work = work;
    }

    /// Blocks of a prefix that most ranks hold, such as a system prompt; 0 if there is none.
    fn usual_blocks(&self, overlaps: &[RankOverlap]) -> u32 {
        if overlaps.len() < self.ranks.as_slice().len() / 4 * 3 {
            return 0;
        }
        overlaps.iter().map(|known| known.overlap.device_blocks).min().unwrap_or(0)
    }

    /// Lower bounds of the cost of each rank, infinite for ineligible ones.
    #[expect(clippy::cast_possible_truncation, reason = "the margin of the bounds covers the rounding")]
    fn fill_lower_bounds<V: LoadView>(&self, case: Case<'_, T, V>, cost: &LatencyCost, scratch: &mut Scratch) {
        let Scratch { contenders: Contenders { work, bounds, .. }, eligibility, .. } = scratch;
        let Some(columns) = self.ranks.columns() else { return };
        let own_blocks = f64::from(case.pending.request.prompt_tokens) / f64::from(cost.block_size);
        let now_seconds = columns.seconds(self.ranks.refreshed_at());
        let cost = GroupCost::new(cost, now_seconds, columns.least_own_step_seconds(own_blocks));
        bounds.clear();
        bounds.extend(columns.groups().iter().zip(work.iter()).map(|(loads, work)| cost.bounds(loads, work)));
        if eligibility.is_plain() {
            return;
        }
        let ranks = self.ranks.as_slice().len();
        let weighed = |position: usize, bound: f32| {
            let is_open = position < ranks && eligibility.is_open(position);
            if is_open { bound * eligibility.factor(position) as f32 } else { f32::INFINITY }
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
    fn add_contenders<V: LoadView>(&self, case: Case<'_, T, V>, mut most: f64, scratch: &mut Scratch) {
        for group in 0..scratch.contenders.bounds.len() {
            let (lanes, least) = scratch.contenders.bounds[group];
            if f64::from(least) >= most {
                continue;
            }
            for (lane, bound) in lanes.into_iter().enumerate() {
                if f64::from(bound) < most {
                    let hi = self.add_contender(case, group * RankGroup::RANKS + lane, scratch);
                    most = most.min(CONTENDER_FACTOR * hi);
                }
            }
        }
    }

    /// The idle rank with the least recent work among those that tie with the lowest cost `least` and have no fewer than
    /// `cached_tokens` cached, so that neither load nor a hit is traded for an even distribution.
    fn idle_tie<V: LoadView>(
        &self,
        case: Case<'_, T, V>,
        (least, cached_tokens): (f64, u32),
        draw: Draw,
        scratch: &mut Scratch,
    ) -> Option<usize> {
        let columns = self.ranks.columns()?;
        let most = least * self.settings.tie_factor;
        #[expect(clippy::cast_possible_truncation, reason = "the margin of the bounds covers the rounding")]
        let most_bound = most as f32;
        let mut tried: SmallVec<[usize; IDLE_TIES_MAX]> = SmallVec::new();
        while tried.len() < IDLE_TIES_MAX {
            let groups = columns.groups().iter().zip(&scratch.contenders.bounds).enumerate();
            let ties = groups.flat_map(|(group, (loads, (bounds, _)))| {
                let is_tie = move |lane: &usize| bounds[*lane] <= most_bound && loads.requests[*lane] == 0.0;
                (0..RankGroup::RANKS).filter(is_tie).map(move |lane| group * RankGroup::RANKS + lane)
            });
            let key = |position: usize| draw.key(self.ranks.as_slice()[position].rank);
            let position = ties.filter(|position| !tried.contains(position)).min_by(|a, b| {
                let order = columns.recent_work(*a).order(columns.recent_work(*b));
                order.then_with(|| key(*a).cmp(&key(*b)))
            })?;
            if self.add_contender(case, position, scratch) <= most
                && self.cached_tokens_at(case, position, scratch) >= cached_tokens
            {
                return Some(position);
            }
            tried.push(position);
        }
        None
    }

    fn cached_tokens_at<V: LoadView>(&self, case: Case<'_, T, V>, position: usize, scratch: &Scratch) -> u32 {
        let rank = &self.ranks.as_slice()[position];
        self.expected_cached_tokens(case.pending, rank, scratch.overlaps[position], &rank.project(case.candidate))
    }

    /// Adds a rank with the bounds of its cost, unless it is there. Returns the upper bound.
    fn add_contender<V: LoadView>(&self, case: Case<'_, T, V>, position: usize, scratch: &mut Scratch) -> f64 {
        let Scratch { contenders, overlaps, eligibility, .. } = scratch;
        if let Some(known) = contenders.found.iter().find(|known| known.position == position) {
            return known.bounds.hi;
        }
        let Some((_, cost)) = &contenders.cost else { return f64::INFINITY };
        let rank = &self.ranks.as_slice()[position];
        let mut projected = rank.project_board(case.candidate);
        if self.ranks.statuses()[position].unresponsive {
            projected.take_worst();
        }
        let overlap: TierOverlap = overlaps[position];
        let facts = self.latency_facts(case.pending, rank, overlap, &projected);
        let bounds = self.latency_bounds(cost, &case, rank, &projected, &facts).times(eligibility.factor(position));
        contenders.found.push(Contender { position, bounds, facts });
        bounds.hi
    }
}
