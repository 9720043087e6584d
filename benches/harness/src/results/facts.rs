//! Settings and machine of a run.
//!
//! Finds out machine and commit. The facts do not depend on the time, the process or the load of the machine, so that
//! equal runs give equal bytes.

use std::fs::File;
use std::io::Read;
use std::num::NonZero;
use std::process::{Command, Stdio};
use std::thread::available_parallelism;

use serde::{Deserialize, Serialize};

use super::validity::ClientHealth;

/// Maximum number of bytes read from a file under `/proc`.
const PROC_BYTES_MAX: u64 = 64 * 1024;

/// Placeholder for unavailable facts.
const UNKNOWN: &str = "unknown";

/// Settings and environment of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Facts {
    /// Selection policy or endpoint of the figures.
    pub policy: String,
    /// Whether the policy uses cache contents, so that predictions are expected.
    pub consults_index: bool,
    /// Number of workers; 0 if unknown.
    pub workers: u32,
    /// Number of ranks per worker; 0 if unknown.
    pub dp_size: u32,
    /// Seed of the router's random choices and of a generated workload.
    pub seed: u64,
    /// Name of the workload.
    pub workload: String,
    /// XXH3-64 of the trace file in hex; none for generated workloads.
    pub trace_checksum: Option<String>,
    /// Command line of the run.
    pub command: String,
    /// Machine of the run.
    pub machine: Machine,
    /// Commit, from [`commit`].
    pub commit: String,
    /// Health of the client; none in a simulation.
    pub client: Option<ClientHealth>,
}

/// Machine of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Number of cores available to the process; 0 if unknown.
    pub cores: usize,
    /// Name of the processor from the system, or `unknown`.
    pub cpu: String,
    /// Release of the kernel, or `unknown`.
    pub kernel: String,
}

impl Machine {
    /// Reads the facts of this machine.
    #[must_use]
    pub fn read() -> Self {
        let cpu = read_start("/proc/cpuinfo").and_then(|text| cpu_model(&text));
        let kernel = read_start("/proc/sys/kernel/osrelease").map(|text| text.trim().to_owned());
        Self {
            cores: available_parallelism().map_or(0, NonZero::get),
            cpu: cpu.unwrap_or_else(|| UNKNOWN.to_owned()),
            kernel: kernel.unwrap_or_else(|| UNKNOWN.to_owned()),
        }
    }
}

/// Commit of this build, as far as it is known.
///
/// A build with `POINTSMAN_COMMIT` in its environment returns that value. Other builds return the current output of
/// `git describe --always --dirty` in their source checkout, with `-dirty` for uncommitted changes. This is correct for
/// `cargo run`. It is wrong for a binary whose checkout has changed since the build. Without git or a checkout:
/// `unknown`.
#[must_use]
pub fn commit() -> String {
    option_env!("POINTSMAN_COMMIT").map(str::to_owned).or_else(checkout).unwrap_or_else(|| UNKNOWN.to_owned())
}

fn checkout() -> Option<String> {
    let mut git = Command::new("git");
    git.args(["-C", env!("CARGO_MANIFEST_DIR"), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]);
    let output = git.stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let name = text.trim();
    (output.status.success() && !name.is_empty() && name.len() <= 80).then(|| name.to_owned())
}

/// Command line of this process: the name of the program without directories, then its arguments.
#[must_use]
pub fn command_line() -> String {
    let mut words = std::env::args_os().map(|word| word.to_string_lossy().into_owned());
    let program = words.next().unwrap_or_default();
    let name = program.rsplit('/').next().unwrap_or_default().to_owned();
    std::iter::once(name).chain(words).map(|word| quoted(&word)).collect::<Vec<_>>().join(" ")
}

/// Quotes `word` for a shell.
fn quoted(word: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./=,:+@%".contains(&byte);
    if !word.is_empty() && word.bytes().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

fn read_start(path: &str) -> Option<String> {
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(PROC_BYTES_MAX).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// Name of the first processor. The key is `model name` on x86, `cpu` or `Processor` on some others, and missing on
/// many Arm kernels.
fn cpu_model(cpuinfo: &str) -> Option<String> {
    let named = |key: &str| {
        let fields = cpuinfo.lines().filter_map(|line| line.split_once(':'));
        fields.filter(|(name, _)| name.trim() == key).map(|(_, value)| value.trim().to_owned()).next()
    };
    ["model name", "cpu", "Processor"].into_iter().find_map(named).filter(|name| !name.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_names_come_from_cpuinfo() {
        let x86 = "processor\t: 0\nmodel\t\t: 17\nmodel name\t: AMD EPYC 9454\n\nprocessor\t: 1\nmodel name\t: other\n";
        assert_eq!(cpu_model(x86).as_deref(), Some("AMD EPYC 9454"));
        assert_eq!(cpu_model("processor : 0\nBogoMIPS : 2000\n"), None);
    }

    #[test]
    fn reading_the_machine_twice_gives_equal_facts() {
        assert_eq!(Machine::read(), Machine::read());
        assert_eq!(commit(), commit());
        assert!(!commit().is_empty());
    }

    #[test]
    fn quoted_words_round_trip_through_a_shell() {
        for (word, written) in [("--seed", "--seed"), ("a b", "'a b'"), ("", "''"), ("it's", r"'it'\''s'")] {
            assert_eq!(quoted(word), written);
        }
    }
}
