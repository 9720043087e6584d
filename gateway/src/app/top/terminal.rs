//! A snapshot as lines of text of at most a given width.
//!
//! Columns that do not fit are left out, the least important first. Longer texts continue on further lines. Control
//! characters in names are replaced, so that a name cannot move the cursor of a terminal or change its colours.

use crate::formats::live::assess::Level;
use crate::formats::live::{DecisionState, HitsState, LiveSnapshot, ModelState, RankState, RatesState, ShadowState};

/// Maximum number of decisions per model.
const DECISION_LINES: usize = 5;

/// Least width of the first column, and of texts.
const NAME_MIN: usize = 12;

/// Maximum number of lines of a text.
const TEXT_LINES: usize = 3;

/// Options of a rendering.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct View<'a> {
    /// Maximum length of a line.
    pub(crate) width: usize,
    /// Maximum number of ranks per model.
    pub(crate) ranks_max: usize,
    /// Only the model with this name.
    pub(crate) model: Option<&'a str>,
}

/// The lines of a snapshot.
pub(crate) fn lines(snapshot: &LiveSnapshot, view: &View<'_>) -> Vec<String> {
    let mut lines = view.marked(snapshot.level, &snapshot.sentence);
    for model in snapshot.models.iter().filter(|model| view.model.is_none_or(|name| model.name == name)) {
        view.model(model, &mut lines);
    }
    lines
}

