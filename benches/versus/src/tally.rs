//! Comparison and counts of the decisions of two routers.
//!
//! Defines tied decisions, agreement, and the cause of a difference.

use std::collections::BTreeMap;

use pointsman::protocol::WorkerRank;
use pointsman_versus::columns::{head, row};
use serde::Serialize;

/// Facts of one router about one rank for one request, and the resulting cost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Facts {
    pub(crate) rank: WorkerRank,
    /// Number of leading prompt blocks that the rank holds.
    pub(crate) overlap_blocks: u64,
    /// Number of blocks of its active requests including this one.
    pub(crate) potential_blocks: u64,
    /// Number of prefill tokens on the rank without this request.
    pub(crate) prefill_tokens: u64,
    /// Number of its active requests without this one.
    pub(crate) active_requests: u64,
    /// Cost in blocks; lower is better.
    pub(crate) cost: f64,
}

/// Decision of one router.
#[derive(Debug)]
pub(crate) struct View {
    pub(crate) chosen: WorkerRank,
    /// All ranks, in order.
    pub(crate) ranks: Vec<Facts>,
}

/// Decisions of both routers for one request.
#[derive(Debug)]
pub(crate) struct Decision {
    pub(crate) ours: View,
    pub(crate) theirs: View,
}

/// Result of comparing two decisions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// More than one rank has the lowest cost for at least one of the routers. Each router breaks ties by its own
    /// random numbers.
    Tied,
    /// Both chose the same rank.
    Agrees,
    /// Different choices, with the names of the facts that differ on the chosen ranks.
    Differs(String),
}

/// Value of a fact as it is displayed. Different costs have different texts.
type Quantity = fn(&Facts) -> String;

/// Facts to compare. The cost is derived from the others and comes last.
const QUANTITIES: [(&str, Quantity); 5] = [
    ("overlap", |facts| facts.overlap_blocks.to_string()),
    ("blocks", |facts| facts.potential_blocks.to_string()),
    ("prefill", |facts| facts.prefill_tokens.to_string()),
    ("requests", |facts| facts.active_requests.to_string()),
    ("cost", |facts| facts.cost.to_string()),
];

impl View {
    fn least_cost(&self) -> f64 {
        self.ranks.iter().map(|facts| facts.cost).fold(f64::INFINITY, f64::min)
    }

    fn cheapest(&self) -> impl Iterator<Item = WorkerRank> {
        let least = self.least_cost();
        self.ranks.iter().filter(move |facts| facts.cost == least).map(|facts| facts.rank)
    }

    fn is_tied(&self) -> bool {
        self.cheapest().nth(1).is_some()
    }

    /// Returns whether the choice is not among the cheapest ranks, by the costs of this view.
    fn is_astray(&self) -> bool {
        self.cheapest().all(|rank| rank != self.chosen)
    }

    fn of(&self, rank: WorkerRank) -> Option<&Facts> {
        self.ranks.iter().find(|facts| facts.rank == rank)
    }
}

impl Decision {
    /// Compares the two decisions.
    pub(crate) fn verdict(&self) -> Verdict {
        if self.ours.is_tied() || self.theirs.is_tied() {
            Verdict::Tied
        } else if self.ours.chosen == self.theirs.chosen {
            Verdict::Agrees
        } else {
            Verdict::Differs(self.cause())
        }
    }

    fn cause(&self) -> String {
        let chosen = [self.ours.chosen, self.theirs.chosen];
        let pairs: Vec<_> =
            chosen.iter().filter_map(|&rank| Some((self.ours.of(rank)?, self.theirs.of(rank)?))).collect();
        let seen_differently =
            |&&(_, quantity): &&(&str, Quantity)| pairs.iter().any(|(ours, theirs)| quantity(ours) != quantity(theirs));
        let names: Vec<_> = QUANTITIES.iter().filter(seen_differently).map(|(name, _)| *name).collect();
        if names.is_empty() { "pick".to_owned() } else { names.join(" and ") }
    }
}

/// Counts of one run.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Tally {
    /// Number of decisions.
    decisions: u64,
    /// Number of tied decisions.
    tied: u64,
    /// Number of tied decisions in which each choice has the lowest cost for the other router too.
    tied_alike: u64,
    /// Number of untied decisions with the same choice.
    agrees: u64,
    /// Other untied decisions by the facts that differ on the chosen ranks; `pick` if none differs.
    differs: BTreeMap<String, u64>,
    /// Number of untied decisions in which another rank held more of the prompt than our choice: load outweighed the
    /// cache.
    colder: u64,
    /// Number of untied decisions in which another rank had fewer blocks than our choice: the cache outweighed load.
    busier: u64,
    /// Number of our choices, tied or not, with a higher cost than another rank.
    ours_astray: u64,
    /// Number of their choices, tied or not, with a higher cost than another rank by the costs computed for them.
    theirs_astray: u64,
    /// Number of compared rows: one per rank and decision.
    rows: u64,
    /// Number of rows that differ, by fact.
    rows_differ: BTreeMap<&'static str, u64>,
}

