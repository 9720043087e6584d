//! Runs policies that compare no costs, and custom scorers, on the eligible ranks.

use super::scratch::Scratch;
use crate::policy::{
    Candidate, PolicyError, RankScorer, RankTable, RequestFacts, checked_choice, checked_cost, two_random,
};
use crate::protocol::WorkerRank;
use crate::schedule::decide::Choice;
use crate::schedule::pending::Case;
use crate::schedule::rank::{Projected, Rank};
use crate::schedule::{LoadView, PendingRequest, Rejection, Schedule};

/// The eligible ranks of one decision.
///
/// `ALL` states that every rank is eligible, so that indexes are positions. A custom policy expects the request's overlaps
/// in `scratch`; the built-in ones do not read them.
struct EligibleRanks<'a, T, V, const ALL: bool> {
    schedule: &'a Schedule<T>,
    ranks: &'a [Rank],
    case: Case<'a, T, V>,
    scratch: &'a Scratch,
    /// Indexes of the two random ranks, if already drawn.
    two_random: Option<[Option<usize>; 2]>,
}

impl<T, V: LoadView, const ALL: bool> EligibleRanks<'_, T, V, ALL> {
    #[inline]
    fn position(&self, index: usize) -> usize {
        if ALL { index } else { self.scratch.open[index] }
    }

    #[inline]
    fn index_of(&self, position: usize) -> Option<usize> {
        if ALL { Some(position) } else { self.scratch.open.binary_search(&position).ok() }
    }

    fn projected(&self, index: usize) -> Projected {
        self.ranks[self.position(index)].project(self.case.candidate)
    }

    /// Whether a load query could still make the rank's load exact.
    fn is_inexact(&self, index: usize) -> bool {
        !self.schedule.ranks.statuses()[self.position(index)].unresponsive && !self.projected(index).is_exact()
    }
}

impl<T, V: LoadView, const ALL: bool> RankTable for EligibleRanks<'_, T, V, ALL> {
    #[inline]
    fn len(&self) -> usize {
        if ALL { self.ranks.len() } else { self.scratch.open.len() }
    }

    #[inline]
    fn bookings(&self) -> u64 {
        self.schedule.turns
    }

    #[inline]
    fn rank(&self, index: usize) -> WorkerRank {
        self.ranks[self.position(index)].rank
    }

    #[inline]
    fn requests(&self, index: usize) -> u32 {
        self.ranks[self.position(index)].requests()
    }

    #[inline]
    fn projected_load(&self, index: usize) -> (u32, u64) {
        let projected = self.projected(index);
        (projected.requests, projected.potential_blocks.1)
    }

    #[inline]
    fn visit_cached(&self, visit: &mut dyn FnMut(usize, u32)) {
        let cost = &self.schedule.settings.cost;
        for known in &self.case.pending.request.overlaps {
            let position = self.schedule.ranks.position_of(known.slot, known.generation);
            if let Some(index) = position.and_then(|position| self.index_of(position)) {
                visit(index, known.overlap.cached_tokens(cost.tier_weights, cost.block_size));
            }
        }
    }

    #[inline]
    fn two_random(&self) -> [Option<usize>; 2] {
        self.two_random.unwrap_or_else(|| {
            let ranks = (0..self.len()).map(|index| (index, self.rank(index)));
            two_random(&self.schedule.request_facts(self.case.pending), ranks)
        })
    }

    fn candidate(&self, index: usize) -> Candidate {
        let Case { pending, loads, .. } = self.case;
        self.schedule.candidate_facts(pending, loads, self.position(index), &self.projected(index), self.scratch)
    }
}

impl<T> Schedule<T> {
    pub(in crate::schedule) fn request_facts<'a>(&self, pending: &'a PendingRequest<T>) -> RequestFacts<'a> {
        self.rules.request_facts(&pending.eligibility_inputs())
    }

    /// Positions of two random eligible ranks. Expects the request's eligibility in `scratch`.
    pub(in crate::schedule) fn two_random_positions(
        &self,
        pending: &PendingRequest<T>,
        scratch: &Scratch,
    ) -> [Option<usize>; 2] {
        let ranks = self.ranks.as_slice();
        let eligible = scratch.eligibility.open().map(|position| (position, ranks[position].rank));
        two_random(&self.request_facts(pending), eligible)
    }

    /// Chooses by a custom policy or a built-in one that compares no costs.
    pub(in crate::schedule) fn choose_by_policy<V: LoadView>(
        &self,
        case: Case<'_, T, V>,
        settle: bool,
        scratch: &mut Scratch,
    ) -> Choice {
        if self.extensions.policy.is_some() {
            self.fill_overlaps(&case.pending.request.overlaps, scratch);
        }
        if scratch.eligibility.is_plain() {
            return self.choose_in_table::<V, true>(case, settle, scratch);
        }
        let Scratch { eligibility, open, .. } = &mut *scratch;
        open.clear();
        open.extend(eligibility.open());
        self.choose_in_table::<V, false>(case, settle, scratch)
    }

    /// Chooses among the eligible ranks. `ALL` as in [`EligibleRanks`].
    fn choose_in_table<V: LoadView, const ALL: bool>(
        &self,
        case: Case<'_, T, V>,
        settle: bool,
        scratch: &Scratch,
    ) -> Choice {
        let ranks = self.ranks.as_slice();
        let mut table = EligibleRanks::<T, V, ALL> { schedule: self, ranks, case, scratch, two_random: None };
        let request = self.request_facts(case.pending);
        if self.settings.draws_two {
            let two = table.two_random();
            // An earlier booking of the batch may have made a rank ineligible, and so drawn one that was not queried.
            if !settle && two.into_iter().flatten().any(|index| table.is_inexact(index)) {
                return Choice::QueryAgain;
            }
            table.two_random = Some(two);
        }
        let chosen = match &self.extensions.policy {
            Some(policy) => match checked_choice(&**policy, &request, &table) {
                Ok(index) => Some(index),
                Err(error) => return Choice::None(Rejection::Policy(error)),
            },
            None => self.settings.policy.choose(&request, &table),
        };
        match chosen {
            Some(index) => Choice::Rank(table.position(index)),
            None => Choice::None(self.rejection(case.pending, &scratch.eligibility)),
        }
    }

    /// Cost that the custom scorers add to a rank's cost.
    ///
    /// # Errors
    /// A scorer panicked or returned an unusable cost.
    pub(in crate::schedule) fn added_cost<V: LoadView>(
        &self,
        case: Case<'_, T, V>,
        position: usize,
        projected: &Projected,
        scratch: &Scratch,
    ) -> Result<f64, PolicyError> {
        if self.extensions.scorers.is_empty() {
            return Ok(0.0);
        }
        let facts = self.candidate_facts(case.pending, case.loads, position, projected, scratch);
        let scorers = self.extensions.scorers.iter().map(|scorer| &**scorer as &dyn RankScorer);
        checked_cost(scorers, &self.request_facts(case.pending), &facts)
    }
}
