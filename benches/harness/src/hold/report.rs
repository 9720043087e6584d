//! Report of a held load.

use std::fmt;

use serde::Serialize;

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
    /// Time from the scheduled arrival to the placement: p50, p99, p99.9, maximum.
    pub(super) route_us: [f64; 4],
    /// Resident memory, once per second.
    pub(super) rss_bytes: Vec<u64>,
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

impl fmt::Display for HoldReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MIB: f64 = (1 << 20) as f64;
        let [p50, p99, p999, max] = self.route_us;
        let per_second = |count: u64| count as f64 / self.wall_s;
        writeln!(f, "measured time      {:.1} s, {:.1} s of CPU time", self.wall_s, self.cpu_s)?;
        writeln!(
            f,
            "requests routed    {} ({:.0}/s), {} in flight",
            self.routed,
            per_second(self.routed),
            self.inflight
        )?;
        writeln!(
            f,
            "KV events          {} ({:.0}/s), {} blocks indexed at the start, {} at the end",
            self.events,
            per_second(self.events),
            self.index_blocks[0],
            self.index_blocks[1]
        )?;
        writeln!(f, "route              p50 {p50:.1} µs, p99 {p99:.1} µs, p99.9 {p999:.1} µs, maximum {max:.1} µs")?;
        let (half, last) = (&self.rss_bytes[self.rss_bytes.len() / 2..], self.rss_bytes.last().copied().unwrap_or(0));
        writeln!(
            f,
            "resident memory    {:.1} MiB at the end, slope {:+.3} MiB/min over all, {:+.3} MiB/min over the second half",
            last as f64 / MIB,
            slope(&self.rss_bytes) * 60.0 / MIB,
            slope(half) * 60.0 / MIB
        )?;
        writeln!(
            f,
            "failures           {}, restarts of actors {}, hangs {:?}",
            self.failures.len(),
            self.restarts,
            self.hangs
        )?;
        write!(
            f,
            "left at the end    {} bookings, {} booked blocks, {} waiting requests, {} index blocks",
            self.left_bookings, self.left_blocks, self.left_waiting, self.left_index_blocks
        )
    }
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
