//! Reads recorded workloads from files.
//!
//! Owns the formats: [`mooncake`], [`qwen`] and [`azure`]. Promises requests in order of arrival, the first at 0;
//! errors that name file, line and rule; a checksum of the whole file; and that no length in a file makes it allocate
//! more than the file's own size explains. Leaves the pace to [`Workload::sped_up`].
//!
//! Requests of one time stay in the file's order; those out of order are sorted. A request of no output is given one
//! token, for an engine answers with one at least.

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

/// Latest time in a trace: a hundred years after its start, in µs.
const TIME_US_MAX: f64 = 3.2e15;

/// A format of traces.
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
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Mooncake, Self::Qwen, Self::Azure];

    /// Its name on a command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Mooncake => "mooncake",
            Self::Qwen => "qwen",
            Self::Azure => "azure",
        }
    }

    /// The format of a file: a table by its name, else what its first line shows.
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

/// No format has this name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no trace format is called {0:?}; there are mooncake, qwen and azure")]
pub struct UnknownFormat(pub String);

impl FromStr for Format {
    type Err = UnknownFormat;

    fn from_str(name: &str) -> Result<Self, UnknownFormat> {
        Self::ALL.into_iter().find(|format| format.name() == name).ok_or_else(|| UnknownFormat(name.to_owned()))
    }
}

/// How a trace is read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadOptions {
    /// Its format; detected when absent.
    pub format: Option<Format>,
    /// Reads only its first so many requests.
    pub limit: Option<usize>,
    /// Makes up what the trace does not say: prefixes, where it has lengths alone.
    pub seed: u64,
}

/// Why a trace could not be read.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file cannot be opened or read.
    #[error("cannot read trace {path}: {source}")]
    Read {
        /// The trace.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A line is no request.
    #[error("trace {path}, line {line}: {rule}")]
    Line {
        /// The trace.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// The rule that it breaks.
        rule: Rule,
    },
    /// There is nothing to replay.
    #[error("trace {path} has no requests")]
    Empty {
        /// The trace.
        path: PathBuf,
    },
}

/// A rule that a line breaks.
#[derive(Debug, thiserror::Error)]
pub enum Rule {
    /// Lines are UTF-8.
    #[error("not UTF-8")]
    Text,
    /// Lines are bounded, so that a file without any does not fill the memory.
    #[error("longer than {max} bytes")]
    LineLength {
        /// Most bytes of a line.
        max: usize,
    },
    /// Workloads are bounded.
    #[error("more than {max} requests; give a limit")]
    Requests {
        /// Most requests.
        max: usize,
    },
    /// The first line tells the format.
    #[error("tells no known format; name it: mooncake, qwen or azure")]
    Format,
    /// A line is an object with these fields.
    #[error("{0}")]
    Json(#[from] serde_json::Error),
    /// Lengths have bounds.
    #[error("{field} is {value}, must be {min} to {max}")]
    Length {
        /// The field.
        field: &'static str,
        /// What it says.
        value: u64,
        /// The least that it may say.
        min: u32,
        /// The most that it may say.
        max: u32,
    },
    /// A prompt's blocks are named one by one.
    #[error("input_length {input_length} needs {needed} hash_ids, found {found}")]
    HashIds {
        /// Tokens of the prompt.
        input_length: u32,
        /// Blocks that these fill.
        needed: usize,
        /// Names that there are.
        found: usize,
    },
    /// Times are numbers that can be told apart.
    #[error("timestamp {0} is no time from 0 on")]
    Time(f64),
    /// Times of tables are dates with a time of day.
    #[error("TIMESTAMP {0:?} is no date and time such as 2023-11-16 18:17:03.9799600")]
    Date(String),
    /// Tables have three columns.
    #[error("{0} columns, must be 3: TIMESTAMP,ContextTokens,GeneratedTokens")]
    Columns(usize),
    /// Tables begin with their columns' names.
    #[error("the header is not TIMESTAMP,ContextTokens,GeneratedTokens")]
    Header,
    /// Lengths are whole numbers.
    #[error("{field} {value:?} is no whole number")]
    Number {
        /// The field.
        field: &'static str,
        /// What it says.
        value: String,
    },
}

/// Reads the trace at `path`. With a limit, lines behind it are not looked at, but the checksum is of the whole file.
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
/// The file cannot be read, a line is broken (the message names it), or there are no requests.
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

/// Requests of the lines from the one last read on, until `enough` of them or the file's end.
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

/// A prompt's length, as a trace says it.
fn input_length(field: &'static str, value: u64) -> Result<u32, Rule> {
    length(field, value, 1)
}

/// An answer's length, as a trace says it; one token at least.
fn output_length(field: &'static str, value: u64) -> Result<u32, Rule> {
    length(field, value, 0).map(|tokens| tokens.max(1))
}

fn length(field: &'static str, value: u64, min: u32) -> Result<u32, Rule> {
    let known = u32::try_from(value).ok().filter(|tokens| (min..=LENGTH_MAX).contains(tokens));
    known.ok_or(Rule::Length { field, value, min, max: LENGTH_MAX })
}

/// A time of `unit_us` each, in µs.
fn time_us(timestamp: f64, unit_us: f64) -> Result<u64, Rule> {
    let us = timestamp * unit_us;
    if (0.0..=TIME_US_MAX).contains(&us) { Ok(us.round() as u64) } else { Err(Rule::Time(timestamp)) }
}