/// A column of the table of ranks: heading, priority and cell. Columns with greater priorities are left out first; those
/// with 0 never.
type Column = (&'static str, u8, fn(&RankState) -> String);

const COLUMNS: [Column; 11] = [
    ("RANK", 0, |rank| rank.name.clone()),
    ("STATE", 0, |rank| rank.status.clone()),
    ("HITS", 0, |rank| hits(&rank.hits)),
    ("EVENTS", 0, |rank| {
        let state = |events: &crate::formats::live::EventsState| {
            if events.is_connected { events.state.clone() } else { "lost".into() }
        };
        rank.events.as_ref().map_or("-".to_owned(), state)
    }),
    ("BOOKED", 1, |rank| rank.active_requests.to_string()),
    ("WAIT", 2, |rank| format!("{:.1}s", rank.prefill_wait_seconds)),
    ("RUNNING", 3, |rank| count(rank.engine.as_ref().and_then(|engine| engine.running))),
    ("WAITING", 4, |rank| count(rank.engine.as_ref().and_then(|engine| engine.waiting))),
    ("KV", 5, |rank| {
        let usage = rank.engine.as_ref().and_then(|engine| engine.kv_usage);
        usage.map_or("-".to_owned(), |usage| format!("{:.0}%", usage * 100.0))
    }),
    ("PREFILL", 6, |rank| rank.prefill_tokens.to_string()),
    ("BLOCKS", 7, |rank| rank.active_blocks.to_string()),
];

fn count(value: Option<u32>) -> String {
    value.map_or("-".to_owned(), |value| value.to_string())
}

/// Predicted and delivered hit shares.
fn hits(hits: &HitsState) -> String {
    let shown = |(predicted, delivered): (f64, f64)| format!("{:.0}/{:.0}%", predicted * 100.0, delivered * 100.0);
    hits.shares().map_or("-".to_owned(), shown)
}

/// Rates in one line: how busy a model is, and how it does.
fn rates(model: &ModelState) -> String {
    let RatesState { requests_per_second, error_share, ttft_seconds, itl_seconds } = model.rates;
    let milliseconds = |seconds: Option<f64>| {
        seconds.map_or("-".to_owned(), |seconds| match seconds * 1e3 {
            ms if ms < 9.95 => format!("{ms:.1} ms"),
            ms if ms < 9_999.5 => format!("{ms:.0} ms"),
            _ => format!("{seconds:.1} s"),
        })
    };
    let errors = error_share.map_or("-".to_owned(), |share| format!("{:.1} %", share * 100.0));
    let booked: u64 = model.ranks.iter().map(|rank| rank.active_requests).sum();
    format!(
        "{requests_per_second:.1} requests/s, errors {errors}, mean TTFT {}, mean ITL {}, {booked} active",
        milliseconds(ttft_seconds),
        milliseconds(itl_seconds)
    )
}

fn mark(level: Level) -> char {
    match level {
        Level::Ok => '●',
        Level::Notice => '◆',
        Level::Warning => '▲',
        Level::Critical => '✖',
    }
}

impl View<'_> {
    /// Text with the mark of its level, over several lines if necessary.
    fn marked(&self, level: Level, text: &str) -> Vec<String> {
        let mut lines = wrapped(&printable(text), self.width.saturating_sub(2), TEXT_LINES);
        for (n, line) in lines.iter_mut().enumerate() {
            let mark = if n == 0 { mark(level) } else { ' ' };
            *line = format!("{mark} {line}");
        }
        lines
    }

    /// Adds an indented text.
    fn text(&self, text: &str, lines: &mut Vec<String>) {
        let wrapped = wrapped(&printable(text), self.width.saturating_sub(4), TEXT_LINES);
        lines.extend(
            wrapped.iter().enumerate().map(|(n, line)| format!("{}{line}", if n == 0 { "  " } else { "    " })),
        );
    }

    fn model(&self, model: &ModelState, lines: &mut Vec<String>) {
        let ModelState { name, policy, ranks_eligible, ranks_registered, .. } = model;
        lines.push(String::new());
        let head = format!("{name}: {ranks_eligible} of {ranks_registered} ranks can serve, policy {policy}");
        lines.extend(self.marked(model.level, &head));
        self.text(&rates(model), lines);
        self.table(model, lines);
        for class in &model.queue {
            let oldest = class.oldest_age_seconds.map_or(String::new(), |age| format!(", the oldest for {age:.1} s"));
            self.text(&format!("class {}: {} waiting{oldest}", class.class, class.requests), lines);
        }
        for replica in &model.replicas {
            let age = replica.summary_age_seconds;
            self.text(&format!("replica {}: {}, last summary {age:.1} s ago", replica.replica, replica.state), lines);
        }
        for shadow in &model.shadows {
            let ShadowState { policy, decisions, saved_tokens, saved_tokens_estimate, .. } = shadow;
            let ttft = shadow.chosen_ttft_seconds.zip(shadow.ttft_seconds);
            let ttft = ttft
                .map_or(String::new(), |(chosen, other)| format!(", mean TTFT {chosen:.3} s instead of {other:.3} s"));
            let saved = format!("about {saved_tokens_estimate} tokens saved so far");
            let text = format!("beside {policy}: {saved}, {saved_tokens} in {decisions} sampled decisions{ttft}");
            self.text(&text, lines);
        }
        for known in model.decisions.iter().take(DECISION_LINES) {
            self.text(&decision(known), lines);
        }
        if let Some(legs) = &model.legs {
            let results = legs.results.iter().map(|result| format!("{} {}", result.requests, result.result));
            self.text(&format!("prefills: {}", results.collect::<Vec<_>>().join(", ")), lines);
        }
    }

    /// The table of ranks, with the problems of a rank below its line.
    fn table(&self, model: &ModelState, lines: &mut Vec<String>) {
        let shown: Vec<&RankState> = model.ranks.iter().take(self.ranks_max).collect();
        let mut columns: Vec<(&Column, Vec<String>)> = COLUMNS
            .iter()
            .map(|column| (column, shown.iter().map(|rank| printable(&column.2(rank))).collect()))
            .collect();
        let width_of = |((heading, ..), cells): &(&Column, Vec<String>)| {
            cells.iter().map(|cell| cell.chars().count()).max().unwrap_or(0).max(heading.len())
        };
        // Two for the mark, and two between columns.
        let total =
            |columns: &[(&Column, Vec<String>)]| columns.iter().map(|column| width_of(column) + 2).sum::<usize>();
        while total(&columns) > self.width
            && let Some(last) = columns.iter().map(|((_, priority, _), _)| *priority).max().filter(|last| *last > 0)
        {
            columns.retain(|((_, priority, _), _)| *priority < last);
        }
        let mut widths: Vec<usize> = columns.iter().map(width_of).collect();
        let surplus = total(&columns).saturating_sub(self.width);
        widths[0] = widths[0].saturating_sub(surplus).max(NAME_MIN.min(widths[0]));
        let row = |cells: Vec<&str>| {
            let cells = cells.iter().zip(&widths).enumerate().map(|(column, (cell, width))| match column {
                0 | 1 => format!("{:<width$}", shortened(cell, *width)),
                _ => format!("{cell:>width$}"),
            });
            cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
        };
        lines.push(format!("  {}", row(columns.iter().map(|((heading, ..), _)| *heading).collect())));
        for (n, rank) in shown.iter().enumerate() {
            let mark = if rank.level == Level::Ok { ' ' } else { mark(rank.level) };
            lines.push(format!("{mark} {}", row(columns.iter().map(|(_, cells)| cells[n].as_str()).collect())));
            if !rank.problems.is_empty() {
                let problems = wrapped(&printable(&rank.problems.join("; ")), self.width.saturating_sub(4), TEXT_LINES);
                lines.extend(problems.into_iter().map(|line| format!("    {line}")));
            }
        }
        let hidden = model.ranks_registered.saturating_sub(shown.len() as u64);
        if hidden > 0 {
            let ranks = if hidden == 1 { "rank" } else { "ranks" };
            lines.push(format!("  {hidden} further {ranks}, with less trouble"));
        }
    }
}

