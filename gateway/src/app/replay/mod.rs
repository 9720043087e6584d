//! Replay of recorded decisions from files: the `replay-decisions` command.
//!
//! Without other settings every decision is made again and compared. With other settings each request is also decided
//! under them, on the recorded state and without a booking, and both choices are measured alike.

mod args;
mod comparison;

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::Path;

use pointsman::protocol::{WorkerId, WorkerRank};
use pointsman::{RecordFile, RecordedChoice, Replay, ReplayedDecision, RouterConfig};

pub use args::ReplayArgs;
use comparison::Comparison;

/// Result of a replay.
#[derive(Debug, Default)]
pub struct ReplayReport {
    decisions: u64,
    /// Decisions that differ from the recorded ones, as lines; the first ones only.
    different: Vec<String>,
    different_count: u64,
    /// Damaged files, and segments that could not be replayed, as lines.
    problems: Vec<String>,
    /// Choices under other settings.
    comparison: Option<Comparison>,
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
    /// Whether every decision was made again as recorded. Always true under other settings, which are not compared bit for
    /// bit.
    pub fn is_equal(&self) -> bool {
        self.different_count == 0
    }

    /// Replayed decisions.
    pub fn decisions(&self) -> u64 {
        self.decisions
    }

    /// Choices that other settings would have changed; `None` without other settings.
    pub fn changed(&self) -> Option<u64> {
        self.comparison.as_ref().map(|comparison| comparison.changed)
    }

    fn add(&mut self, decision: &ReplayedDecision) {
        self.decisions += 1;
        if let Some(comparison) = &mut self.comparison {
            comparison.add(decision, &self.names);
        } else if !decision.is_equal {
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
        if let Some(comparison) = &self.comparison {
            return comparison.fmt(f);
        }
        writeln!(f, "{} decisions replayed, {} differ", self.decisions, self.different_count)?;
        self.different.iter().try_for_each(|line| writeln!(f, "  {line}"))
    }
}

/// Replays the files in the given order.
///
/// # Errors
/// An unreadable file, or other settings that are invalid.
pub fn replay_decisions(args: &ReplayArgs) -> Result<ReplayReport, String> {
    let listed_max = args.list as usize;
    let comparison = args.changes().then(|| Comparison::new(args.name(), listed_max));
    let mut report = ReplayReport { comparison, listed_max, ..ReplayReport::default() };
    for file in &args.files {
        replay_file(file, args, &mut report)?;
    }
    Ok(report)
}

fn replay_file(file: &Path, args: &ReplayArgs, report: &mut ReplayReport) -> Result<(), String> {
    let name = file.display().to_string();
    let bytes = fs::read(file).map_err(|error| format!("{name} cannot be read: {error}"))?;
    let mut replay = new_replay(args);
    let mut problems = Vec::new();
    let end = RecordFile::read(&bytes, &mut |part| {
        report.names.0.extend(part.names.into_iter().map(|(worker, name)| (worker, name.to_owned())));
        // A segment depends on nothing before it.
        if part.segment.is_some() {
            replay = new_replay(args);
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
    // Wrong settings are the same problem for every segment.
    match args.problem_with(&RouterConfig::default()) {
        Some(problem) if report.decisions == 0 => Err(problem),
        Some(_) | None => Ok(()),
    }
}

fn new_replay(args: &ReplayArgs) -> Replay {
    let read = |bytes: &[u8]| serde_json::from_slice::<RouterConfig>(bytes).map_err(|error| error.to_string());
    if !args.changes() {
        return Replay::verifying(move |bytes| Ok((read(bytes)?, Vec::new())));
    }
    let args = args.clone();
    Replay::following(move |bytes| {
        let config = read(bytes)?;
        let alternative = args.changed(&config)?;
        Ok((config, vec![alternative]))
    })
}
