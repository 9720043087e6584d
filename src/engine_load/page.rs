//! Parser for the load metrics on an engine's Prometheus page.
//!
//! Reads the text format line by line, for eight metric names of vLLM and SGLang. An invalid line is skipped.

use std::collections::BTreeMap;

use super::{EngineReading, EngineSleep, count, share};
use crate::protocol::WorkerConfig;

/// Maximum page size in bytes.
pub const PAGE_BYTES_MAX: usize = 4 << 20;

/// Maximum line length in bytes.
const LINE_BYTES_MAX: usize = 16 << 10;

/// Load metrics of a page, by rank.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Page {
    /// By rank label; `None` for series without a rank, as in engines with one rank.
    ranks: BTreeMap<Option<u32>, EngineReading>,
    /// Number of invalid load series: not a number, negative, NaN, infinite, or unterminated.
    pub refused: u32,
}

impl Page {
    /// The readings of a worker's ranks `start..start + size`.
    ///
    /// An engine with one rank may omit the label, or number itself within a larger deployment that the router does not
    /// see; then the only rank on the page is used. Ambiguous pages give no readings.
    pub fn of_ranks(&self, start: u32, size: u32) -> impl Iterator<Item = (u32, EngineReading)> + '_ {
        let only = (size == 1 && self.ranks.len() == 1).then(|| self.ranks.values().next().copied()).flatten();
        let last = start.saturating_add(size.saturating_sub(1));
        (start..=last).take(size.min(WorkerConfig::RANKS_MAX) as usize).filter_map(move |rank| {
            let reading = only.or_else(|| self.ranks.get(&Some(rank)).copied())?;
            (!reading.is_empty()).then_some((rank, reading))
        })
    }
}

/// Parses a page.
///
/// ```
/// use pointsman::internals::engine_load::read_page;
///
/// let page = read_page("vllm:num_requests_running{engine=\"0\",model_name=\"m\"} 3.0\n");
/// let (rank, reading) = page.of_ranks(0, 1).next().expect("said of rank 0");
/// assert_eq!((rank, reading.running, reading.waiting), (0, Some(3), None));
/// ```
#[must_use]
pub fn read_page(text: &str) -> Page {
    let mut page = Page::default();
    for series in series(text) {
        let Some((field, label)) = load_field(&series) else { continue };
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
enum LoadField {
    Running,
    Waiting,
    KvUsage,
    IsAwake,
    HasDiscarded,
}

/// The value that a metric contains, and its rank label.
fn load_field(series: &PageSeries<'_>) -> Option<(LoadField, &'static str)> {
    let (engine, metric) = series.name.split_once(':')?;
    match (engine, metric) {
        ("vllm", "num_requests_running") => Some((LoadField::Running, "engine")),
        ("vllm", "num_requests_waiting") => Some((LoadField::Waiting, "engine")),
        // Name before 0.10; a page has one of the two.
        ("vllm", "kv_cache_usage_perc" | "gpu_cache_usage_perc") => Some((LoadField::KvUsage, "engine")),
        // One series for each state. Labels escape quotes, so no other label has this text.
        ("vllm", "engine_sleep_state") if series.rest.contains("sleep_state=\"awake\"") => {
            Some((LoadField::IsAwake, "engine"))
        }
        ("vllm", "engine_sleep_state") => Some((LoadField::HasDiscarded, "engine")),
        ("sglang", "num_running_reqs") => Some((LoadField::Running, "dp_rank")),
        ("sglang", "num_queue_reqs") => Some((LoadField::Waiting, "dp_rank")),
        ("sglang", "token_usage") => Some((LoadField::KvUsage, "dp_rank")),
        _ => None,
    }
}

fn reading(field: LoadField, value: f64) -> Option<EngineReading> {
    let nothing = EngineReading::default();
    Some(match field {
        LoadField::Running => EngineReading { running: Some(count(value)?), ..nothing },
        LoadField::Waiting => EngineReading { waiting: Some(count(value)?), ..nothing },
        LoadField::KvUsage => EngineReading { kv_usage: Some(share(value)?), ..nothing },
        LoadField::IsAwake if share(value)? > 0.0 => EngineReading { sleep: Some(EngineSleep::Awake), ..nothing },
        LoadField::IsAwake => EngineReading { sleep: Some(EngineSleep::Paused), ..nothing },
        LoadField::HasDiscarded if share(value)? > 0.0 => {
            EngineReading { sleep: Some(EngineSleep::Emptied), ..nothing }
        }
        LoadField::HasDiscarded => nothing,
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
/// use pointsman::internals::engine_load::series;
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

impl<'a> PageSeries<'a> {
    /// The rank in the given label, and the value. `None` if the series is malformed; no rank if the label is absent or
    /// is not a number.
    #[must_use]
    pub fn rank_and_value(&self, rank_label: &str) -> Option<(Option<u32>, f64)> {
        let mut rank = None;
        let rest = self.visit_labels(|label, value| {
            if label == rank_label {
                rank = value.parse().ok();
            }
        })?;
        let value = rest.split_ascii_whitespace().next()?.parse().ok()?;
        Some((rank, value))
    }

    /// The value of a label, without unescaping; the labels in use contain no escapes.
    #[must_use]
    pub fn label(&self, name: &str) -> Option<&'a str> {
        let mut found = None;
        self.visit_labels(|label, value| {
            if label == name {
                found.get_or_insert(value);
            }
        });
        found
    }

    /// Visits labels with their values. Returns the rest of the line; `None` if the labels are malformed.
    fn visit_labels(&self, mut visit: impl FnMut(&'a str, &'a str)) -> Option<&'a str> {
        let rest = self.rest.trim_start();
        let Some(mut rest) = rest.strip_prefix('{') else { return Some(rest) };
        loop {
            rest = rest.trim_start_matches([' ', '\t', ',']);
            if let Some(behind) = rest.strip_prefix('}') {
                return Some(behind);
            }
            let (label, behind) = rest.split_once('=')?;
            let value = behind.trim_start().strip_prefix('"')?;
            let end = quote_end(value)?;
            visit(label.trim_end(), &value[..end]);
            rest = &value[end + 1..];
        }
    }
}

/// Position of the closing quote of a string, skipping escapes.
fn quote_end(text: &str) -> Option<usize> {
    let mut escaped = false;
    text.bytes().position(|byte| {
        let ends = byte == b'"' && !escaped;
        escaped = byte == b'\\' && !escaped;
        ends
    })
}