fn decision(known: &DecisionState) -> String {
    let DecisionState { request_id, age_seconds, prompt_tokens, cached_tokens, .. } = known;
    let rank = known.chosen.as_deref().or(known.rejection.as_deref()).unwrap_or("none");
    let tokens = match &known.no_tokens {
        Some(reason) => format!("no tokens: {reason}"),
        None => format!("{cached_tokens} of {prompt_tokens} tokens cached"),
    };
    format!("{age_seconds:.1} s ago {rank}, {tokens}, {request_id}")
}

/// Lines of at most `width` characters, broken at blanks where possible. The last of `lines_max` lines ends with an
/// ellipsis if the text continues.
fn wrapped(text: &str, width: usize, lines_max: usize) -> Vec<String> {
    let width = width.max(NAME_MIN);
    let mut lines = Vec::new();
    let mut rest: Vec<char> = text.chars().collect();
    while rest.len() > width && lines.len() + 1 < lines_max {
        let blank = rest[..=width].iter().rposition(|c| *c == ' ').filter(|at| *at > 0);
        let after = rest.split_off(blank.unwrap_or(width));
        lines.push(rest.into_iter().collect());
        rest = after.into_iter().skip(usize::from(blank.is_some())).collect();
    }
    if rest.len() > width {
        rest.truncate(width - 1);
        rest.push('…');
    }
    lines.push(rest.into_iter().collect());
    lines
}

/// A name of at most `width` characters: its beginning and its end, which differ most.
fn shortened(name: &str, width: usize) -> String {
    let count = name.chars().count();
    if count <= width {
        return name.to_owned();
    }
    let end = width.saturating_sub(1) * 2 / 3;
    let begin = width.saturating_sub(1 + end);
    name.chars().take(begin).chain(['…']).chain(name.chars().skip(count - end)).collect()
}

fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: View<'static> = View { width: 140, ranks_max: 20, model: None };

    const RANK: &str = r#"{"name":"","worker":"11681654896278826351","rank":0,"endpoint":"http://e","level":"ok",
        "status":"serving","problems":[],"active_requests":3,"prefill_tokens":4096,"prefill_wait_seconds":1.25,
        "active_blocks":70,"total_blocks":null,"held_blocks":900,
        "hits":{"seconds":null,"placements":0,"prompt_tokens":100,"predicted_tokens":75,"delivered_tokens":50},
        "engine":{"running":2,"waiting":null,"kv_usage":0.5,"age_seconds":0.1,"is_stale":false},
        "events":{"state":"live","is_connected":true,"messages":9,"message_age_seconds":null}}"#;

    const SNAPSHOT: &str = r#"{"version":"0","at_unix_ms":0,"number":1,"level":"ok","sentence":"All 3 ranks serve.","models":[{
        "name":"m","role":"aggregated","policy":"latency","block_size":16,"level":"ok","sentence":"All 3 ranks serve.",
        "leases":7,"ranks_registered":3,"ranks_eligible":3,"ranks":[],
        "rates":{"requests_per_second":12.34,"error_share":null,"ttft_seconds":0.1234,"itl_seconds":null},
        "course":{"point_seconds":0,"requests":[],"errors":[],"ttft_ms":[],"itl_ms":[]},
        "hits":{"seconds":null,"placements":0,"prompt_tokens":0,"predicted_tokens":0,"delivered_tokens":0},
        "queue":[{"class":"default","requests":4,"tokens":9,"oldest_age_seconds":0.5}],
        "replicas":[],"decisions":[],"shadows":[],"legs":null}]}"#;

    fn rank(worker: &str, level: Level) -> RankState {
        let rank: RankState = serde_json::from_str(RANK).expect("a rank");
        let problem = (level != Level::Ok).then(|| "KV events cold: the first event is missing".to_owned());
        RankState { name: format!("10.0.0.{worker}:8000/0"), level, problems: problem.into_iter().collect(), ..rank }
    }

    fn snapshot(ranks: Vec<RankState>) -> LiveSnapshot {
        let mut snapshot: LiveSnapshot = serde_json::from_str(SNAPSHOT).expect("a snapshot");
        snapshot.models[0].ranks = ranks;
        snapshot
    }

    #[test]
    fn a_frame_has_a_line_per_rank() {
        let state = snapshot(vec![rank("7", Level::Warning), rank("12", Level::Ok)]);
        let expected = "\
● All 3 ranks serve.

● m: 3 of 3 ranks can serve, policy latency
  12.3 requests/s, errors -, mean TTFT 123 ms, mean ITL -, 6 active
  RANK              STATE      HITS  EVENTS  BOOKED  WAIT  RUNNING  WAITING   KV  PREFILL  BLOCKS
▲ 10.0.0.7:8000/0   serving  75/50%    live       3  1.2s        2        -  50%     4096      70
    KV events cold: the first event is missing
  10.0.0.12:8000/0  serving  75/50%    live       3  1.2s        2        -  50%     4096      70
  1 further rank, with less trouble
  class default: 4 waiting, the oldest for 0.5 s";
        assert_eq!(lines(&state, &PLAIN).join("\n"), expected);
        let narrow = lines(&state, &View { width: 60, ..PLAIN });
        assert_eq!(narrow[6], "▲ 10.0.0.7:8000/0   serving  75/50%    live       3  1.2s", "{narrow:#?}");
    }

    #[test]
    fn no_line_is_longer_than_the_terminal_and_hits_and_events_stay() {
        let mut state = snapshot(vec![rank("7", Level::Critical), rank("12", Level::Ok)]);
        state.sentence = "1 of 4 engines does not answer (connection refused); ".repeat(9);
        state.models[0].ranks[0].name =
            "an-engine-with-a-long-name.in.a-namespace.svc.cluster.local:8000/11".to_owned();
        state.models[0].ranks[0].problems = vec!["ejected: ".to_owned() + &"x".repeat(300)];
        for width in [40, 60, 80, 100, 140, 400] {
            let frame = lines(&state, &View { width, ..PLAIN });
            assert!(frame.iter().all(|line| line.chars().count() <= width), "{width}: {frame:#?}");
            let heading = frame.iter().find(|line| line.contains("RANK")).expect("a heading");
            assert!(heading.contains("HITS") && heading.contains("EVENTS"), "{width}: {heading}");
            assert!(frame.iter().any(|line| line.contains("8000/11")), "{width}: {frame:#?}");
        }
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
