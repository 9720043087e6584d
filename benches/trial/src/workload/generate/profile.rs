//! Periodic change of the arrival rate, a setting of all generators with open-loop arrivals.
//!
//! Arrival times of the finished workload are mapped to new times, so that prompts and their order stay the same. Gaps
//! within a conversation change by the same factor as the rate at that time.

use super::Generator;
use super::settings::{Checked, settings};
use crate::workload::Workload;

settings! {
    /// A rate that alternates between two values; the mean rate is unchanged.
    ///
    /// Long periods with a moderate peak give a rate that swings; short peaks give bursts.
    ///
    /// ```
    /// use pointsman_trial::workload::generate::Generator;
    ///
    /// let text = "unique:requests=1000,peak=4.0,peak_share=0.2,period_s=10";
    /// let bursts: Generator = text.parse()?;
    /// let requests = bursts.generate(1).requests;
    /// let in_peak = requests.iter().filter(|request| request.arrival_us % 10_000_000 < 2_000_000).count();
    /// assert!((700..900).contains(&in_peak), "{in_peak}");
    /// # Ok::<(), pointsman_trial::workload::WorkloadError>(())
    /// ```
    pub struct Profile {
        /// Rate during the peak, as a multiple of the mean rate. 1, a constant rate.
        pub peak: f64 = 1.0,
        /// Share of each period with the peak rate, at the period's start. 0.5.
        pub peak_share: f64 = 0.5,
        /// Length of a period in seconds. 60.
        pub period_s: u32 = 60,
    }
}

/// A generator with a varying rate.
#[derive(Clone, Debug, PartialEq)]
pub struct Varied {
    /// The generator.
    pub generator: Box<Generator>,
    /// Its rate over time.
    pub profile: Profile,
}

impl Profile {
    pub(super) fn check(&self) -> Checked {
        let Self { peak, peak_share, period_s } = *self;
        if !(peak_share > 0.0 && peak_share < 1.0) {
            return Err(format!("peak_share is {peak_share}, must be above 0 and below 1"));
        }
        if !(peak >= 1.0 && peak * peak_share < 1.0) {
            return Err(format!("peak is {peak}, must be at least 1 and below 1 / peak_share"));
        }
        if !(1..=1_000_000).contains(&period_s) {
            return Err(format!("period_s is {period_s}, must be 1 to 1000000"));
        }
        Ok(())
    }

    /// Maps the arrival times of `workload`.
    pub(super) fn apply(&self, workload: &mut Workload) {
        for request in &mut workload.requests {
            request.arrival_us = self.map_us(request.arrival_us);
        }
    }

    /// Time at which the varying rate has produced as many requests as the constant rate at `at_us`.
    fn map_us(&self, at_us: u64) -> u64 {
        let period_us = u64::from(self.period_s) * 1_000_000;
        let (start_us, within) = (at_us - at_us % period_us, (at_us % period_us) as f64 / period_us as f64);
        let in_peak = self.peak * self.peak_share; // share of a period's requests
        let mapped = if within < in_peak {
            within / self.peak
        } else {
            self.peak_share + (within - in_peak) * (1.0 - self.peak_share) / (1.0 - in_peak)
        };
        start_us + (mapped * period_us as f64).round() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_map_is_monotone_and_keeps_periods() {
        let bursts = Profile { peak: 8.0, peak_share: 0.1, period_s: 20 };
        bursts.check().expect("valid");
        let mapped: Vec<u64> = (0..=400).map(|step| bursts.map_us(step * 100_000)).collect();
        assert!(mapped.is_sorted());
        assert_eq!((mapped[0], mapped[80], mapped[200], mapped[400]), (0, 1_000_000, 20_000_000, 40_000_000));
        assert_eq!(mapped[160], 2_000_000); // 80 % of the requests in 10 % of the time
        assert_eq!(Profile::default().map_us(1_234_567), 1_234_567);
    }

    #[test]
    fn profiles_out_of_bounds_are_rejected() {
        for (peak, peak_share, period_s) in
            [(0.5, 0.5, 60), (2.0, 0.5, 60), (1.5, 1.0, 60), (1.5, 0.0, 60), (1.5, 0.5, 0)]
        {
            assert!(Profile { peak, peak_share, period_s }.check().is_err(), "{peak} {peak_share} {period_s}");
        }
        assert!(Profile { peak: f64::NAN, ..Profile::default() }.check().is_err());
    }
}
