//! Search by bounds of the `kv` cost of every rank.

use crate::policy::{Bounds, KvCost};
use crate::protocol::Slot;
use crate::schedule::LoadView;
use crate::schedule::case::Case;
use crate::schedule::choice::Choice;
use crate::schedule::eligible::Eligibility;
use crate::schedule::latency::formula::Real;
use crate::schedule::rank::{Projected, Rank};
use crate::select::TierOverlap;

/// Cost of an ineligible rank. Every other cost is finite.
const NOT_ELIGIBLE: Bounds = Bounds { lo: f64::INFINITY, hi: f64::INFINITY };

/// Overlap and bounds of the cost of each rank, by position.
#[derive(Debug, Default)]
pub(super) struct KvSearch {
    overlaps: Vec<TierOverlap>,
    bounds: Vec<Bounds>,
    /// Positions of the listed ranks.
    listed: Vec<usize>,
}

impl KvSearch {
    /// Lists every rank whose lower bound does not exceed the least upper bound by more than the tie factor.
    pub(super) fn list<T, V: LoadView>(
        &mut self,
        case: &Case<'_, T, V>,
        eligibility: &Eligibility,
        slots: &mut Vec<Slot>,
    ) {
        self.fill(case, eligibility, false);
        let least_hi = self.bounds.iter().map(|bounds| bounds.hi).fold(f64::INFINITY, |a, b| a.lesser(b));
        let most = least_hi * case.settings.tie_factor;
        self.listed.clear();
        for (position, bounds) in self.bounds.iter().enumerate() {
            if bounds.lo <= most && bounds.lo < bounds.hi {
                self.listed.push(position);
                slots.push(case.ranks().as_slice()[position].slot());
            }
        }
    }

    pub(super) fn choose<T, V: LoadView>(
        &mut self,
        case: &Case<'_, T, V>,
        eligibility: &Eligibility,
        settle: bool,
        is_listed: bool,
    ) -> Choice {
        if is_listed {
            self.update(case, eligibility);
        } else {
            self.fill(case, eligibility, false);
        }
        match self.cheapest(case) {
            None if settle => {
                self.fill(case, eligibility, true);
                // Without a cheapest rank, all eligible ones have infinite or undefined cost; another query would not change
                // that.
                self.cheapest(case).map_or_else(|| case.drawn(eligibility), Choice::Rank)
            }
            cheapest => cheapest.map_or(Choice::QueryAgain, Choice::Rank),
        }
    }

    /// Computes bounds of every rank's cost; `settle` uses the upper bounds.
    fn fill<T, V: LoadView>(&mut self, case: &Case<'_, T, V>, eligibility: &Eligibility, settle: bool) {
        case.visit_overlaps(&mut self.overlaps, |_, _| ());
        let cost = case.kv_cost();
        let Self { overlaps, bounds, .. } = self;
        bounds.clear();
        if eligibility.is_plain() && !settle {
            let plain = |(rank, overlap): (&Rank, &TierOverlap)| {
                bounds_of(case, &cost, *overlap, &rank.project(case.candidate))
            };
            bounds.extend(case.ranks().as_slice().iter().zip(overlaps.iter()).map(plain));
            return;
        }
        let of = |(position, overlap): (usize, &TierOverlap)| {
            weighed_bounds(case, &cost, position, *overlap, eligibility, settle)
        };
        bounds.extend(overlaps.iter().enumerate().map(of));
    }

    /// Updates bounds computed before the queries: only queried ranks can have changed load or status.
    fn update<T, V: LoadView>(&mut self, case: &Case<'_, T, V>, eligibility: &Eligibility) {
        let cost = case.kv_cost();
        for &position in &self.listed {
            self.bounds[position] = weighed_bounds(case, &cost, position, self.overlaps[position], eligibility, false);
        }
    }

    /// The lowest exact cost or a tie with it; `None` if an inexact rank could match it.
    fn cheapest<T, V: LoadView>(&self, case: &Case<'_, T, V>) -> Option<usize> {
        let (mut least, mut least_unproven) = (f64::INFINITY, f64::INFINITY);
        for bounds in &self.bounds {
            if bounds.lo != bounds.hi {
                least_unproven = bounds.lo.lesser(least_unproven);
            } else {
                least = bounds.lo.lesser(least);
            }
        }
        // Without any exact rank, `least` is infinite and compares below nothing.
        let most = least * case.settings.tie_factor;
        if most >= least_unproven {
            return None;
        }
        let near = self.bounds.iter().enumerate().filter(|(_, bounds)| bounds.lo == bounds.hi && bounds.hi <= most);
        case.one_of_ties(&self.overlaps, near.map(|(position, bounds)| (position, bounds.hi)).collect())
    }
}

/// Bounds of the cost of a rank with its eligibility and preference.
fn weighed_bounds<T, V: LoadView>(
    case: &Case<'_, T, V>,
    cost: &KvCost,
    position: usize,
    overlap: TierOverlap,
    eligibility: &Eligibility,
    settle: bool,
) -> Bounds {
    if !eligibility.is_open(position) {
        return NOT_ELIGIBLE;
    }
    let mut projected = case.ranks().as_slice()[position].project(case.candidate);
    if settle || case.ranks().statuses()[position].unresponsive {
        projected.take_worst();
    }
    bounds_of(case, cost, overlap, &projected).times(eligibility.factor(position))
}

#[inline]
fn bounds_of<T, V: LoadView>(
    case: &Case<'_, T, V>,
    cost: &KvCost,
    overlap: TierOverlap,
    projected: &Projected,
) -> Bounds {
    let facts = case.cost_facts(overlap, projected);
    cost.bounds(&facts, projected.potential_blocks, projected.prefill_tokens)
}
