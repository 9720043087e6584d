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

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use lines::Lines;

use crate::workload::{Arrivals, LENGTH_MAX, REQUESTS_MAX, Request, Workload};

/// Maximum time in a trace: a hundred years after its start, in µs.
const TIME_US_MAX: f64 = 3.2e15;

/// Format of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Mooncake's JSON lines.
    Mooncake,
    /// Alibaba's JSON lines.
    Qwen,
    /// Azure's tables.
    Azure,
}

impl Format {
    /// All formats.
    pub const ALL: [Self; 3] = [Self::Mooncake, Self::Qwen, Self::Azure];

    /// Name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Mooncake => "mooncake",
            Self::Qwen => "qwen",
            Self::Azure => "azure",
        }
    }

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

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Unknown format name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown trace format {0:?}; known are mooncake, qwen and azure")]
pub struct UnknownFormat(pub String);

impl FromStr for Format {
    type Err = UnknownFormat;

    fn from_str(name: &str) -> Result<Self, UnknownFormat> {
        Self::ALL.into_iter().find(|format| format.name() == name).ok_or_else(|| UnknownFormat(name.to_owned()))
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

/// Errors of reading a trace.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file cannot be opened or read.
    #[error("cannot read trace {path}: {source}")]
    Read {
        /// Path of the trace.
        path: PathBuf,
        /// Error from the operating system.
        source: io::Error,
    },
    /// A line is invalid.
    #[error("trace {path}, line {line}: {rule}")]
    Line {
        /// Path of the trace.
        path: PathBuf,
        /// Line number, from 1.
        line: usize,
        /// The violated rule.
        rule: Rule,
    },
    /// The trace has no requests.
    #[error("trace {path} has no requests")]
    Empty {
        /// Path of the trace.
        path: PathBuf,
    },
}

/// Rules for the lines of a trace.
#[derive(Debug, thiserror::Error)]
pub enum Rule {
    /// Lines are UTF-8.
    #[error("not UTF-8")]
    Text,
    /// Lines have a maximum length, which bounds memory for files without line feeds.
    #[error("longer than {max} bytes")]
    LineLength {
        /// Maximum length in bytes.
        max: usize,
    },
    /// Workloads have a maximum number of requests.
    #[error("more than {max} requests; set a limit")]
    Requests {
        /// Maximum number of requests.
        max: usize,
    },
    /// The first line identifies the format.
    #[error("format not detected; specify mooncake, qwen or azure")]
    Format,
    /// A line is a JSON object with the required fields.
    #[error("{0}")]
    Json(#[from] serde_json::Error),
    /// Lengths have bounds.
    #[error("{field} is {value}, must be {min} to {max}")]
    Length {
        /// Name of the field.
        field: &'static str,
        /// Invalid value.
        value: u64,
        /// Minimum.
        min: u32,
        /// Maximum.
        max: u32,
    },
    /// A prompt has one hash id per block.
    #[error("input_length {input_length} needs {needed} hash_ids, found {found}")]
    HashIds {
        /// Length of the prompt in tokens.
        input_length: u32,
        /// Number of blocks of that prompt.
        needed: usize,
        /// Number of hash ids in the line.
        found: usize,
    },
    /// Times are finite numbers from 0 on.
    #[error("timestamp is {0}, must be a time of at least 0")]
    Time(f64),
    /// Times in tables are dates with a time of day.
    #[error("TIMESTAMP is {0:?}, must be a date and time such as 2023-11-16 18:17:03.9799600")]
    Date(String),
    /// Tables have three columns.
    #[error("{0} columns, must be 3: TIMESTAMP,ContextTokens,GeneratedTokens")]
    Columns(usize),
    /// Tables start with a header line.
    #[error("the header is not TIMESTAMP,ContextTokens,GeneratedTokens")]
    Header,
    /// Lengths are whole numbers.
    #[error("{field} is {value:?}, must be a whole number")]
    Number {
        /// Name of the field.
        field: &'static str,
        /// Invalid value.
        value: String,
    },
}

/// Reads the trace at `path`. With a limit, later lines are not parsed, but the checksum covers the whole file.
///
/// ```no_run
/// use std::path::Path;
/// use pointsman_trial::workload::trace::{ReadOptions, read};
///
/// let trace = read(Path::new("conversation.jsonl"), &ReadOptions { limit: Some(1_000), ..ReadOptions::default() })?;
/// assert_eq!(trace.requests[0].arrival_us, 0);
/// # Ok::<(), pointsman_trial::workload::trace::TraceError>(())
/// ```
///
/// # Errors
/// The file cannot be read, a line is invalid (the message contains its number), or there are no requests.
pub fn read(path: &Path, options: &ReadOptions) -> Result<Workload, TraceError> {
    let empty = || TraceError::Empty { path: path.to_owned() };
    let mut lines = Lines::open(path)?;
    let first = lines.next()?.ok_or_else(empty)?;
    let format = options.format.or_else(|| Format::detect(path, first));
    let format = format.ok_or_else(|| lines.broken(Rule::Format))?;
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
) -> Result<Vec<Request>, TraceError> {
    let mut requests = Vec::new();
    let mut line = lines.current();
    while let Some(text) = line {
        if enough(&requests) {
            break;
        }
        let request = parse(text).and_then(|request| {
            let full = requests.len() >= REQUESTS_MAX;
            if full { Err(Rule::Requests { max: REQUESTS_MAX }) } else { Ok(request) }
        });
        requests.push(request.map_err(|rule| lines.broken(rule))?);
        line = lines.next()?;
    }
    Ok(requests)
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
    known.ok_or(Rule::Length { field, value, min, max: LENGTH_MAX })
}

/// Converts a time in units of `unit_us` to µs.
fn time_us(timestamp: f64, unit_us: f64) -> Result<u64, Rule> {
    let us = timestamp * unit_us;
    if (0.0..=TIME_US_MAX).contains(&us) { Ok(us.round() as u64) } else { Err(Rule::Time(timestamp)) }
}
