//! Search of policies that compare no costs: the eligible ranks as a table.

use crate::policy::{Candidate, RankTable, checked_choice, two_random};
use crate::protocol::WorkerRank;
use crate::schedule::LoadView;
use crate::schedule::case::Case;
use crate::schedule::choice::Choice;
use crate::schedule::eligible::Eligibility;
use crate::schedule::rank::{Projected, Rank};
use crate::schedule::types::Rejection;
use crate::select::TierOverlap;

/// Facts of the request by rank.
#[derive(Debug, Default)]
pub(super) struct TableSearch {
    /// Overlaps by position. Only custom policies read them.
    overlaps: Vec<TierOverlap>,
    /// Positions of the eligible ranks where some rank is not.
    open: Vec<usize>,
}

impl TableSearch {
    /// Chooses by a custom policy or a built-in one.
    pub(super) fn choose<T, V: LoadView>(
        &mut self,
        case: &Case<'_, T, V>,
        eligibility: &Eligibility,
        settle: bool,
    ) -> Choice {
        if case.settings.extensions.policy.is_some() {
            case.visit_overlaps(&mut self.overlaps, |_, _| ());
        }
        if eligibility.is_plain() {
            return self.choose_among::<T, V, true>(case, eligibility, settle);
        }
        self.open.clear();
        self.open.extend(eligibility.open());
        self.choose_among::<T, V, false>(case, eligibility, settle)
    }

    /// `ALL` as in [`EligibleRanks`].
    fn choose_among<T, V: LoadView, const ALL: bool>(
        &self,
        case: &Case<'_, T, V>,
        eligibility: &Eligibility,
        settle: bool,
    ) -> Choice {
        let ranks = case.ranks().as_slice();
        let mut table = EligibleRanks::<T, V, ALL> { ranks, case, search: self, eligibility, two_random: None };
        let request = case.request_facts();
        if case.settings.draws_two {
            let two = table.two_random();
            // An earlier booking of the batch may have made a rank ineligible, and so drawn one that was not queried.
            if !settle && two.into_iter().flatten().any(|index| table.is_inexact(index)) {
                return Choice::QueryAgain;
            }
            table.two_random = Some(two);
        }
        let chosen = match &case.settings.extensions.policy {
            Some(policy) => match checked_choice(&**policy, &request, &table) {
                Ok(index) => Some(index),
                Err(error) => return Choice::None(Rejection::Policy(error)),
            },
            None => case.settings.policy.choose(&request, &table),
        };
        match chosen {
            Some(index) => Choice::Rank(table.position(index)),
            None => case.no_choice(eligibility),
        }
    }
}

/// The eligible ranks of one decision.
///
/// `ALL` states that every rank is eligible, so that indexes are positions.
struct EligibleRanks<'a, T, V, const ALL: bool> {
    ranks: &'a [Rank],
    case: &'a Case<'a, T, V>,
    search: &'a TableSearch,
    eligibility: &'a Eligibility,
    /// Indexes of the two random ranks, if already drawn.
    two_random: Option<[Option<usize>; 2]>,
}

impl<T, V: LoadView, const ALL: bool> EligibleRanks<'_, T, V, ALL> {
    #[inline]
    fn position(&self, index: usize) -> usize {
        if ALL { index } else { self.search.open[index] }
    }

    #[inline]
    fn index_of(&self, position: usize) -> Option<usize> {
        if ALL { Some(position) } else { self.search.open.binary_search(&position).ok() }
    }

    fn projected(&self, index: usize) -> Projected {
        self.ranks[self.position(index)].project(self.case.candidate)
    }

    /// Whether a load query could still make the rank's load exact.
    fn is_inexact(&self, index: usize) -> bool {
        !self.case.ranks().statuses()[self.position(index)].unresponsive && !self.projected(index).is_exact()
    }
}

impl<T, V: LoadView, const ALL: bool> RankTable for EligibleRanks<'_, T, V, ALL> {
    #[inline]
    fn len(&self) -> usize {
        if ALL { self.ranks.len() } else { self.search.open.len() }
    }

    #[inline]
    fn bookings(&self) -> u64 {
        self.case.pool.turns
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
        for known in &self.case.pending.request.overlaps {
            let position = self.case.ranks().position_of(known.slot, known.generation);
            if let Some(index) = position.and_then(|position| self.index_of(position)) {
                visit(index, self.case.cached_tokens(known.overlap));
            }
        }
    }

    #[inline]
    fn two_random(&self) -> [Option<usize>; 2] {
        self.two_random.unwrap_or_else(|| {
            let ranks = (0..self.len()).map(|index| (index, self.rank(index)));
            two_random(&self.case.request_facts(), ranks)
        })
    }

    fn candidate(&self, index: usize) -> Candidate {
        let position = self.position(index);
        let overlap = self.search.overlaps[position];
        self.case.candidate_facts(position, overlap, &self.projected(index), self.eligibility.factor(position))
    }
}
