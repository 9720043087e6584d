//! Readers of recorded workloads.
//!
//! Supports the formats [`mooncake`] and [`qwen`]. Requests are in order of arrival, the first at time 0.
//! Errors contain file, line and rule. The checksum covers the whole file. Memory is proportional to the size of the
//! file, for any lengths in it. [`Workload::sped_up`] changes the pace.
//!
//! Requests with equal times keep the order of the file; unordered requests are sorted. A request without output gets
//! one token, because an engine generates at least one.

mod lines;
pub mod mooncake;
pub mod qwen;

use std::path::Path;

use lines::Lines;

use crate::workload::{Arrivals, LENGTH_MAX, REQUESTS_MAX, Request, Workload, WorkloadError};

/// Maximum time in a trace: a hundred years after its start, in µs.
const TIME_US_MAX: f64 = 3.2e15;

/// The rule that a line violates.
type Rule = String;

/// Reads the trace at `path`, in the format of its first line. With a limit, later lines are not parsed, but the checksum
/// covers the whole file.
///
/// ```no_run
/// use std::path::Path;
///
/// let trace = pointsman_trial::workload::trace::read(Path::new("conversation.jsonl"), Some(1_000))?;
/// assert_eq!(trace.requests[0].arrival_us, 0);
/// # Ok::<(), pointsman_trial::workload::WorkloadError>(())
/// ```
///
/// # Errors
/// The file cannot be read, a line is invalid (the message contains its number), or there are no requests.
pub fn read(path: &Path, limit: Option<usize>) -> Result<Workload, WorkloadError> {
    let empty = || WorkloadError(format!("trace {} has no requests", path.display()));
    let mut lines = Lines::open(path)?;
    let fields: serde_json::Map<String, serde_json::Value> =
        serde_json::from_str(lines.next()?.ok_or_else(empty)?).unwrap_or_default();
    let limit = limit.unwrap_or(usize::MAX);
    let (format, mut requests) = match (fields.contains_key("hash_ids"), fields.contains_key("chat_id")) {
        (true, true) => ("qwen", qwen::requests(&mut lines, limit)?),
        (true, false) => ("mooncake", mooncake::requests(&mut lines, limit)?),
        (false, _) => return Err(lines.broken("neither mooncake's nor qwen's format")),
    };
    requests.truncate(limit);
    let start_us = requests.iter().map(|request| request.arrival_us).min().ok_or_else(empty)?;
    for request in &mut requests {
        request.arrival_us -= start_us;
    }
    let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
    let mut workload = Workload {
        name: format!("{name} ({format})"),
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
