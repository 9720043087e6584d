//! Report of a held load.

use serde::Serialize;

use crate::replay::Percentiles;

/// Figures of one run.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct HoldReport {
    /// Measured time.
    pub(super) wall_s: f64,
    /// CPU time of the process in it, with the simulated ranks and clients.
    pub(super) cpu_s: f64,
    /// Routed requests in it.
    pub(super) routed: u64,
    /// KV events in it.
    pub(super) events: u64,
    /// Requests in flight at its end.
    pub(super) inflight: usize,
    /// Indexed blocks at its start and end.
    pub(super) index_blocks: [u64; 2],
    /// Time from the scheduled arrival to the placement.
    pub(super) route_us: Percentiles,
    /// Longest of these times.
    pub(super) route_us_max: f64,
    /// Resident memory.
    pub(super) rss: Resident,
    /// Restarts of actors.
    pub(super) restarts: u64,
    /// Hangs that the watchdog detected: labels and count.
    pub(super) hangs: Vec<String>,
    /// Errors of requests and events.
    pub(super) failures: Vec<String>,
    /// Bookings that are left.
    pub(super) left_bookings: usize,
    /// Booked blocks that are left.
    pub(super) left_blocks: u64,
    /// Waiting requests that are left.
    pub(super) left_waiting: u64,
    /// Index blocks that are left.
    pub(super) left_index_blocks: u64,
}

impl HoldReport {
    pub(super) fn has_no_residue(&self) -> bool {
        (self.left_bookings, self.left_blocks, self.left_waiting, self.left_index_blocks) == (0, 0, 0, 0)
    }

    /// Why the run failed.
    pub(super) fn violation(&self) -> Option<String> {
        if let Some(first) = self.failures.first() {
            return Some(format!("{} errors, the first: {first}", self.failures.len()));
        }
        let Self { left_bookings, left_blocks, left_waiting, left_index_blocks, .. } = self;
        (!self.has_no_residue()).then(|| {
            format!(
                "{left_bookings} bookings, {left_blocks} booked blocks, {left_waiting} waiting requests and \
                 {left_index_blocks} index blocks are left"
            )
        })
    }
}

/// Resident memory in MiB, from one sample per second.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Resident {
    /// At the end.
    end_mib: f64,
    /// Slope over the measured time.
    mib_per_minute: f64,
    /// Slope over its second half.
    mib_per_minute_of_half: f64,
}

impl Resident {
    pub(super) fn of(rss_bytes: &[u64]) -> Self {
        const MIB: f64 = (1 << 20) as f64;
        Self {
            end_mib: rss_bytes.last().copied().unwrap_or_default() as f64 / MIB,
            mib_per_minute: slope(rss_bytes) * 60.0 / MIB,
            mib_per_minute_of_half: slope(&rss_bytes[rss_bytes.len() / 2..]) * 60.0 / MIB,
        }
    }
}

/// Slope of equally spaced samples per step, by least squares; 0 for fewer than two.
fn slope(samples: &[u64]) -> f64 {
    let n = samples.len() as f64;
    let (mean_x, mean_y) = ((n - 1.0) / 2.0, samples.iter().sum::<u64>() as f64 / n);
    let (mut covariance, mut variance) = (0.0, 0.0);
    for (x, y) in samples.iter().enumerate() {
        let x = x as f64 - mean_x;
        covariance += x * (*y as f64 - mean_y);
        variance += x * x;
    }
    if variance == 0.0 { 0.0 } else { covariance / variance }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slope_is_that_of_a_line() {
        assert_eq!(slope(&[5, 8, 11, 14]), 3.0);
        assert_eq!(slope(&[7]), 0.0);
    }

    #[test]
    fn residue_is_a_violation() {
        assert_eq!(HoldReport::default().violation(), None);
        let left = HoldReport { left_bookings: 2, ..HoldReport::default() };
        assert!(left.violation().expect("left").starts_with("2 bookings"));
    }
}
