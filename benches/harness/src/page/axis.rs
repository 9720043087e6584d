//! Axes of plots: scales and tick labels.
//!
//! An axis has few ticks at round values, so that labels do not overlap.

use std::ops::Range;

/// Target number of ticks.
const TICKS: f64 = 5.0;

/// An axis of a plot.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Axis {
    title: String,
    scale: Scale,
    range: Range<f64>,
    /// Labelled values with their labels.
    ticks: Vec<(f64, String)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scale {
    Linear,
    Logarithm,
    /// Equal space for each nine: 90 %, 99 %, 99.9 %.
    Nines,
}

impl Scale {
    fn place(self, value: f64) -> f64 {
        match self {
            Self::Linear => value,
            Self::Logarithm => value.max(f64::MIN_POSITIVE).log10(),
            Self::Nines => -(1.0 - value).max(1e-9).log10(),
        }
    }
}

impl Axis {
    /// Shares from 0 to 99.9 %, with most of the space near 1.
    pub(super) fn shares() -> Self {
        let ticks = [(0.0, "0"), (0.5, "50"), (0.9, "90"), (0.99, "99"), (0.999, "99.9")];
        let ticks = ticks.map(|(share, name)| (share, name.to_owned())).to_vec();
        Self { title: "% of requests or gaps".to_owned(), scale: Scale::Nines, range: 0.0..0.9992, ticks }
    }

    /// Percentages from 0 to 100.
    pub(super) fn percent(title: &str) -> Self {
        let ticks = [0, 25, 50, 75, 100].map(|percent| (f64::from(percent) / 100.0, percent.to_string())).to_vec();
        Self { title: title.to_owned(), scale: Scale::Linear, range: 0.0..1.0, ticks }
    }

    /// Time of a run, in minutes for long runs.
    pub(super) fn clock(seconds: f64) -> Self {
        let (unit, title) = if seconds > 600.0 { (60.0, "time, minutes") } else { (1.0, "time, seconds") };
        let mut axis = Self::from_zero(title, seconds / unit);
        axis.range.end = seconds.max(1e-3);
        axis.ticks.retain(|(value, _)| value * unit <= seconds);
        axis.ticks.iter_mut().for_each(|(value, _)| *value *= unit);
        axis
    }

    /// Linear axis from 0 to at least `max`.
    pub(super) fn from_zero(title: &str, max: f64) -> Self {
        let max = if max > 0.0 { max } else { 1.0 };
        let step = round_step(max / TICKS);
        let count = (max / step).ceil() as u32;
        let decimals = usize::try_from((-step.log10().floor()) as i64).unwrap_or_default();
        let ticks = (0..=count).map(|tick| f64::from(tick) * step).map(|value| (value, format!("{value:.decimals$}")));
        Self {
            title: title.to_owned(),
            scale: Scale::Linear,
            range: 0.0..f64::from(count) * step,
            ticks: ticks.collect(),
        }
    }

    /// Rank numbers, each in the middle of its row.
    pub(super) fn ranks(count: usize) -> Self {
        let step = (1..).find(|step| count.div_ceil(*step) <= 8).unwrap_or(count);
        let ticks = (0..count).step_by(step).map(|rank| (rank as f64 + 0.5, rank.to_string())).collect();
        Self { title: "rank".to_owned(), scale: Scale::Linear, range: 0.0..count as f64, ticks }
    }

    /// Times from `least` to `most` seconds; logarithmic if they span half a decade or more.
    pub(super) fn times(title: &str, least: f64, most: f64) -> Self {
        let (least, most) = (least.max(1e-6), most.max(2e-6));
        if most / least < 3.0 {
            let unit = if most < 1.0 { 1e-3 } else { 1.0 };
            let mut axis = Self::from_zero(title, most / unit);
            axis.ticks.iter_mut().for_each(|(value, name)| {
                *value *= unit;
                *name = time(*value);
            });
            axis.range.end *= unit;
            return axis;
        }
        let decades = (most / least).log10();
        let digits: &[f64] = match decades {
            few if few < 2.0 => &[1.0, 2.0, 5.0],
            some if some < 3.5 => &[1.0, 3.0],
            _ => &[1.0],
        };
        let range = least / 1.1..most * 1.1;
        let powers = (range.start.log10().floor() as i32)..=(range.end.log10().ceil() as i32);
        let values = powers.flat_map(|power| digits.iter().map(move |digit| digit * 10_f64.powi(power)));
        let ticks = values.filter(|value| range.contains(value)).map(|value| (value, time(value))).collect();
        Self { title: title.to_owned(), scale: Scale::Logarithm, range, ticks }
    }

