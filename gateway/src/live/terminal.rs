//! A snapshot as lines of text for a terminal.
//!
//! Control characters in names are replaced, so that a name cannot move the cursor or change colours.

use std::fmt::Write as _;

use super::assess::Level;
use super::{DecisionState, HitsState, LiveSnapshot, ModelState, RankState, ShadowState};

/// Maximum number of decisions per model.
const DECISION_LINES: usize = 5;

/// Options of a rendering.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct View<'a> {
    /// Whether levels are coloured by escape sequences.
    pub(super) has_colours: bool,
    /// Maximum number of ranks per model.
    pub(super) ranks_max: usize,
    /// Only the model with this name.
    pub(super) model: Option<&'a str>,
}

/// The lines of a snapshot.
pub(super) fn lines(snapshot: &LiveSnapshot, view: &View<'_>) -> Vec<String> {
    let mut lines = vec![view.marked(snapshot.level, &snapshot.sentence)];
    for model in snapshot.models.iter().filter(|model| view.model.is_none_or(|name| model.name == name)) {
        model_lines(model, view, &mut lines);
    }
    lines
}

impl View<'_> {
    /// Text with the mark and colour of its level.
    fn marked(&self, level: Level, text: &str) -> String {
        let (mark, colour) = match level {
            Level::Ok => ('●', 32),
            Level::Notice => ('◆', 36),
            Level::Warning => ('▲', 33),
            Level::Critical => ('✖', 31),
        };
        let text = printable(text);
        if self.has_colours { format!("\x1b[{colour}m{mark}\x1b[0m {text}") } else { format!("{mark} {text}") }
    }
}

fn model_lines(model: &ModelState, view: &View<'_>, lines: &mut Vec<String>) {
    let ModelState { name, policy, ranks_eligible, ranks_registered, leases, .. } = model;
    lines.push(String::new());
    let head = format!(
        "{name}: {ranks_eligible} of {ranks_registered} ranks can serve, policy {policy}, {leases} bookings and waiting \
         requests"
    );
    lines.push(view.marked(model.level, &head));
    let headings =
        ["RANK", "STATE", "BOOKED", "PREFILL", "WAIT", "BLOCKS", "RUNNING", "WAITING", "KV", "HITS", "EVENTS"];
    let mut rows: Vec<Vec<String>> = vec![headings.map(str::to_owned).to_vec()];
    let shown = model.ranks.iter().take(view.ranks_max);
    rows.extend(shown.clone().map(cells));
    let problems = shown.map(|rank| (rank.level, rank.problems.join("; ")));
    let problems = std::iter::once((Level::Ok, String::new())).chain(problems);
    for (row, (level, problems)) in aligned(&rows).into_iter().zip(problems) {
        let mark = if level == Level::Ok { format!("  {row}") } else { view.marked(level, &row) };
        lines.push(if problems.is_empty() { mark } else { format!("{mark}  {}", printable(&problems)) });
    }
    let hidden = *ranks_registered - u64::try_from(model.ranks.len().min(view.ranks_max)).unwrap_or(0);
    if hidden > 0 {
        lines.push(format!("  {hidden} further ranks, with less trouble"));
    }
    for class in &model.queue {
        let oldest = class.oldest_age_seconds.map_or(String::new(), |age| format!(", the oldest for {age:.1} s"));
        lines.push(format!("  class {}: {} waiting{oldest}", printable(&class.class), class.requests));
    }
    for replica in &model.replicas {
        let age = replica.summary_age_seconds;
        lines.push(format!(
            "  replica {}: {}, last summary {age:.1} s ago",
            printable(&replica.replica),
            replica.state
        ));
    }
    for shadow in &model.shadows {
        let ShadowState { policy, decisions, saved_tokens, saved_tokens_estimate, .. } = shadow;
        let ttft = shadow.chosen_ttft_seconds.zip(shadow.ttft_seconds);
        let ttft =
            ttft.map_or(String::new(), |(chosen, other)| format!(", mean TTFT {chosen:.3} s instead of {other:.3} s"));
        lines.push(format!(
            "  beside {policy}: about {saved_tokens_estimate} tokens saved so far, {saved_tokens} in {decisions} sampled \
             decisions{ttft}"
        ));
    }
    for known in model.decisions.iter().take(DECISION_LINES) {
        let (id, rank) = (printable(&known.request_id), known.chosen.as_deref().unwrap_or("none"));
        let runner_up = known.runner_up.as_ref().zip(known.margin);
        let runner_up = runner_up.map_or(String::new(), |(rank, margin)| format!(", runner-up {rank} by {margin:.3}"));
        let DecisionState { age_seconds, prompt_tokens, cached_tokens, .. } = known;
        lines.push(format!(
            "  {age_seconds:.0} s ago {id}: {rank}{runner_up}, {cached_tokens} of {prompt_tokens} tokens cached"
        ));
    }
    if let Some(legs) = &model.legs {
        let results = legs.results.iter().map(|result| format!("{} {}", result.requests, result.result));
        lines.push(format!("  prefills: {}", results.collect::<Vec<_>>().join(", ")));
    }
}

