//! An engine's Prometheus page, as far as it tells of load.
//!
//! Reads the text format line by line and only what it wants: seven names of vLLM and SGLang. A line that cannot be read
//! costs that line.

use std::collections::BTreeMap;

use super::{EngineReading, count, share};
use crate::protocol::WorkerConfig;

/// Longest page that is worth reading.
pub const PAGE_BYTES_MAX: usize = 4 << 20;

/// Longest line of a metric that is worth reading.
const LINE_BYTES_MAX: usize = 16 << 10;

/// What a page says, by rank.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Page {
    /// By the rank that a series names; none where it names none, as engines of one rank do.
    ranks: BTreeMap<Option<u32>, EngineReading>,
    /// Series of load that could not be read: no number, a negative one, NaN, or one without end.
    pub refused: u32,
}

impl Page {
    /// What it says of a worker's ranks, which are numbered from `start`, `size` of them.
    ///
    /// An engine of one rank may name none, or number itself within a greater whole that the router does not see: what is
    /// said of one rank is then this rank's. Where that cannot be told, nothing is said.
    pub fn of_ranks(&self, start: u32, size: u32) -> impl Iterator<Item = (u32, EngineReading)> + '_ {
        let only = (size == 1 && self.ranks.len() == 1).then(|| self.ranks.values().next().copied()).flatten();
        let last = start.saturating_add(size.saturating_sub(1));
        (start..=last).take(size.min(WorkerConfig::RANKS_MAX) as usize).filter_map(move |rank| {
            let reading = only.or_else(|| self.ranks.get(&Some(rank)).copied())?;
            (!reading.is_empty()).then_some((rank, reading))
        })
    }
}

/// Reads a page.
///
/// ```
/// use pointsman::engine_load::read_page;
///
/// let page = read_page("vllm:num_requests_running{engine=\"0\",model_name=\"m\"} 3.0\n");
/// let (rank, reading) = page.of_ranks(0, 1).next().expect("said of rank 0");
/// assert_eq!((rank, reading.running, reading.waiting), (0, Some(3), None));
/// ```
#[must_use]
pub fn read_page(text: &str) -> Page {
    let mut page = Page::default();
    for series in series(text) {
        let Some((field, label)) = wanted(series.name) else { continue };
        match series.rank_and_value(label).and_then(|(rank, value)| Some((rank, reading(field, value)?))) {
            Some((rank, reading)) if page.ranks.len() < WorkerConfig::RANKS_MAX as usize => {
                let known = page.ranks.entry(rank).or_default();
                *known = known.max(reading);
            }
            Some(_) | None => page.refused = page.refused.saturating_add(1),
        }
    }
    page
}

#[derive(Clone, Copy, Debug)]
enum Field {
    Running,
    Waiting,
    KvUsage,
}

/// What a metric tells, and the label in which it names the rank.
fn wanted(name: &str) -> Option<(Field, &'static str)> {
    let (engine, metric) = name.split_once(':')?;
    match (engine, metric) {
        ("vllm", "num_requests_running") => Some((Field::Running, "engine")),
        ("vllm", "num_requests_waiting") => Some((Field::Waiting, "engine")),
        // Its name before 0.10; a page has one of the two.
        ("vllm", "kv_cache_usage_perc" | "gpu_cache_usage_perc") => Some((Field::KvUsage, "engine")),
        ("sglang", "num_running_reqs") => Some((Field::Running, "dp_rank")),
        ("sglang", "num_queue_reqs") => Some((Field::Waiting, "dp_rank")),
        ("sglang", "token_usage") => Some((Field::KvUsage, "dp_rank")),
        _ => None,
    }
}

fn reading(field: Field, value: f64) -> Option<EngineReading> {
    let nothing = EngineReading::default();
    Some(match field {
        Field::Running => EngineReading { running: Some(count(value)?), ..nothing },
        Field::Waiting => EngineReading { waiting: Some(count(value)?), ..nothing },
        Field::KvUsage => EngineReading { kv_usage: Some(share(value)?), ..nothing },
    })
}

/// One series of a page in Prometheus' text format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageSeries<'a> {
    /// Name of the metric.
    pub name: &'a str,
    /// Labels, value and timestamp: `{a="b",...} 1.0 1700000000`.
    rest: &'a str,
}

/// The series of a page, in order. Comments and lines over 16 KiB are skipped.
///
/// ```
/// use pointsman::engine_load::series;
///
/// let page = "# TYPE hits_total counter\nhits_total{engine=\"1\",model=\"m\"} 70\n";
/// let hits = series(page).find(|series| series.name == "hits_total").expect("one series");
/// assert_eq!(hits.rank_and_value("engine"), Some((Some(1), 70.0)));
/// ```
pub fn series(text: &str) -> impl Iterator<Item = PageSeries<'_>> {
    let lines = text.lines().filter(|line| !line.starts_with('#') && line.len() <= LINE_BYTES_MAX);
    lines.map(|line| {
        let name = line.split(['{', ' ', '\t']).next().unwrap_or_default();
        PageSeries { name, rest: &line[name.len()..] }
    })
}

impl PageSeries<'_> {
    /// The rank in the label of this name, and the value. `None` if the series is malformed; no rank if the label is
    /// absent or is not a number.
    #[must_use]
    pub fn rank_and_value(&self, rank_label: &str) -> Option<(Option<u32>, f64)> {
        let mut rank = None;
        let mut rest = self.rest.trim_start();
        if let Some(labels) = rest.strip_prefix('{') {
            rest = labels;
            loop {
                rest = rest.trim_start_matches([' ', '\t', ',']);
                if let Some(behind) = rest.strip_prefix('}') {
                    rest = behind;
                    break;
                }
                let (label, behind) = rest.split_once('=')?;
                let value = behind.trim_start().strip_prefix('"')?;
                let end = quote_end(value)?;
                if label.trim_end() == rank_label {
                    rank = value[..end].parse().ok();
                }
                rest = &value[end + 1..];
            }
        }
        let value = rest.split_ascii_whitespace().next()?.parse().ok()?;
        Some((rank, value))
    }
}

/// Where a quoted string ends, escapes skipped.
fn quote_end(text: &str) -> Option<usize> {
    let mut escaped = false;
    text.bytes().position(|byte| {
        let ends = byte == b'"' && !escaped;
        escaped = byte == b'\\' && !escaped;
        ends
    })
}
