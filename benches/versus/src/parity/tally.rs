//! What two routers knew and chose, compared and counted.
//!
//! Owns when a decision is tied, when two agree, and what a difference is put down to.

use std::collections::BTreeMap;
use std::fmt::Write;

use pointsman::protocol::WorkerRank;
use serde::Serialize;

/// What one router knows of one rank and one request, and what it makes of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Facts {
    pub(crate) rank: WorkerRank,
    /// Leading blocks of the prompt that the rank holds.
    pub(crate) overlap_blocks: u64,
    /// Blocks that its active requests would hold with this one.
    pub(crate) potential_blocks: u64,
    /// Prefill that it has to do without this one.
    pub(crate) prefill_tokens: u64,
    /// Its active requests without this one.
    pub(crate) active_requests: u64,
    /// In blocks, lower is better.
    pub(crate) cost: f64,
}

/// One router's side of a decision.
#[derive(Debug)]
pub(crate) struct View {
    pub(crate) chosen: WorkerRank,
    /// All ranks, in order.
    pub(crate) ranks: Vec<Facts>,
}

/// One request, asked of both.
#[derive(Debug)]
pub(crate) struct Decision {
    pub(crate) ours: View,
    pub(crate) theirs: View,
}

/// How a decision compares.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// More than one rank costs least, for one of the routers at least. Both draw then, each its own lots.
    Tied,
    /// Both chose the same rank.
    Agrees,
    /// They chose differently: what they see differently on the chosen ranks.
    Differs(String),
}

type Quantity = fn(&Facts) -> u64;

/// The facts that are compared. The cost, made of them, comes last.
const QUANTITIES: [(&str, Quantity); 5] = [
    ("overlap", |facts| facts.overlap_blocks),
    ("blocks", |facts| facts.potential_blocks),
    ("prefill", |facts| facts.prefill_tokens),
    ("requests", |facts| facts.active_requests),
    ("cost", |facts| facts.cost.to_bits()),
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

    /// Whether the choice is none of the cheapest, by the costs that are shown here.
    fn is_astray(&self) -> bool {
        self.cheapest().all(|rank| rank != self.chosen)
    }

    fn of(&self, rank: WorkerRank) -> Option<&Facts> {
        self.ranks.iter().find(|facts| facts.rank == rank)
    }
}

impl Decision {
    /// How the two compare.
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

    /// The ranks that somebody chose, and those that are seen differently; each figure ours / theirs.
    pub(crate) fn markdown(&self) -> String {
        let mut out = String::from("| rank |");
        for (name, _) in QUANTITIES {
            out += &format!(" {name} |");
        }
        out += " chosen by |\n|---|---|---|---|---|---|---|\n";
        for (ours, theirs) in self.ours.ranks.iter().zip(&self.theirs.ranks) {
            let (by_us, by_them) = (self.ours.chosen == ours.rank, self.theirs.chosen == ours.rank);
            if ours == theirs && !by_us && !by_them {
                continue;
            }
            let chosen_by = match (by_us, by_them) {
                (true, true) => "both",
                (true, false) => "ours",
                (false, true) => "theirs",
                (false, false) => "",
            };
            let (us, them) = (ours, theirs);
            writeln!(
                out,
                "| {} | {} / {} | {} / {} | {} / {} | {} / {} | {} / {} | {chosen_by} |",
                us.rank,
                us.overlap_blocks,
                them.overlap_blocks,
                us.potential_blocks,
                them.potential_blocks,
                us.prefill_tokens,
                them.prefill_tokens,
                us.active_requests,
                them.active_requests,
                us.cost,
                them.cost,
            )
            .expect("writing to a string cannot fail");
        }
        out
    }
}

/// Counts of one run.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Tally {
    /// Decisions.
    decisions: u64,
    /// Those tied.
    tied: u64,
    /// Tied ones in which each chose what costs least for the other too.
    tied_alike: u64,
    /// Untied ones in which both chose the same rank.
    agrees: u64,
    /// The other untied ones, by what was seen differently on the chosen ranks; `pick` when nothing was.
    differs: BTreeMap<String, u64>,
    /// Untied ones whose rank, as we chose it, held less of the prompt than another: load outweighed the cache.
    colder: u64,
    /// Untied ones whose rank, as we chose it, had another below it in blocks: the cache outweighed load.
    busier: u64,
    /// Choices of ours, tied or not, that cost more than another rank.
    ours_astray: u64,
    /// Choices of theirs, tied or not, that cost more than another rank by the costs computed for them.
    theirs_astray: u64,
    /// Rows compared: one a rank and decision.
    rows: u64,
    /// Rows that are seen differently, by what.
    rows_differ: BTreeMap<&'static str, u64>,
}

