//! Recorded choices beside those under other settings.

use std::collections::BTreeMap;
use std::fmt;

use pointsman::protocol::WorkerRank;
use pointsman::{AppraisedRank, ReplayedDecision};

use super::WorkerNames;

/// Sums over the compared decisions.
#[derive(Debug, Default)]
pub(super) struct Comparison {
    name: String,
    listed_max: usize,
    decisions: u64,
    prompt_tokens: u64,
    pub(super) changed: u64,
    /// The first changed choices, as lines.
    listed: Vec<String>,
    recorded: Choices,
    other: Choices,
}

/// Choices under one configuration.
#[derive(Debug, Default)]
struct Choices {
    cached_tokens: u64,
    ttft_seconds: f64,
    /// Choices with a predicted time to first token.
    predicted: u64,
    rejected: u64,
    by_rank: BTreeMap<WorkerRank, u64>,
}

impl Choices {
    fn add(&mut self, choice: &AppraisedRank) {
        let AppraisedRank { rank, cached_tokens, ttft_seconds } = *choice;
        self.cached_tokens += u64::from(cached_tokens);
        if let Some(seconds) = ttft_seconds {
            self.ttft_seconds += seconds;
            self.predicted += 1;
        }
        match rank {
            Some(rank) => *self.by_rank.entry(rank).or_default() += 1,
            None => self.rejected += 1,
        }
    }

    /// Requests of the busiest rank as a multiple of the mean.
    fn spread(&self) -> f64 {
        let (most, sum) = (self.by_rank.values().max().copied().unwrap_or(0), self.by_rank.values().sum::<u64>());
        ratio(most as f64 * self.by_rank.len() as f64, sum as f64)
    }
}

fn ratio(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}

impl Comparison {
    pub(super) fn new(name: String, listed_max: usize) -> Self {
        Self { name, listed_max, ..Self::default() }
    }

    /// Adds a decision. Rejections and requests for a given rank are not compared.
    pub(super) fn add(&mut self, decision: &ReplayedDecision, names: &WorkerNames) {
        let Some(report) = &decision.report else { return };
        let (chosen, Some((_, other))) = (&report.chosen, report.shadows.first()) else { return };
        self.decisions += 1;
        self.prompt_tokens += u64::from(decision.prompt_tokens);
        self.recorded.add(chosen);
        self.other.add(other);
        if chosen.rank != other.rank {
            self.changed += 1;
            if self.listed.len() < self.listed_max {
                self.listed.push(line(decision, chosen, other, names));
            }
        }
    }
}

fn line(decision: &ReplayedDecision, chosen: &AppraisedRank, other: &AppraisedRank, names: &WorkerNames) -> String {
    let shown = |choice: &AppraisedRank| {
        let rank = choice.rank.map_or("none".to_owned(), |rank| names.rank(rank));
        let ttft = choice.ttft_seconds.map_or(String::new(), |seconds| format!(", {:.1} ms", seconds * 1e3));
        format!("{rank} ({} cached{ttft})", choice.cached_tokens)
    };
    format!(
        "{} {}: {} tokens, {} -> {}",
        decision.number,
        decision.id,
        decision.prompt_tokens,
        shown(chosen),
        shown(other)
    )
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, decisions, prompt_tokens, changed, recorded, other, .. } = self;
        let share = 100.0 * ratio(*changed as f64, *decisions as f64);
        writeln!(f, "{decisions} decisions, {changed} ({share:.1} %) differ under {name}")?;
        writeln!(f, "{:28}{:>14}{:>14}", "", "recorded", "other")?;
        let hits = |choices: &Choices| 100.0 * ratio(choices.cached_tokens as f64, *prompt_tokens as f64);
        writeln!(f, "{:28}{:>14.2}{:>14.2}", "cached share of tokens, %", hits(recorded), hits(other))?;
        writeln!(f, "{:28}{:>14.2}{:>14.2}", "busiest rank / mean", recorded.spread(), other.spread())?;
        let ttft = |choices: &Choices| 1e3 * ratio(choices.ttft_seconds, choices.predicted as f64);
        if recorded.predicted > 0 {
            writeln!(f, "{:28}{:>14.2}{:>14.2}", "mean predicted TTFT, ms", ttft(recorded), ttft(other))?;
        }
        writeln!(f, "{:28}{:>14}{:>14}", "without a rank", recorded.rejected, other.rejected)?;
        self.listed.iter().try_for_each(|line| writeln!(f, "  {line}"))
    }
}
