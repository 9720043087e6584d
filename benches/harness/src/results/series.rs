//! Data for plots: curves over percentiles, and the fleet over time.
//!
//! The size is bounded for any run: curves of at most [`CURVE_POINTS`] points, [`BINS`] bins of time, and individual
//! ranks only up to [`RANKS_MAX`].

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use super::load::ranks_of;
use crate::results::{RankSample, RequestRecord, Run};

/// Maximum number of points of a curve.
pub const CURVE_POINTS: usize = 200;

/// Maximum number of time bins; fewer if there are fewer samples of the ranks.
pub const BINS: usize = 120;

/// Maximum number of individually shown ranks; above, only minimum, mean and maximum are kept.
pub const RANKS_MAX: usize = 64;

/// Number of nines at the end of curves: 99.9 %.
const NINES: f64 = 3.0;

/// Data of a run for plots.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Series {
    /// Curve of the time to the first token: pairs of a share from 0 to 1 and its quantile in seconds.
    pub ttft: Vec<(f64, f64)>,
    /// Curve of the mean gap between the tokens of an answer.
    pub itl: Vec<(f64, f64)>,
    /// Curve of the gaps between tokens, each with equal weight.
    pub token_gap: Vec<(f64, f64)>,
    /// Curve of the time to the last token.
    pub e2e: Vec<(f64, f64)>,
    /// Length of a bin. The first bin begins with the run, so the bins include the warm-up.
    pub bin_seconds: f64,
    /// Arrival time of the first measured request.
    pub measured_from_seconds: f64,
    /// Mean number of requests in flight per bin.
    pub in_flight: Vec<f64>,
    /// Hit rate of the prompts admitted in each bin; none without such prompts or if not observable.
    pub hit_rate: Vec<Option<f64>>,
    /// Minimum over ranks of the mean number of requests per bin; empty if ranks are not observable.
    pub rank_requests_min: Vec<f64>,
    /// Mean over ranks.
    pub rank_requests_mean: Vec<f64>,
    /// Maximum over ranks.
    pub rank_requests_max: Vec<f64>,
    /// Individual ranks in order of their numbers; empty for more than [`RANKS_MAX`] or unobservable ranks.
    pub ranks: Vec<RankSeries>,
}

/// One rank over time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankSeries {
    /// Mean number of running and waiting requests per bin.
    pub requests: Vec<f64>,
    /// Hit rate of the prompts admitted in each bin; none without such prompts.
    pub hit_rate: Vec<Option<f64>>,
}

impl Series {
    /// Computes the series of `run`.
    #[must_use]
    pub fn of(run: &Run) -> Self {
        let measured = run.measured();
        let times = |of: fn(&RequestRecord) -> Option<u64>| {
            let answered = measured.iter().filter(|request| request.answered());
            curve(answered.filter_map(of).collect())
        };
        let bins = Bins::of(run);
        let ranks = rank_series(&run.rank_samples, run.ranks, bins, run.ended_us);
        let over_ranks = |of: fn(&[f64]) -> f64| -> Vec<f64> {
            let seen = if run.rank_samples.is_empty() { 0 } else { bins.count };
            let bin = |at: usize| rounded(of(&ranks.iter().map(|rank| rank.requests[at]).collect::<Vec<_>>()));
            (0..seen).map(bin).collect()
        };
        Self {
            ttft: times(RequestRecord::ttft_us),
            itl: times(|request| request.gap_us().map(|gap| gap.round() as u64)),
            token_gap: curve_of_histogram(&run.itl_us),
            e2e: times(RequestRecord::e2e_us),
            bin_seconds: bins.width_us as f64 / 1e6,
            measured_from_seconds: measured.first().map_or(run.ended_us, |first| first.due_us) as f64 / 1e6,
            in_flight: in_flight(run, bins),
            hit_rate: hit_rate(run, bins),
            rank_requests_min: over_ranks(|ranks| ranks.iter().copied().reduce(f64::min).unwrap_or_default()),
            rank_requests_mean: over_ranks(|ranks| ranks.iter().sum::<f64>() / ranks.len().max(1) as f64),
            rank_requests_max: over_ranks(|ranks| ranks.iter().copied().fold(0.0, f64::max)),
            ranks: if ranks.len() > RANKS_MAX || run.rank_samples.is_empty() { Vec::new() } else { ranks },
        }
    }
}