fn cells(rank: &RankState) -> Vec<String> {
    let count = |value: Option<u32>| value.map_or("-".to_owned(), |value| value.to_string());
    let engine = rank.engine.as_ref();
    let kv = engine.and_then(|engine| engine.kv_usage).map_or("-".to_owned(), |usage| format!("{:.0}%", usage * 100.0));
    let events = rank.events.as_ref().map_or("-", |events| if events.is_connected { &events.state } else { "lost" });
    vec![
        format!("{}/{}", rank.worker, rank.rank),
        rank.status.clone(),
        rank.active_requests.to_string(),
        rank.prefill_tokens.to_string(),
        format!("{:.1}s", rank.prefill_wait_seconds),
        rank.active_blocks.to_string(),
        count(engine.and_then(|engine| engine.running)),
        count(engine.and_then(|engine| engine.waiting)),
        kv,
        hits(&rank.hits),
        events.to_owned(),
    ]
}

/// Predicted and delivered hit shares.
fn hits(hits: &HitsState) -> String {
    let shown = |(predicted, delivered): (f64, f64)| format!("{:.0}/{:.0}%", predicted * 100.0, delivered * 100.0);
    hits.shares().map_or("-".to_owned(), shown)
}

/// Columns of equal width; the first two are aligned to the left.
fn aligned(rows: &[Vec<String>]) -> Vec<String> {
    let columns = rows.first().map_or(0, Vec::len);
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let line = |row: &Vec<String>| {
        let mut line = String::new();
        for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
            let _ = match column {
                0 | 1 => write!(line, "{cell:<width$}  "),
                _ => write!(line, "{cell:>width$}  "),
            };
        }
        line.trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::live::{ClassState, EngineState, EventsState};

    const PLAIN: View<'static> = View { has_colours: false, ranks_max: 20, model: None };

    fn rank(worker: &str, level: Level) -> RankState {
        RankState {
            worker: worker.to_owned(),
            rank: 0,
            endpoint: "http://e".to_owned(),
            level,
            status: "serving".to_owned(),
            problems: if level == Level::Ok { Vec::new() } else { vec!["KV events cold".to_owned()] },
            active_requests: 3,
            prefill_tokens: 4_096,
            prefill_wait_seconds: 1.25,
            active_blocks: 70,
            total_blocks: None,
            held_blocks: 900,
            hits: HitsState { prompt_tokens: 100, predicted_tokens: 75, delivered_tokens: 50, ..HitsState::default() },
            engine: Some(EngineState {
                running: Some(2),
                waiting: None,
                kv_usage: Some(0.5),
                age_seconds: 0.1,
                is_stale: false,
            }),
            events: Some(EventsState {
                state: "live".to_owned(),
                is_connected: true,
                messages: 9,
                message_age_seconds: None,
            }),
        }
    }

    fn snapshot(ranks: Vec<RankState>) -> LiveSnapshot {
        let class = ClassState { class: "default".to_owned(), requests: 4, tokens: 9, oldest_age_seconds: Some(0.5) };
        let model = ModelState {
            name: "m".to_owned(),
            role: "aggregated".to_owned(),
            policy: "latency".to_owned(),
            block_size: 16,
            level: Level::Ok,
            sentence: "All 3 ranks serve.".to_owned(),
            leases: 7,
            ranks_registered: 3,
            ranks_eligible: 3,
            ranks,
            hits: HitsState::default(),
            queue: vec![class],
            replicas: Vec::new(),
            decisions: Vec::new(),
            shadows: Vec::new(),
            legs: None,
        };
        LiveSnapshot {
            version: "0".to_owned(),
            at_unix_ms: 0,
            number: 1,
            level: Level::Ok,
            sentence: "All 3 ranks serve.".to_owned(),
            models: vec![model],
        }
    }

    #[test]
    fn a_frame_has_a_line_per_rank() {
        let frame = lines(&snapshot(vec![rank("7", Level::Warning), rank("12", Level::Ok)]), &PLAIN).join("\n");
        let expected = "\
● All 3 ranks serve.

● m: 3 of 3 ranks can serve, policy latency, 7 bookings and waiting requests
  RANK  STATE    BOOKED  PREFILL  WAIT  BLOCKS  RUNNING  WAITING   KV    HITS  EVENTS
▲ 7/0   serving       3     4096  1.2s      70        2        -  50%  75/50%    live  KV events cold
  12/0  serving       3     4096  1.2s      70        2        -  50%  75/50%    live
  1 further ranks, with less trouble
  class default: 4 waiting, the oldest for 0.5 s";
        assert_eq!(frame, expected);
    }

    #[test]
    fn names_cannot_control_the_terminal() {
        let mut hostile = snapshot(vec![rank("7", Level::Warning)]);
        hostile.models[0].name = "a\x1b[2Jb".to_owned();
        hostile.models[0].ranks[0].problems = vec!["c\r\nd\u{9b}e".to_owned()];
        let frame = lines(&hostile, &PLAIN);
        assert!(frame.iter().all(|line| !line.chars().any(char::is_control)), "{frame:#?}");
        assert!(frame.iter().any(|line| line.contains("a\u{fffd}[2Jb")), "{frame:#?}");
    }
}
