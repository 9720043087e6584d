//! Readers of recorded workloads.
//!
//! Supports the formats [`mooncake`], [`qwen`] and [`azure`]. Requests are in order of arrival, the first at time 0.
//! Errors contain file, line and rule. The checksum covers the whole file. Memory is proportional to the size of the
//! file, for any lengths in it. [`Workload::sped_up`] changes the pace.
//!
//! Requests with equal times keep the order of the file; unordered requests are sorted. A request without output gets
//! one token, because an engine generates at least one.

pub mod azure;
mod lines;
pub mod mooncake;
pub mod qwen;

use std::path::Path;

use lines::Lines;

use crate::workload::{Arrivals, LENGTH_MAX, REQUESTS_MAX, Request, Workload, WorkloadError};

/// Maximum time in a trace: a hundred years after its start, in µs.
const TIME_US_MAX: f64 = 3.2e15;

/// Format of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "mock", derive(clap::ValueEnum))]
pub enum Format {
    /// Mooncake's JSON lines.
    Mooncake,
    /// Alibaba's JSON lines.
    Qwen,
    /// Azure's tables.
    Azure,
}

impl Format {
    /// Detects the format of a file: a table by its extension, otherwise by its first line.
    fn detect(path: &Path, line: &str) -> Option<Self> {
        let table = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("csv"));
        if table || azure::is_header(line) {
            return Some(Self::Azure);
        }
        let serde_json::Value::Object(fields) = serde_json::from_str(line).ok()? else { return None };
        let has = |name| fields.contains_key(name);
        match (has("hash_ids"), has("chat_id")) {
            (true, true) => Some(Self::Qwen),
            (true, false) => Some(Self::Mooncake),
            (false, _) => None,
        }
    }
}

/// Options for reading a trace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadOptions {
    /// Format; detected if none.
    pub format: Option<Format>,
    /// Maximum number of requests to read.
    pub limit: Option<usize>,
    /// Seed of synthetic prefixes, for traces without prompt contents.
    pub seed: u64,
}

/// The rule that a line violates.
type Rule = String;

/// Reads the trace at `path`. With a limit, later lines are not parsed, but the checksum covers the whole file.
///
/// ```no_run
/// use std::path::Path;
/// use pointsman_trial::workload::trace::{ReadOptions, read};
///
/// let trace = read(Path::new("conversation.jsonl"), &ReadOptions { limit: Some(1_000), ..ReadOptions::default() })?;
/// assert_eq!(trace.requests[0].arrival_us, 0);
/// # Ok::<(), pointsman_trial::workload::WorkloadError>(())
/// ```
///
/// # Errors
/// The file cannot be read, a line is invalid (the message contains its number), or there are no requests.
pub fn read(path: &Path, options: &ReadOptions) -> Result<Workload, WorkloadError> {
    let empty = || WorkloadError(format!("trace {} has no requests", path.display()));
    let mut lines = Lines::open(path)?;
    let first = lines.next()?.ok_or_else(empty)?;
    let format = options.format.or_else(|| Format::detect(path, first));
    let format = format.ok_or_else(|| lines.broken("format not detected; specify mooncake, qwen or azure"))?;
    let limit = options.limit.unwrap_or(usize::MAX);
    let mut requests = match format {
        Format::Mooncake => mooncake::requests(&mut lines, limit)?,
        Format::Qwen => qwen::requests(&mut lines, limit)?,
        Format::Azure => azure::requests(&mut lines, limit, options.seed)?,
    };
    requests.truncate(limit);
    let start_us = requests.iter().map(|request| request.arrival_us).min().ok_or_else(empty)?;
    for request in &mut requests {
        request.arrival_us -= start_us;
    }
    let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
    let mut workload = Workload {
        name: format!("{name} ({})", format!("{format:?}").to_lowercase()),
        requests,
        arrivals: Arrivals::OpenLoop,
        trace_checksum: Some(lines.checksum()?),
    };
    workload.sort();
    Ok(workload)
}

/// Parses lines from the current one on, until `enough` returns true or the file ends.
fn collect(
    lines: &mut Lines,
    mut parse: impl FnMut(&str) -> Result<Request, Rule>,
    enough: impl Fn(&[Request]) -> bool,
) -> Result<Vec<Request>, WorkloadError> {
    let mut requests = Vec::new();
    let mut line = lines.current();
    while let Some(text) = line {
        if enough(&requests) {
            break;
        }
        let request = parse(text).and_then(|request| {
            let full = requests.len() >= REQUESTS_MAX;
            if full { Err(format!("more than {REQUESTS_MAX} requests; set a limit")) } else { Ok(request) }
        });
        requests.push(request.map_err(|rule| lines.broken(&rule))?);
        line = lines.next()?;
    }
    Ok(requests)
}

/// A prompt has one hash id per block.
fn wrong_hash_ids(input_length: u32, needed: usize, found: usize) -> Rule {
    format!("input_length {input_length} needs {needed} hash_ids, found {found}")
}

/// Checks the length of a prompt.
fn input_length(field: &'static str, value: u64) -> Result<u32, Rule> {
    length(field, value, 1)
}

/// Checks the length of an answer and raises it to at least one token.
fn output_length(field: &'static str, value: u64) -> Result<u32, Rule> {
    length(field, value, 0).map(|tokens| tokens.max(1))
}

fn length(field: &'static str, value: u64, min: u32) -> Result<u32, Rule> {
    let known = u32::try_from(value).ok().filter(|tokens| (min..=LENGTH_MAX).contains(tokens));
    known.ok_or_else(|| format!("{field} is {value}, must be {min} to {LENGTH_MAX}"))
}

/// Converts a time in units of `unit_us` to µs.
fn time_us(timestamp: f64, unit_us: f64) -> Result<u64, Rule> {
    let us = timestamp * unit_us;
    if (0.0..=TIME_US_MAX).contains(&us) {
        Ok(us.round() as u64)
    } else {
        Err(format!("timestamp is {timestamp}, must be a time of at least 0"))
    }
}