/// Shares of a curve over `count` values, with equal numbers of points between 0 and 90 % and between 90 and 99 %. Each
/// share has at least one value beyond it.
fn shares(count: u64) -> impl Iterator<Item = f64> {
    let last = (CURVE_POINTS - 1) as f64;
    let share = move |point: usize| 1.0 - 10_f64.powf(-NINES * point as f64 / last);
    (0..CURVE_POINTS).map(share).take_while(move |share| count > 0 && (1.0 - share) * count as f64 >= 0.999)
}

/// Curve by nearest rank, as in [`super::Distribution`].
fn curve(mut us: Vec<u64>) -> Vec<(f64, f64)> {
    us.sort_unstable();
    let at = |share: f64| us[((share * us.len() as f64).ceil() as usize).clamp(1, us.len()) - 1];
    shares(us.len() as u64).map(|share| (share, at(share) as f64 / 1e6)).collect()
}

fn curve_of_histogram(us: &Histogram<u64>) -> Vec<(f64, f64)> {
    shares(us.len()).map(|share| (share, us.value_at_quantile(share) as f64 / 1e6)).collect()
}

/// Equal parts of a run's time.
#[derive(Clone, Copy)]
struct Bins {
    width_us: u64,
    count: usize,
}

impl Bins {
    /// Each bin is wide enough to contain a sample of the ranks.
    fn of(run: &Run) -> Self {
        let samples = run.rank_samples.chunk_by(|one, next| one.at_us == next.at_us).take(BINS).count();
        let count = if samples == 0 { BINS } else { samples };
        Self { width_us: run.ended_us.div_ceil(count as u64).max(1), count }
    }

    fn at(self, time_us: u64) -> usize {
        usize::try_from(time_us / self.width_us).unwrap_or(usize::MAX).min(self.count - 1)
    }

    /// Adds `value` for the time from `from_us` to `until_us`, to each bin in proportion to the overlap.
    fn add(self, sums: &mut [f64], from_us: u64, until_us: u64, value: f64) {
        if until_us <= from_us {
            return;
        }
        for (bin, sum) in sums.iter_mut().enumerate().take(self.at(until_us - 1) + 1).skip(self.at(from_us)) {
            let start_us = bin as u64 * self.width_us;
            let within_us = until_us.min(start_us + self.width_us).saturating_sub(from_us.max(start_us));
            *sum += value * within_us as f64;
        }
    }

    /// Converts sums over time to means per bin.
    fn means(self, sums: &[f64]) -> Vec<f64> {
        sums.iter().map(|sum| rounded(sum / self.width_us as f64)).collect()
    }
}