impl Tally {
    /// Counts one decision, whose verdict is `verdict`.
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

    /// Untied decisions in which they chose differently.
    pub(crate) fn differing(&self) -> u64 {
        self.differs.values().sum()
    }

    /// Untied decisions in which both chose the same rank, in %. None when all are tied.
    pub(crate) fn agreement_percent(&self) -> Option<f64> {
        let untied = self.decisions - self.tied;
        (untied > 0).then(|| 100.0 * self.agrees as f64 / untied as f64)
    }
}

/// One row a fleet.
pub(crate) fn markdown(fleets: &[(u32, Tally)]) -> String {
    let mut out = String::from(
        "| ranks | decisions | tied (alike) | untied | agree | agreement | differ by | colder / busier | \
         astray, ours / theirs | rows | rows that differ |\n|---|---|---|---|---|---|---|---|---|---|---|\n",
    );
    let show = |counts: &mut dyn Iterator<Item = (&str, u64)>| {
        let shown: Vec<_> = counts.filter(|(_, count)| *count > 0).map(|(name, n)| format!("{name} {n}")).collect();
        if shown.is_empty() { "-".to_owned() } else { shown.join(", ") }
    };
    for (ranks, tally) in fleets {
        let agreement = tally.agreement_percent().map_or("-".to_owned(), |percent| format!("{percent:.3} %"));
        let differ = show(&mut tally.differs.iter().map(|(name, count)| (name.as_str(), *count)));
        let rows_differ = show(&mut tally.rows_differ.iter().map(|(name, count)| (*name, *count)));
        writeln!(
            out,
            "| {ranks} | {} | {} ({}) | {} | {} | {agreement} | {differ} | {} / {} | {} / {} | {} | {rows_differ} |",
            tally.decisions,
            tally.tied,
            tally.tied_alike,
            tally.decisions - tally.tied,
            tally.agrees,
            tally.colder,
            tally.busier,
            tally.ours_astray,
            tally.theirs_astray,
            tally.rows,
        )
        .expect("writing to a string cannot fail");
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

    /// One rank for each cost, the first numbered 1.
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
    fn a_tie_on_either_side_is_no_disagreement() {
        let tied = Decision { ours: view(1, &[2.0, 2.0, 3.0]), theirs: view(2, &[2.0, 2.0, 3.0]) };
        let tied_for_them = Decision { ours: view(1, &[2.0, 2.5, 3.0]), theirs: view(2, &[2.0, 2.0, 3.0]) };
        assert_eq!(tied.verdict(), Verdict::Tied);
        assert_eq!(tied_for_them.verdict(), Verdict::Tied);
        let tally = tally(&[tied, tied_for_them]);
        assert_eq!((tally.tied, tally.tied_alike, tally.agreement_percent()), (2, 1, None));
    }

    #[test]
    fn a_difference_is_put_down_to_what_is_seen_differently() {
        let mut theirs = view(2, &[2.5, 2.0, 9.0]);
        theirs.ranks[0].overlap_blocks = 4;
        theirs.ranks[2].prefill_tokens = 64; // on a rank that nobody chose
        let differs = Decision { ours: view(1, &[2.0, 3.0, 9.0]), theirs };
        assert_eq!(differs.verdict(), Verdict::Differs("overlap and cost".to_owned()));
        let astray = Decision { ours: view(1, &[1.0, 2.0]), theirs: view(2, &[1.0, 2.0]) };
        assert_eq!(astray.verdict(), Verdict::Differs("pick".to_owned()));
        let agrees = || Decision { ours: view(1, &[1.0, 2.0]), theirs: view(1, &[1.5, 2.0]) };
        let tally = tally(&[differs, astray, agrees(), agrees()]);
        assert_eq!((tally.differing(), tally.agreement_percent()), (2, Some(50.0)));
        assert_eq!((tally.ours_astray, tally.theirs_astray, tally.rows), (0, 1, 9));
        assert_eq!((tally.rows_differ["overlap"], tally.rows_differ["prefill"], tally.rows_differ["cost"]), (1, 1, 4));
    }

    #[test]
    fn tables_have_as_many_cells_in_each_line() {
        let decision = Decision { ours: view(1, &[1.0, 2.0, 3.0]), theirs: view(2, &[1.5, 1.0, 3.0]) };
        let explained = decision.markdown();
        assert_eq!(explained.lines().count(), 4, "{explained}");
        for text in [explained, markdown(&[(3, tally(&[decision])), (8, Tally::default())])] {
            let cells: Vec<_> = text.lines().map(|line| line.matches('|').count()).collect();
            assert!(cells.iter().all(|count| *count == cells[0]), "{text}");
        }
    }
}
