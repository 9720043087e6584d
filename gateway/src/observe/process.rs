//! Process metrics under the usual Prometheus names.
//!
//! Reads `/proc`; omits unavailable values, and all values outside Linux.

use std::fmt::Write as _;
use std::fs;
use std::str::FromStr;

/// Clock ticks per second in `/proc`, fixed on all platforms supported by Rust's standard library.
const TICKS_PER_SECOND: f64 = 100.0;

/// Name, kind, description.
pub(crate) const METRICS: [(&str, &str, &str); 5] = [
    ("process_start_time_seconds", "gauge", "Start of the process, in seconds since 1970."),
    ("process_cpu_seconds_total", "counter", "CPU time of the process, user and system."),
    ("process_resident_memory_bytes", "gauge", "Resident memory of the process."),
    ("process_open_fds", "gauge", "Open file descriptors, mostly connections."),
    ("process_max_fds", "gauge", "Limit of open file descriptors."),
];

/// The metrics in page format.
pub(crate) fn page() -> String {
    let mut page = String::new();
    for ((name, kind, help), value) in METRICS.into_iter().zip(values()) {
        if let Some(value) = value {
            writeln!(page, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}\n")
                .expect("writing to a string cannot fail");
        }
    }
    page
}

/// Values in the order of [`METRICS`].
fn values() -> [Option<f64>; 5] {
    let (started, spent) = stat().unzip();
    [started.flatten(), spent, resident_bytes(), open_fds(), fds_max().map(|fds| fds as f64)]
}

/// Start time, if available, and CPU time.
fn stat() -> Option<(Option<f64>, f64)> {
    let stat = fs::read_to_string("/proc/self/stat").ok()?;
    // The second field, a name in brackets, may contain anything; so fields are counted after it, from the third on.
    let (_, rest) = stat.rsplit_once(')')?;
    let field = |n: usize| rest.split_ascii_whitespace().nth(n - 3)?.parse::<f64>().ok();
    let spent = (field(14)? + field(15)?) / TICKS_PER_SECOND;
    let booted = value_of(&fs::read_to_string("/proc/stat").ok()?, "btime");
    Some((booted.zip(field(22)).map(|(booted, started): (f64, f64)| booted + started / TICKS_PER_SECOND), spent))
}

fn resident_bytes() -> Option<f64> {
    value_of(&fs::read_to_string("/proc/self/status").ok()?, "VmRSS:").map(|kib: f64| kib * 1024.0)
}

fn open_fds() -> Option<f64> {
    // Excludes the descriptor of this directory listing.
    u32::try_from(fs::read_dir("/proc/self/fd").ok()?.count()).ok().map(|fds| f64::from(fds) - 1.0)
}

/// The soft limit of open descriptors, if `/proc` reports it.
pub(crate) fn fds_max() -> Option<u64> {
    value_of(&fs::read_to_string("/proc/self/limits").ok()?, "Max open files")
}

/// The number after `name` at the start of a line.
fn value_of<T: FromStr>(text: &str, name: &str) -> Option<T> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    rest.split_ascii_whitespace().next()?.parse().ok()
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn linux_provides_all_metrics() {
        let [started, spent, resident, open, most] = values().map(|value| value.expect("Linux provides the value"));
        assert!(started > 1.7e9 && spent >= 0.0, "{started} {spent}");
        assert!(resident > 1e6 && resident < 1e12, "{resident}");
        assert!(open >= 3.0 && most > open, "{open} {most}");
        assert_eq!(page().matches("# HELP").count(), METRICS.len());
    }
}