/// Rounds to a thousandth, the resolution of plots.
fn rounded(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

fn rates(cached: &[u64], prompt: &[u64]) -> Vec<Option<f64>> {
    let rate = |(cached, prompt): (&u64, &u64)| super::share(*cached, *prompt).map(rounded);
    cached.iter().zip(prompt).map(rate).collect()
}

fn in_flight(run: &Run, bins: Bins) -> Vec<f64> {
    let mut sums = vec![0.0; bins.count];
    for request in &run.requests {
        let until_us = request.ended_us.or(request.failure.as_ref().map(|_| request.sent_us)).unwrap_or(run.ended_us);
        bins.add(&mut sums, request.sent_us, until_us, 1.0);
    }
    bins.means(&sums)
}

/// Hit rate by the admission time of prompts; by the time of the first token if ranks are not observable.
fn hit_rate(run: &Run, bins: Bins) -> Vec<Option<f64>> {
    let (mut cached, mut prompt) = (vec![0; bins.count], vec![0; bins.count]);
    if run.rank_samples.is_empty() {
        for request in &run.requests {
            if let (Some(at_us), Some(tokens)) = (request.first_token_us, request.cached_tokens) {
                cached[bins.at(at_us)] += tokens;
                prompt[bins.at(at_us)] += request.prompt_tokens;
            }
        }
    } else {
        let mut before = vec![(0, 0); ranks_of(run.ranks, &run.rank_samples)];
        for sample in &run.rank_samples {
            admitted(sample, &mut before[sample.rank as usize], bins.at(sample.at_us), &mut cached, &mut prompt);
        }
    }
    rates(&cached, &prompt)
}

/// Adds the admissions of a rank since its previous sample to a bin.
fn admitted(sample: &RankSample, before: &mut (u64, u64), bin: usize, cached: &mut [u64], prompt: &mut [u64]) {
    cached[bin] += sample.cached_tokens_total.saturating_sub(before.0);
    prompt[bin] += sample.prompt_tokens_total.saturating_sub(before.1);
    *before = (sample.cached_tokens_total, sample.prompt_tokens_total);
}

fn rank_series(samples: &[RankSample], ranks: u32, bins: Bins, ended_us: u64) -> Vec<RankSeries> {
    let mut of_rank: Vec<Vec<&RankSample>> = vec![Vec::new(); ranks_of(ranks, samples)];
    for sample in samples {
        of_rank[sample.rank as usize].push(sample);
    }
    of_rank.into_iter().map(|samples| one_rank(&samples, bins, ended_us)).collect()
}

fn one_rank(samples: &[&RankSample], bins: Bins, ended_us: u64) -> RankSeries {
    let mut sums = vec![0.0; bins.count];
    let (mut cached, mut prompt, mut before) = (vec![0; bins.count], vec![0; bins.count], (0, 0));
    for (number, sample) in samples.iter().enumerate() {
        let until_us = samples.get(number + 1).map_or(ended_us, |next| next.at_us);
        bins.add(&mut sums, sample.at_us, until_us, f64::from(sample.requests));
        admitted(sample, &mut before, bins.at(sample.at_us), &mut cached, &mut prompt);
    }
    RankSeries { requests: bins.means(&sums), hit_rate: rates(&cached, &prompt) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn curves_are_dense_at_the_end_and_limited_by_the_number_of_values() {
        let of: Vec<(f64, f64)> = curve((1..=1_000_000).collect());
        assert_eq!((of.len(), of[0]), (CURVE_POINTS, (0.0, 0.000_001)));
        assert!((of[CURVE_POINTS - 1].0 - 0.999).abs() < 1e-9, "{:?}", of[CURVE_POINTS - 1]);
        for (share, seconds) in &of {
            assert!((seconds - share).abs() < 2e-6, "{share} {seconds}");
        }
        let few = curve((1..=100).map(|second| second * 1_000_000).collect());
        assert!(few.iter().all(|(share, _)| *share <= 0.99 + 1e-9) && few.len() > 100, "{few:?}");
        assert_eq!((curve(Vec::new()), curve(vec![7]).len()), (Vec::new(), 1));
    }

    proptest! {
        #[test]
        fn bins_preserve_sums(
            spans in proptest::collection::vec((0_u64..1_000, 0_u64..500, 0_u32..9), 0..20), width in 1_u64..20
        ) {
            let bins = Bins { width_us: width, count: BINS };
            let mut sums = vec![0.0; BINS];
            let mut expected = vec![0.0; BINS];
            let end = width * BINS as u64;
            for (from, lasts, value) in spans {
                bins.add(&mut sums, from.min(end), (from + lasts).min(end), f64::from(value));
                for now in from.min(end)..(from + lasts).min(end) {
                    expected[(now / width) as usize] += f64::from(value);
                }
            }
            prop_assert_eq!(sums, expected);
        }
    }
}
