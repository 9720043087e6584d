//! Searches for the rank of a request, one for each kind of policy.
//!
//! A search owns its buffers. It moves: from the policy to the request whose ranks to query it lists, with the batch
//! through the query, and into the choice. What it holds about a request is therefore valid, or it is not there.

mod exact;
mod kv;
mod table;
mod ties;

use super::LoadView;
use super::case::Case;
use super::choice::Choice;
use super::eligible::Eligibility;
use super::latency::formula::{LatencyCost, LatencyFacts};
use super::latency::search::LatencySearch;
use super::settings::Settings;
use super::types::Rejection;
use crate::policy::{CostUnit, Needs, two_random};
use crate::protocol::Slot;

use kv::KvSearch;
use table::TableSearch;

/// See the module documentation.
#[derive(Debug)]
pub(super) struct Search {
    /// Eligibility of ranks for the request, by position.
    pub(super) eligibility: Eligibility,
    by: ByPolicy,
}

#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "searches are few, and boxed as a whole")]
enum ByPolicy {
    Kv(KvSearch),
    Latency(LatencySearch),
    Table(TableSearch),
}

impl Search {
    pub(super) fn new(settings: &Settings) -> Self {
        let by = match settings.unit.filter(|_| settings.compares_costs) {
            Some(CostUnit::Blocks) => ByPolicy::Kv(KvSearch::default()),
            Some(CostUnit::Seconds) => ByPolicy::Latency(LatencySearch::default()),
            None => ByPolicy::Table(TableSearch::default()),
        };
        Self { eligibility: Eligibility::default(), by }
    }

    /// Adds the ranks whose exact loads the request needs to `slots`; ranks with known loads are omitted.
    pub(super) fn list<T, V: LoadView>(&mut self, case: &Case<'_, T, V>, needs: Needs, slots: &mut Vec<Slot>) {
        match needs {
            Needs::Board => {}
            Needs::All => list_inexact(case, 0..case.ranks().as_slice().len(), slots),
            Needs::Two => {
                self.evaluate(case);
                let ranks = case.ranks().as_slice();
                let eligible = self.eligibility.open().map(|position| (position, ranks[position].rank));
                let two = two_random(&case.request_facts(), eligible);
                list_inexact(case, two.into_iter().flatten(), slots);
            }
            Needs::Bounded => {
                self.evaluate(case);
                match &mut self.by {
                    ByPolicy::Kv(kv) => kv.list(case, &self.eligibility, slots),
                    ByPolicy::Latency(latency) => latency.list(case, &self.eligibility, slots),
                    ByPolicy::Table(_) => {} // policies without costs have no bounds
                }
            }
        }
    }

    /// Evaluates eligibility and chooses among the eligible ranks. `is_listed` if [`list`](Self::list) was the last call, for
    /// the same request in the same batch; ranks may have replied since.
    pub(super) fn choose<T, V: LoadView>(&mut self, case: &Case<'_, T, V>, settle: bool, is_listed: bool) -> Choice {
        self.evaluate(case);
        if !self.eligibility.any_open() {
            let waits = case.pending.class.is_some() && self.eligibility.waits();
            return if waits { Choice::Wait } else { case.no_choice(&self.eligibility) };
        }
        if let Err(missed) = case.restrict_to_targets(&mut self.eligibility) {
            return Choice::None(Rejection::TargetsMissed(missed));
        }
        if case.settings.compares_costs && case.needs() == Needs::All {
            if let ByPolicy::Latency(latency) = &mut self.by {
                latency.clear();
            }
            return case.cheapest_of_all(&self.eligibility);
        }
        match &mut self.by {
            ByPolicy::Kv(kv) => kv.choose(case, &self.eligibility, settle, is_listed),
            ByPolicy::Latency(latency) => latency.choose(case, &self.eligibility, settle, is_listed),
            ByPolicy::Table(table) => table.choose(case, &self.eligibility, settle),
        }
    }

    /// The `latency` cost of the request and the facts of the rank at `position`, if the choice has computed them.
    pub(super) fn evaluated(&self, position: usize) -> Option<(LatencyCost, LatencyFacts)> {
        if let ByPolicy::Latency(latency) = &self.by { latency.evaluated(position) } else { None }
    }

    fn evaluate<T, V: LoadView>(&mut self, case: &Case<'_, T, V>) {
        case.settings.rules.evaluate(case.ranks(), case.pending.eligibility_inputs(), &mut self.eligibility);
    }
}

/// Adds ranks that can be queried and whose load is not exact.
fn list_inexact<T, V: LoadView>(case: &Case<'_, T, V>, positions: impl Iterator<Item = usize>, slots: &mut Vec<Slot>) {
    let (ranks, statuses) = (case.ranks().as_slice(), case.ranks().statuses());
    let inexact = positions
        .filter(|&position| !statuses[position].unresponsive && !ranks[position].project(case.candidate).is_exact());
    slots.extend(inexact.map(|position| ranks[position].slot()));
}

impl<T, V: LoadView> Case<'_, T, V> {
    fn no_choice(&self, eligibility: &Eligibility) -> Choice {
        Choice::None(self.pool.rejection(self.pending, eligibility))
    }

    /// A random eligible rank.
    pub(super) fn drawn(&self, eligibility: &Eligibility) -> Choice {
        let equal = eligibility.open().map(|position| (position, self.ranks().as_slice()[position].rank, 0.0));
        self.draw().cheapest(equal).map_or(Choice::None(Rejection::NoRanks), Choice::Rank)
    }
}
