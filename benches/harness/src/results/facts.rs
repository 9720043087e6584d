//! What a run was of: the settings and the machine without which figures mean nothing.
//!
//! Owns how machine and commit are found. Promises that nothing here depends on the time, on the process or on what
//! else the machine does, so that equal runs give equal bytes. Leaves to others what was run.

use std::fs::File;
use std::io::Read;
use std::num::NonZero;
use std::process::{Command, Stdio};
use std::thread::available_parallelism;

use serde::{Deserialize, Serialize};

use super::goodput::Limits;
use super::validity::ClientHealth;

/// Most bytes read of a file under `/proc`.
const PROC_BYTES_MAX: u64 = 64 * 1024;

/// What stands where nobody can say.
const UNKNOWN: &str = "unknown";

/// What a run was of.
#[derive(Clone, Debug, PartialEq)]
pub struct Facts {
    /// The selection policy, or the endpoint, that the figures speak for.
    pub policy: String,
    /// Whether that looks at what ranks hold, so that predictions of it must be there.
    pub consults_index: bool,
    /// Workers of the fleet; 0 where unknown.
    pub workers: u32,
    /// Ranks of each worker; 0 where unknown.
    pub dp_size: u32,
    /// Seed of the router's draws and of a generated workload.
    pub seed: u64,
    /// The workload's name.
    pub workload: String,
    /// XXH3-64 of the trace file, in hex; absent for what was generated.
    pub trace_checksum: Option<String>,
    /// The command line.
    pub command: String,
    /// The machine.
    pub machine: Machine,
    /// The commit, from [`commit`].
    pub commit: String,
    /// What goodput is counted under.
    pub limits: Limits,
    /// How the client that sent the requests fared; absent where nobody real sent any.
    pub client: Option<ClientHealth>,
    /// Whether the summary is to carry what plots need.
    pub series: bool,
}

/// The machine of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Cores that this process may use; 0 where unknown.
    pub cores: usize,
    /// The processor's name as the system gives it, or `unknown`.
    pub cpu: String,
    /// The kernel's release, or `unknown`.
    pub kernel: String,
}

impl Machine {
    /// This one.
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

/// The commit of this build, as far as it can be known.
///
/// A build with `POINTSMAN_COMMIT` set in its environment says that. Others say what `git describe --always --dirty` says
/// now of the checkout that they were built in, `-dirty` where it has uncommitted changes. That is right for whatever
/// `cargo run` starts. A program that is kept while its checkout moves on has no way to know. Without git or checkout:
/// `unknown`.
#[must_use]
pub fn commit() -> String {
    option_env!("POINTSMAN_COMMIT").map(str::to_owned).or_else(checkout).unwrap_or_else(|| UNKNOWN.to_owned())
}

fn checkout() -> Option<String> {
    let mut git = Command::new("git");
    git.args(["-C", env!("CARGO_MANIFEST_DIR"), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]);
    let said = git.stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    let text = String::from_utf8(said.stdout).ok()?;
    let name = text.trim();
    (said.status.success() && !name.is_empty() && name.len() <= 80).then(|| name.to_owned())
}

/// This process' command line: the program's name without its directories, then its arguments.
#[must_use]
pub fn command_line() -> String {
    let mut words = std::env::args_os().map(|word| word.to_string_lossy().into_owned());
    let program = words.next().unwrap_or_default();
    let name = program.rsplit('/').next().unwrap_or_default().to_owned();
    std::iter::once(name).chain(words).map(|word| quoted(&word)).collect::<Vec<_>>().join(" ")
}

/// `word` as a shell reads it back.
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

/// The first processor's name: x86 says `model name`, some others `cpu` or `Processor`, many Arm kernels nothing.
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
    fn processors_are_named_where_the_system_names_them() {
        let x86 = "processor\t: 0\nmodel\t\t: 17\nmodel name\t: AMD EPYC 9454\n\nprocessor\t: 1\nmodel name\t: other\n";
        assert_eq!(cpu_model(x86).as_deref(), Some("AMD EPYC 9454"));
        assert_eq!(cpu_model("processor : 0\nBogoMIPS : 2000\n"), None);
    }

    #[test]
    fn the_machine_is_the_same_when_read_twice() {
        assert_eq!(Machine::read(), Machine::read());
        assert_eq!(commit(), commit());
        assert!(!commit().is_empty());
    }

    #[test]
    fn a_shell_reads_words_back() {
        for (word, written) in [("--seed", "--seed"), ("a b", "'a b'"), ("", "''"), ("it's", r"'it'\''s'")] {
            assert_eq!(quoted(word), written);
        }
    }
}
