//! Replay of the recorded decisions of simulations: every policy on several workloads.
//!
//! Each simulation records all its decisions. A replay makes each of them again and compares it bit for bit, and a second
//! one decides it under a changed weight.

use std::cell::RefCell;
use std::error::Error;
use std::io::{self, Write};

use clap::Args;
use pointsman::policy::Policy;
use pointsman::record::RecordCursor;
use pointsman::schedule::{Replay, ReplayMode, ReplaySettings, ReplayedDecision};
use pointsman::{Router, RouterConfig};
use pointsman_trial::workload::generate::Generator;
use serde_json::{Value, json};

use crate::embedded::Embedded;
use crate::simulate::{self, Setup};
use crate::workload::Workload;

/// Memory of the record of one simulation, larger than any record.
const BYTES_MAX: u64 = 8 << 30;

/// Changed choices that are listed.
const LISTED_MAX: usize = 3;

/// Simulates every policy, and replays the recorded decisions
#[derive(Args, Clone, Debug)]
pub struct Decisions {
    /// Workloads, as in `simulate`
    #[arg(long, value_delimiter = ';', default_value = "chat;agents;documents", value_name = "WORKLOAD;...")]
    pub workloads: Vec<Generator>,
    /// Decisions of each workload and policy, at least
    #[arg(long, default_value_t = 5_000)]
    pub decisions: usize,
    /// Workers of one rank
    #[arg(long, default_value_t = 8)]
    pub workers: u32,
    /// Print the rows as one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Replays of one simulation.
#[derive(Debug, Default)]
struct Replayed {
    decisions: u64,
    different: u64,
    /// Choices that a changed weight changes.
    changed: u64,
    bytes: usize,
}

impl Decisions {
    /// Runs all simulations and writes a row for each, or one JSON object for all.
    ///
    /// # Errors
    /// A simulation fails, or a decision is not repeated bit for bit.
    pub fn run(&self, mut out: impl Write) -> Result<(), Box<dyn Error>> {
        let mut text: Box<dyn Write + '_> = if self.json { Box::new(io::sink()) } else { Box::new(&mut out) };
        writeln!(text, "workload policy decisions different changed bytes/decision")?;
        let (mut decisions, mut different, mut rows) = (0, 0, Vec::new());
        for generator in &self.workloads {
            for policy in Policy::ALL {
                let replayed = self.simulate(generator, policy, &mut text)?;
                let bytes = replayed.bytes as u64 / replayed.decisions.max(1);
                let Replayed { decisions: of_one, different: of_these, changed, .. } = replayed;
                let (workload, policy) = (generator.name(), policy.name());
                writeln!(text, "{workload} {policy} {of_one} {of_these} {changed} {bytes}")?;
                rows.push(json!({
                    "workload": workload, "policy": policy, "decisions": of_one, "different": of_these,
                    "changed": changed, "bytes_per_decision": bytes,
                }));
                (decisions, different) = (decisions + of_one, different + of_these);
            }
        }
        writeln!(text, "{decisions} decisions, {different} different")?;
        drop(text);
        if self.json {
            writeln!(out, "{}", json!({ "rows": rows }))?;
        }
        if different > 0 { Err(format!("{different} decisions were not repeated").into()) } else { Ok(()) }
    }

    fn simulate(
        &self,
        generator: &Generator,
        policy: Policy,
        out: &mut impl Write,
    ) -> Result<Replayed, Box<dyn Error>> {
        let mut total = Replayed::default();
        for seed in 1.. {
            let mut workload: Workload = generator.generate(seed);
            workload.requests.truncate(self.decisions - total.decisions as usize);
            let mut setup = Setup::new(self.workers, 1);
            (setup.router.policy, setup.router.seed) = (policy, seed);
            setup.router.settings.insert("recorder.bytes_max".to_owned(), json!(BYTES_MAX));
            let router = RefCell::new(None);
            simulate::run(&setup, &workload, async |setup: &Setup| {
                let embedded = Embedded::start_simulated(setup).await?;
                *router.borrow_mut() = Some(embedded.router().clone());
                Ok(embedded)
            })?;
            let router = router.into_inner().ok_or("no router was started")?;
            total.add(&replayed(&router, total.changed == 0, out)?);
            if total.decisions as usize >= self.decisions {
                return Ok(total);
            }
        }
        Ok(total)
    }
}

impl Replayed {
    fn add(&mut self, other: &Self) {
        self.decisions += other.decisions;
        self.different += other.different;
        self.changed += other.changed;
        self.bytes += other.bytes;
    }
}

fn replayed(router: &Router, lists: bool, out: &mut impl Write) -> Result<Replayed, Box<dyn Error>> {
    let (parts, lost) = router.records_after(&mut RecordCursor::default());
    if lost > 0 {
        return Err(format!("{lost} segments have left the memory").into());
    }
    let mut sums = Replayed::default();
    let mut listed = Vec::new();
    for part in &parts {
        sums.bytes += part.bytes.len();
        let visit = &mut |decision: ReplayedDecision| {
            sums.decisions += 1;
            sums.different += u64::from(!decision.is_equal);
        };
        Replay::new(ReplayMode::Verify, |bytes| settings(bytes, false)).feed(&part.bytes, visit)?;
        let visit = &mut |decision: ReplayedDecision| {
            let Some(report) = decision.report else { return };
            let Some((_, other)) = report.shadows.first().filter(|(_, other)| other.rank != report.chosen.rank) else {
                return;
            };
            sums.changed += 1;
            if lists && listed.len() < LISTED_MAX {
                listed.push((decision.number, report.chosen, *other));
            }
        };
        Replay::new(ReplayMode::Follow, |bytes| settings(bytes, true)).feed(&part.bytes, visit)?;
    }
    for (number, chosen, other) in listed {
        writeln!(out, "  decision {number}: {chosen:?} -> {other:?}")?;
    }
    Ok(sums)
}

/// Recorded settings, and with `changes` the same without credit for caches, or with a doubled weight under `kv`.
fn settings(bytes: &[u8], changes: bool) -> Result<ReplaySettings, String> {
    let read = |value: Value| serde_json::from_value::<RouterConfig>(value).map_err(|error| error.to_string());
    let value: Value = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    let mut changed = value.clone();
    match value["policy"]["name"].as_str() {
        Some("kv") => changed["policy"]["prefill_load_scale"] = json!(2.0),
        Some("latency") => changed["policy"]["temperature"] = json!(0.05),
        _ => changed["seed"] = json!(12_345),
    }
    let alternatives = if changes { vec![read(changed)?] } else { Vec::new() };
    Ok(ReplaySettings { config: read(value)?, alternatives })
}
