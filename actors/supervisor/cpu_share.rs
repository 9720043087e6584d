//! Share of the CPU time that this process wanted and got.
//!
//! Linux counts for each thread the nanoseconds on a CPU and the nanoseconds in a run queue
//! (`/proc/self/task/*/schedstat`, proc(5)). Without these files only the delay of the sampling thread counts.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::time::Duration;

use tokio::time::Instant;

/// CPU time of the threads at the last sample.
pub(super) struct CpuShare {
    at: Instant,
    /// Nanoseconds on a CPU and in a run queue, by thread id.
    threads: BTreeMap<OsString, [u64; 2]>,
}

impl Default for CpuShare {
    fn default() -> Self {
        Self { at: Instant::now(), threads: threads() }
    }
}

impl CpuShare {
    /// Share since the last sample, which was to be `interval` ago: 1 for a process whose threads waited for no CPU, 0
    /// if this sample is an interval late.
    pub(super) fn next(&mut self, interval: Duration) -> f64 {
        let before = std::mem::take(self);
        let is_late = self.at.duration_since(before.at) >= 2 * interval;
        let mut sums = [0, 0];
        for (thread, now) in &self.threads {
            let then = before.threads.get(thread).copied().unwrap_or_default();
            for (sum, (now, then)) in sums.iter_mut().zip(now.iter().zip(then)) {
                *sum += now.saturating_sub(then);
            }
        }
        if is_late { 0.0 } else { share(sums) }
    }
}

#[expect(clippy::cast_precision_loss, reason = "a share needs few digits")]
fn share([on_cpu, in_queue]: [u64; 2]) -> f64 {
    if on_cpu + in_queue == 0 { 1.0 } else { on_cpu as f64 / (on_cpu + in_queue) as f64 }
}

fn threads() -> BTreeMap<OsString, [u64; 2]> {
    let tasks = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let times = tasks.filter_map(|task| {
        let text = fs::read_to_string(task.path().join("schedstat")).ok()?;
        let mut fields = text.split_ascii_whitespace().map_while(|field| field.parse().ok());
        Some((task.file_name(), [fields.next()?, fields.next()?]))
    });
    times.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn share_of_wanted_cpu_time() {
        assert_eq!([[0, 0], [5, 0], [1, 3], [0, 7]].map(share), [1.0, 1.0, 0.25, 0.0]);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn threads_that_waited_for_a_cpu_reduce_the_share() {
        let mut cpu = CpuShare::default();
        assert!(!cpu.threads.is_empty(), "no schedstat");
        cpu.threads.values_mut().for_each(|[_, in_queue]| *in_queue = 0);
        let waited = threads().values().map(|[_, in_queue]| in_queue).sum::<u64>();
        assert!(waited == 0 || cpu.next(Duration::from_secs(3600)) < 1.0);
        cpu.at -= Duration::from_millis(20);
        assert_eq!(cpu.next(Duration::from_millis(10)), 0.0, "a late sample");
    }
}
