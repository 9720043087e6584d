//! Figures for the comparison of policies, and the verdict that follows from their ratios.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::Ratio;
use crate::results::Summary;

/// Ratios closer to 1 than this are ties.
pub const TIE: f64 = 0.02;

/// A figure of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Figure {
    /// Mean time to the first token.
    TtftMean,
    /// 99th percentile of the time to the first token.
    TtftP99,
    /// Mean time to the last token.
    E2eMean,
    /// 99th percentile of the time to the last token.
    E2eP99,
    /// 99th percentile of the mean gap between the tokens of one answer.
    ItlP99,
    /// Cached prompt tokens divided by all prompt tokens.
    HitRate,
}

impl Figure {
    /// All figures, in the order of tables.
    pub const ALL: [Self; 6] =
        [Self::TtftMean, Self::TtftP99, Self::E2eMean, Self::E2eP99, Self::ItlP99, Self::HitRate];

    /// Figures that decide a verdict: means, which affect all users, and not percentiles.
    pub const DECIDING: [Self; 2] = [Self::TtftMean, Self::E2eMean];

    /// Figures that no workload may worsen by more than 2 %.
    pub const JUDGED: [Self; 4] = [Self::TtftMean, Self::TtftP99, Self::E2eMean, Self::ItlP99];

    /// Value of the figure in a run.
    #[must_use]
    pub fn of(self, run: &Summary) -> Option<f64> {
        match self {
            Self::TtftMean => run.ttft_seconds.map(|ttft| ttft.mean),
            Self::TtftP99 => run.ttft_seconds.map(|ttft| ttft.p99),
            Self::E2eMean => run.e2e_seconds.map(|e2e| e2e.mean),
            Self::E2eP99 => run.e2e_seconds.map(|e2e| e2e.p99),
            Self::ItlP99 => run.itl_seconds.map(|itl| itl.p99),
            Self::HitRate => run.hit_rate,
        }
    }

    /// Name of the figure in tables.
    #[must_use]
    pub fn title(self) -> &'static str {
        match self {
            Self::TtftMean => "TTFT mean",
            Self::TtftP99 => "TTFT p99",
            Self::E2eMean => "end-to-end mean",
            Self::E2eP99 => "end-to-end p99",
            Self::ItlP99 => "ITL p99",
            Self::HitRate => "hit rate",
        }
    }

    /// Returns whether a lower value is better.
    #[must_use]
    pub fn is_time(self) -> bool {
        self != Self::HitRate
    }

    /// Improvement expressed by a ratio: above 1 better, below 1 worse.
    fn gain(self, ratio: f64) -> f64 {
        if self.is_time() { 1.0 / ratio } else { ratio }
    }
}

/// Result of a policy relative to the first one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Better by more than 2 % in one of the deciding figures, and worse by more than 2 % in none.
    Wins,
    /// Within 2 % in all of them.
    Ties,
    /// Worse by more than 2 % in one of them.
    Loses,
}

impl Verdict {
    /// Verdict from ratios to the first policy; none if a [deciding](Figure::DECIDING) figure has no ratio.
    #[must_use]
    pub fn of(ratios: &BTreeMap<Figure, Ratio>) -> Option<Self> {
        let deciding: Option<Vec<&Ratio>> = Figure::DECIDING.iter().map(|figure| ratios.get(figure)).collect();
        let deciding = deciding?;
        Some(if deciding.iter().any(|ratio| ratio.ratio > 1.0 + TIE) {
            Self::Loses
        } else if deciding.iter().any(|ratio| ratio.ratio < 1.0 - TIE) {
            Self::Wins
        } else {
            Self::Ties
        })
    }
}

/// All figures that are worse by more than 2 %, deciding or not.
#[must_use]
pub fn worse(ratios: &BTreeMap<Figure, Ratio>) -> Vec<Figure> {
    let is_worse =
        |(figure, ratio): (&Figure, &Ratio)| (figure.gain(ratio.ratio) < 1.0 / (1.0 + TIE)).then_some(*figure);
    ratios.iter().filter_map(is_worse).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ratios(given: &[(Figure, f64)]) -> BTreeMap<Figure, Ratio> {
        let ratio = |(figure, ratio): &(Figure, f64)| (*figure, Ratio { ratio: *ratio, interval: None, pairs: 1 });
        given.iter().map(ratio).collect()
    }

    #[test]
    fn ratios_beyond_two_per_cent_determine_the_verdict() {
        for (ttft, e2e, verdict) in [
            (0.97, 1.0, Verdict::Wins),
            (0.98, 1.02, Verdict::Ties),
            (1.0, 0.9, Verdict::Wins),
            (0.5, 1.021, Verdict::Loses),
            (1.021, 0.5, Verdict::Loses),
        ] {
            let ratios = ratios(&[(Figure::TtftMean, ttft), (Figure::E2eMean, e2e), (Figure::ItlP99, 3.0)]);
            assert_eq!(Verdict::of(&ratios), Some(verdict), "{ttft} {e2e}");
        }
        assert_eq!(Verdict::of(&ratios(&[(Figure::TtftMean, 0.5)])), None);
    }

    #[test]
    fn all_worse_figures_are_listed() {
        let given = [(Figure::TtftMean, 0.5), (Figure::TtftP99, 1.03), (Figure::ItlP99, 1.01), (Figure::HitRate, 0.9)];
        assert_eq!(worse(&ratios(&given)), [Figure::TtftP99, Figure::HitRate]);
        assert_eq!(worse(&ratios(&[(Figure::HitRate, 1.3)])), []);
    }
}
