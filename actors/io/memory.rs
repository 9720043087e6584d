//! Memory of the machine or cgroup.
//!
//! Reads `/proc` and `/sys/fs/cgroup`; returns the smallest applicable limit, and nothing outside Linux.

use std::fs;
use std::path::{Path, PathBuf};

/// Memory available to the process in bytes: that of the machine or the smallest limit of its cgroups. `None` if the
/// system reports none.
#[must_use]
pub(crate) fn memory_bytes() -> Option<u64> {
    let total = fs::read_to_string("/proc/meminfo").ok().and_then(|text| meminfo_total(&text));
    let cgroups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    total.into_iter().chain(cgroup_limits(&cgroups, Path::new("/sys/fs/cgroup"))).min()
}

fn meminfo_total(text: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Memory limits of the cgroup in `cgroups` (`/proc/self/cgroup`) and its ancestors. In a container the path may not
/// exist below `root`, whose own limit then applies.
fn cgroup_limits(cgroups: &str, root: &Path) -> Vec<u64> {
    let mut limits = Vec::new();
    for line in cgroups.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next()) else { continue };
        let (base, file): (PathBuf, _) = match controllers {
            "" => (root.to_owned(), "memory.max"),
            _ if controllers.split(',').any(|name| name == "memory") => (root.join("memory"), "memory.limit_in_bytes"),
            _ => continue,
        };
        let group = base.join(path.trim_start_matches('/'));
        let groups = group.ancestors().take_while(|group| group.starts_with(&base));
        limits.extend(groups.filter_map(|group| limit_in(&group.join(file))));
    }
    limits
}

/// `max` means no limit and does not parse.
fn limit_in(file: &Path) -> Option<u64> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_limits_come_from_machine_and_cgroups() {
        assert_eq!(meminfo_total("MemTotal:       24576 kB\nMemFree: 1 kB\n"), Some(24_576 * 1024));
        assert_eq!(meminfo_total("MemFree: 1 kB\n"), None);
        let root = std::env::temp_dir().join(format!("pointsman-cgroup-{}", std::process::id()));
        let slice = root.join("system.slice");
        fs::create_dir_all(slice.join("pointsman.service")).expect("a directory");
        fs::create_dir_all(root.join("memory/docker/1")).expect("a directory");
        fs::write(slice.join("pointsman.service/memory.max"), "max\n").expect("a file");
        fs::write(slice.join("memory.max"), "1000\n").expect("a file");
        fs::write(root.join("memory/docker/1/memory.limit_in_bytes"), "2000\n").expect("a file");
        fs::write(root.join("memory/memory.limit_in_bytes"), "9000\n").expect("a file");
        assert_eq!(cgroup_limits("0::/system.slice/pointsman.service\n", &root), [1000]);
        assert_eq!(cgroup_limits("0::/not/here\n", &root), [0; 0]);
        assert_eq!(cgroup_limits("5:cpu:/x\n4:memory:/docker/1\n", &root), [2000, 9000]);
        fs::remove_dir_all(&root).expect("directory removed");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn linux_reports_memory() {
        assert!(memory_bytes().is_some_and(|bytes| bytes > 1 << 20));
    }
}