    pub(super) fn title(&self) -> &str {
        &self.title
    }

    /// Lower end of the axis.
    pub(super) fn start(&self) -> f64 {
        self.range.start
    }

    /// Upper end of the axis.
    pub(super) fn end(&self) -> f64 {
        self.range.end
    }

    /// Labelled values with their labels.
    pub(super) fn ticks(&self) -> &[(f64, String)] {
        &self.ticks
    }

    /// Relative position of a value on the axis, from 0 to 1.
    pub(super) fn place(&self, value: f64) -> f64 {
        let place = |value| self.scale.place(value);
        let (first, last) = (place(self.range.start), place(self.range.end));
        (place(value.clamp(self.range.start, self.range.end)) - first) / (last - first)
    }
}

/// Smallest of 1, 2 or 5 times a power of ten that is not below `least`.
fn round_step(least: f64) -> f64 {
    let power = 10_f64.powf(least.log10().floor());
    [1.0, 2.0, 5.0, 10.0].map(|digit| digit * power).into_iter().find(|step| *step >= least * 0.999).unwrap_or(power)
}

/// Formats a round time without trailing zeros.
fn time(seconds: f64) -> String {
    let round = |value: f64| {
        let text = format!("{value:.3}");
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    };
    match seconds {
        0.0 => "0".to_owned(),
        short if short < 0.999e-3 => format!("{} µs", round(short * 1e6)),
        middling if middling < 0.999 => format!("{} ms", round(middling * 1e3)),
        long => format!("{} s", round(long)),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn names(axis: &Axis) -> Vec<String> {
        axis.ticks.iter().map(|(_, name)| name.clone()).collect()
    }

    #[test]
    fn ticks_are_round() {
        assert_eq!(names(&Axis::from_zero("requests", 37.0)), ["0", "10", "20", "30", "40"]);
        assert_eq!(names(&Axis::from_zero("requests", 1.3)), ["0.0", "0.5", "1.0", "1.5"]);
        assert_eq!(names(&Axis::from_zero("requests", 0.0)), ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]);
        assert_eq!(names(&Axis::times("TTFT", 0.04, 0.9)), ["50 ms", "100 ms", "200 ms", "500 ms"]);
        assert_eq!(names(&Axis::times("TTFT", 0.004, 9.0)), ["10 ms", "30 ms", "100 ms", "300 ms", "1 s", "3 s"]);
        assert_eq!(names(&Axis::times("TTFT", 1e-4, 9.0)), ["100 µs", "1 ms", "10 ms", "100 ms", "1 s"]);
        assert_eq!(names(&Axis::times("TTFT", 0.7, 0.9)), ["0", "200 ms", "400 ms", "600 ms", "800 ms", "1 s"]);
        assert_eq!(names(&Axis::clock(1_200.0)), ["0", "5", "10", "15", "20"]);
        assert_eq!(names(&Axis::ranks(32)), ["0", "4", "8", "12", "16", "20", "24", "28"]);
        assert_eq!(names(&Axis::ranks(3)), ["0", "1", "2"]);
        assert_eq!(names(&Axis::shares()), ["0", "50", "90", "99", "99.9"]);
    }

    proptest! {
        #[test]
        fn ticks_are_few_and_on_the_axis(max in 1e-4_f64..1e6, least in 1e-5_f64..1.0, times in 1.0_f64..1e4) {
            for axis in [Axis::from_zero("", max), Axis::clock(max), Axis::times("", least, least * times)] {
                prop_assert!((1..=9).contains(&axis.ticks.len()), "{:?}", axis);
                for (value, name) in &axis.ticks {
                    prop_assert!((axis.range.start..=axis.range.end).contains(value), "{:?}", axis);
                    prop_assert!(!name.is_empty());
                }
            }
        }
    }
}