impl Tally {
    /// Counts one decision with its verdict.
    pub(crate) fn count(&mut self, decision: &Decision, verdict: &Verdict) {
        let Decision { ours, theirs } = decision;
        self.decisions += 1;
        self.ours_astray += u64::from(ours.is_astray());
        self.theirs_astray += u64::from(theirs.is_astray());
        self.rows += ours.ranks.len() as u64;
        for (name, quantity) in QUANTITIES {
            let rows = ours.ranks.iter().zip(&theirs.ranks);
            let differ = rows.filter(|(ours, theirs)| quantity(ours) != quantity(theirs)).count();
            *self.rows_differ.entry(name).or_default() += differ as u64;
        }
        if *verdict != Verdict::Tied
            && let Some(chosen) = ours.of(ours.chosen)
        {
            self.colder += u64::from(ours.ranks.iter().any(|facts| facts.overlap_blocks > chosen.overlap_blocks));
            self.busier += u64::from(ours.ranks.iter().any(|facts| facts.potential_blocks < chosen.potential_blocks));
        }
        match verdict {
            Verdict::Tied => {
                self.tied += 1;
                let alike = ours.cheapest().any(|rank| rank == theirs.chosen)
                    && theirs.cheapest().any(|rank| rank == ours.chosen);
                self.tied_alike += u64::from(alike);
            }
            Verdict::Agrees => self.agrees += 1,
            Verdict::Differs(cause) => *self.differs.entry(cause.clone()).or_default() += 1,
        }
    }

    /// Share of untied decisions with the same choice in %. None if all are tied.
    pub(crate) fn agreement_percent(&self) -> Option<f64> {
        let untied = self.decisions - self.tied;
        (untied > 0).then(|| 100.0 * self.agrees as f64 / untied as f64)
    }
}

/// Table with one row per fleet.
pub(crate) fn markdown(fleets: &[(u32, Tally)]) -> String {
    let titles = [
        "ranks",
        "decisions",
        "tied (alike)",
        "untied",
        "agree",
        "agreement",
        "differ by",
        "colder / busier",
        "astray, ours / theirs",
        "rows",
        "rows that differ",
    ];
    let mut out = head::<()>(&titles, &[], &[]);
    let show = |counts: &mut dyn Iterator<Item = (&str, u64)>| {
        let shown: Vec<_> = counts.filter(|(_, count)| *count > 0).map(|(name, n)| format!("{name} {n}")).collect();
        if shown.is_empty() { "-".to_owned() } else { shown.join(", ") }
    };
    for (ranks, tally) in fleets {
        out += &row(&[
            ranks.to_string(),
            tally.decisions.to_string(),
            format!("{} ({})", tally.tied, tally.tied_alike),
            (tally.decisions - tally.tied).to_string(),
            tally.agrees.to_string(),
            tally.agreement_percent().map_or("-".to_owned(), |percent| format!("{percent:.3} %")),
            show(&mut tally.differs.iter().map(|(name, count)| (name.as_str(), *count))),
            format!("{} / {}", tally.colder, tally.busier),
            format!("{} / {}", tally.ours_astray, tally.theirs_astray),
            tally.rows.to_string(),
            show(&mut tally.rows_differ.iter().map(|(name, count)| (*name, *count))),
        ]);
    }
    out
}

#[cfg(test)]
mod tests {
    use pointsman::protocol::WorkerId;

    use super::*;

    fn rank(worker: u64) -> WorkerRank {
        WorkerRank::new(WorkerId(worker), 0)
    }

    /// A view with one rank per cost, numbered from 1.
    fn view(chosen: u64, costs: &[f64]) -> View {
        let facts = |(&cost, worker)| Facts {
            rank: rank(worker),
            overlap_blocks: 0,
            potential_blocks: 10,
            prefill_tokens: 0,
            active_requests: 1,
            cost,
        };
        View { chosen: rank(chosen), ranks: costs.iter().zip(1..).map(facts).collect() }
    }

    fn tally(decisions: &[Decision]) -> Tally {
        let mut tally = Tally::default();
        for decision in decisions {
            tally.count(decision, &decision.verdict());
        }
        tally
    }

    #[test]
    fn a_tie_on_either_side_is_not_a_difference() {
        let tied = Decision { ours: view(1, &[2.0, 2.0, 3.0]), theirs: view(2, &[2.0, 2.0, 3.0]) };
        let tied_for_them = Decision { ours: view(1, &[2.0, 2.5, 3.0]), theirs: view(2, &[2.0, 2.0, 3.0]) };
        assert_eq!(tied.verdict(), Verdict::Tied);
        assert_eq!(tied_for_them.verdict(), Verdict::Tied);
        let tally = tally(&[tied, tied_for_them]);
        assert_eq!((tally.tied, tally.tied_alike, tally.agreement_percent()), (2, 1, None));
    }

    #[test]
    fn a_difference_is_attributed_to_differing_facts() {
        let mut theirs = view(2, &[2.5, 2.0, 9.0]);
        theirs.ranks[0].overlap_blocks = 4;
        theirs.ranks[2].prefill_tokens = 64; // on a rank that neither router chose
        let differs = Decision { ours: view(1, &[2.0, 3.0, 9.0]), theirs };
        assert_eq!(differs.verdict(), Verdict::Differs("overlap and cost".to_owned()));
        let astray = Decision { ours: view(1, &[1.0, 2.0]), theirs: view(2, &[1.0, 2.0]) };
        assert_eq!(astray.verdict(), Verdict::Differs("pick".to_owned()));
        let agrees = || Decision { ours: view(1, &[1.0, 2.0]), theirs: view(1, &[1.5, 2.0]) };
        let tally = tally(&[differs, astray, agrees(), agrees()]);
        assert_eq!((tally.differs.values().sum::<u64>(), tally.agreement_percent()), (2, Some(50.0)));
        assert_eq!((tally.ours_astray, tally.theirs_astray, tally.rows), (0, 1, 9));
        assert_eq!((tally.rows_differ["overlap"], tally.rows_differ["prefill"], tally.rows_differ["cost"]), (1, 1, 4));
    }
}
