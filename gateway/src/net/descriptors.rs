//! Descriptor limit of the process, from `/proc`; nothing outside Linux.

use std::fs;

/// The soft limit of open descriptors, if `/proc` reports it.
pub(crate) fn descriptors_max() -> Option<u64> {
    let limits = fs::read_to_string("/proc/self/limits").ok()?;
    let rest = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    rest.split_ascii_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    #[test]
    fn linux_reports_descriptors() {
        assert!(descriptors_max().is_some_and(|descriptors| descriptors > 3));
    }
}
