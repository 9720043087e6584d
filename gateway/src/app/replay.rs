//! Replay of recorded decisions from files: the `replay-decisions` command. Every decision is made again and compared.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use clap::Args;
use pointsman::protocol::{WorkerId, WorkerRank};
use pointsman::{RecordFile, RecordedChoice, Replay, ReplayedDecision};

/// Arguments of `replay-decisions`.
#[derive(Args, Clone, Debug)]
pub struct ReplayArgs {
    /// Files of recorded decisions, in order.
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// Maximum number of listed differences.
    #[arg(long, value_name = "NUMBER", default_value_t = 20)]
    pub list: u32,
}

/// Result of a replay.
#[derive(Debug, Default)]
pub struct ReplayReport {
    decisions: u64,
    /// Decisions that differ from the recorded ones, as lines; the first ones only.
    different: Vec<String>,
    different_count: u64,
    /// Damaged files, and segments that could not be replayed, as lines.
    problems: Vec<String>,
    listed_max: usize,
    names: WorkerNames,
}

/// Names of workers, from the files.
#[derive(Debug, Default)]
struct WorkerNames(BTreeMap<WorkerId, String>);

impl WorkerNames {
    /// Name of a rank; its id if the files have no name of its worker.
    fn rank(&self, rank: WorkerRank) -> String {
        self.0.get(&rank.worker).map_or_else(|| rank.to_string(), |name| format!("{name}/{}", rank.rank))
    }
}

impl ReplayReport {
    /// Whether every decision was made again as recorded.
    pub fn is_equal(&self) -> bool {
        self.different_count == 0
    }

    fn add(&mut self, decision: &ReplayedDecision) {
        self.decisions += 1;
        if !decision.is_equal {
            self.different_count += 1;
            if self.different.len() < self.listed_max {
                self.different.push(difference(decision, &self.names));
            }
        }
    }
}

fn difference(decision: &ReplayedDecision, names: &WorkerNames) -> String {
    let shown = |choice: &RecordedChoice| match choice {
        RecordedChoice::Rank { rank, .. } => names.rank(*rank),
        RecordedChoice::Rejected(reason) => format!("rejected ({reason})"),
        RecordedChoice::Deferred => "deferred".to_owned(),
    };
    let replayed = decision.replayed.as_ref().map_or("the same rank, with other facts".to_owned(), shown);
    format!("{} {}: recorded {}, replayed {replayed}", decision.number, decision.id, shown(&decision.recorded))
}

impl fmt::Display for ReplayReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.problems.iter().try_for_each(|problem| writeln!(f, "warning: {problem}"))?;
        writeln!(f, "{} decisions replayed, {} differ", self.decisions, self.different_count)?;
        self.different.iter().try_for_each(|line| writeln!(f, "  {line}"))
    }
}

/// Replays the files in the given order.
///
/// # Errors
/// An unreadable file.
pub fn replay_decisions(args: &ReplayArgs) -> Result<ReplayReport, String> {
    let mut report = ReplayReport { listed_max: args.list as usize, ..ReplayReport::default() };
    for file in &args.files {
        replay_file(file, &mut report)?;
    }
    Ok(report)
}

fn replay_file(file: &Path, report: &mut ReplayReport) -> Result<(), String> {
    let name = file.display().to_string();
    let bytes = fs::read(file).map_err(|error| format!("{name} cannot be read: {error}"))?;
    let mut replay = new_replay();
    let mut problems = Vec::new();
    let end = RecordFile::read(&bytes, &mut |part| {
        report.names.0.extend(part.names.into_iter().map(|(worker, name)| (worker, name.to_owned())));
        // A segment depends on nothing before it.
        if part.segment.is_some() {
            replay = new_replay();
        }
        if let Err(error) = replay.feed(part.entries, &mut |decision| report.add(&decision)) {
            problems.push(format!("{name}: {error}"));
        }
    });
    let end = end.map_err(|error| format!("{name} {error}"))?;
    if let Some(at) = end.damaged_at {
        problems.push(format!("{name}: damaged or cut at byte {at} of {}, read up to there", bytes.len()));
    }
    report.problems.append(&mut problems);
    Ok(())
}

fn new_replay() -> Replay {
    Replay::verifying(|bytes| serde_json::from_slice(bytes).map_err(|error| error.to_string()))
}
