//! Report of the demo: the table, the text around it, and the JSON.
//!
//! The text contains no control characters. The table begins with the latencies of clients, and ends with the
//! distribution of the load.

use std::fmt::{self, Display, Formatter};

use serde::Serialize;

use super::DemoGateway;
use super::fleet::{BLOCK_SIZE, ENGINES, Fleet, KV_BLOCKS, MODEL, RANKS};
use super::workload::{SYSTEMS, THINK_MS, TURNS};
use super::{DEMO_POLICY, DemoConfig, Figures, LivePage};

/// Maximum 99th percentile of timer lag in virtual milliseconds. Above it, times describe the machine too.
const LAG_P99_MS_MAX: f64 = 20.0;

/// Results and conditions of both runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// Seed of the workload.
    pub seed: u64,
    /// Number of clients.
    pub clients: u32,
    /// Virtual seconds per real second. All times except `timer_lag` and `run_seconds` are virtual.
    pub time_scale: f64,
    /// Number of mock engines.
    pub engines: u16,
    /// Number of ranks per engine.
    pub ranks_per_engine: u16,
    /// Source of the tokens that the router compares prompts by.
    pub token_source: &'static str,
    /// Number of engines that compute prompts only, in the second run.
    pub prefill_engines: u16,
    /// True for a build without optimisation.
    pub debug_build: bool,
    /// True if the machine kept up, so that times are accurate.
    pub times_usable: bool,
    /// True if both runs sent the same requests, byte for byte.
    pub same_requests: bool,
    /// First run: round robin over all ranks, or aggregated engines.
    pub baseline: Figures,
    /// Second run: the router's own policy, with disaggregated engines if the first one is of aggregated engines.
    pub routed: Figures,
}

impl Report {
    pub(super) fn new(config: &DemoConfig, baseline: Figures, routed: Figures) -> Self {
        let pace = config.time_scale;
        let kept_up = |run: &Figures| run.timer_lag.p99_ms * pace <= LAG_P99_MS_MAX;
        Self {
            seed: config.seed,
            clients: config.clients,
            time_scale: pace,
            engines: ENGINES,
            ranks_per_engine: RANKS,
            token_source: "engine",
            prefill_engines: if config.disaggregated { config.prefill_engines } else { 0 },
            debug_build: cfg!(debug_assertions),
            times_usable: pace > 0.0 && kept_up(&baseline) && kept_up(&routed),
            same_requests: baseline.requests_digest == routed.requests_digest,
            baseline,
            routed,
        }
    }

    /// True if every request succeeded.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.baseline.errors == 0 && self.routed.errors == 0
    }

    /// The report as one JSON object.
    #[must_use]
    pub fn json(&self) -> String {
        serde_json::to_string_pretty(self).expect("numbers and text are JSON")
    }

    fn intro(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self { seed, clients, routed, .. } = self;
        let cache_tokens = u64::from(KV_BLOCKS - 1) * u64::from(BLOCK_SIZE);
        let planned = routed.requests + routed.errors;
        let prompt_mean = routed.prompt_tokens.checked_div(routed.requests).unwrap_or_default();
        let (think_min, think_max) = (f64::from(*THINK_MS.start()) / 1e3, f64::from(*THINK_MS.end()) / 1e3);
        let (turns_min, turns_max) = (TURNS.start(), TURNS.end());
        let policy = DEMO_POLICY.name();
        let runs = match self.prefill_engines {
            0 => format!("first round robin, then Pointsman's own policy ({policy}), with"),
            n => format!("first aggregated engines, then {n} for prefill and {} for decode, with", ENGINES - n),
        };
        let requests = if self.same_requests { "the same requests, byte for byte" } else { "DIFFERENT requests" };
        write!(
            f,
            "\
Engines   {ENGINES} mock engines of {RANKS} ranks and a gateway before them, in this process, on loopback.
          They are models without GPUs: a rank has the timing of an 8B model on an H100 and a
          prefix cache of {cache_tokens} tokens.
Requests  {planned} streamed chats from {clients} clients (seed {seed}); each client sends a request, waits
          for the whole answer, and pauses for {think_min} to {think_max} s. Conversations of {turns_min} to {turns_max} questions over {SYSTEMS} shared system
          prompts; {prompt_mean} prompt tokens on average.
Tokens    for prefix matching come from the engines' /tokenize.
Runs      {runs}
          {requests}, and cold caches for each.
"
        )?;
        if self.time_scale > 0.0 && self.time_scale.to_bits() != 1.0_f64.to_bits() {
            let pace = self.time_scale;
            writeln!(f, "Times     are virtual: {pace} virtual seconds per real second.")?;
        }
        writeln!(f)
    }

    fn table(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let mut line = |name: &str, cells: [&str; 3]| {
            let [before, after, ratio] = cells;
            writeln!(f, "{}", format!("{name:<36}{before:>13}{after:>13}{ratio:>13}").trim_end())
        };
        let name = |run: &Figures| run.policy.replace('_', " ");
        line("", [&name(&self.baseline), &name(&self.routed), "ratio"])?;
        for (name, value, unit) in ROWS {
            let (before, after) = (value(&self.baseline), value(&self.routed));
            let is_shown = self.time_scale > 0.0 || *unit != Unit::Milliseconds;
            let cell = |value| if is_shown { unit.show(value) } else { "-".to_owned() };
            let ratio = if is_shown && *unit != Unit::Errors { compared(before, after) } else { String::new() };
            line(name, [&cell(before), &cell(after), &ratio])?;
        }
        Ok(())
    }

    fn caveats(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let lag = self.baseline.timer_lag.p99_ms.max(self.routed.timer_lag.p99_ms);
        writeln!(f)?;
        if self.times_usable {
            writeln!(f, "Timer lag was {lag:.1} ms at p99, which limits the accuracy of times.")?;
        } else if self.time_scale > 0.0 {
            write!(
                f,
                "\
This machine was busy: timers were {lag:.0} ms late at p99, and the mock engines depend on timers. All times are longer
than on a quiet machine, in both columns. --time-scale 0.5 runs at half the pace.
"
            )?;
        } else {
            writeln!(f, "No times: at --time-scale 0 engines run without delays.")?;
        }
        if self.debug_build {
            writeln!(f, "This is a build without optimisation; cargo run --release -- demo needs a tenth of the CPU.")?;
        }
        for run in [&self.baseline, &self.routed] {
            for reason in &run.error_reasons {
                writeln!(f, "{}: {reason}", run.policy)?;
            }
        }
        write!(
            f,
            "\n\
Results depend on the workload. Prompts without shared prefixes have equal hit rates under any policy. Nearly idle
engines respond immediately under any policy. Ratios grow with prompt length, sharing and load.
"
        )
    }
}

/// Row of the table: label, value and unit.
type Row = (&'static str, fn(&Figures) -> f64, Unit);

/// Latencies of clients first.
const ROWS: &[Row] = &[
    ("time to first token, mean", |run| run.first_token.mean_ms, Unit::Milliseconds),
    ("                     p50", |run| run.first_token.p50_ms, Unit::Milliseconds),
    ("                     p99", |run| run.first_token.p99_ms, Unit::Milliseconds),
    ("whole answer, mean", |run| run.whole_answer.mean_ms, Unit::Milliseconds),
    ("                     p50", |run| run.whole_answer.p50_ms, Unit::Milliseconds),
    ("                     p99", |run| run.whole_answer.p99_ms, Unit::Milliseconds),
    ("time between tokens, mean", |run| run.between_tokens.mean_ms, Unit::Milliseconds),
    ("                     p99", |run| run.between_tokens.p99_ms, Unit::Milliseconds),
    ("requests answered", |run| count(run.requests), Unit::Errors),
    ("errors", |run| count(run.errors), Unit::Errors),
    ("prompt tokens found in cache", |run| run.hit_rate, Unit::Share),
    ("prompt tokens computed", |run| count(run.computed_tokens()), Unit::Count),
    ("busiest rank / mean: requests", |run| run.spread_requests, Unit::Factor),
    ("                     computed", |run| run.spread_computed, Unit::Factor),
];

#[expect(clippy::cast_precision_loss, reason = "counts of a run are far below 2^53")]
fn count(value: u64) -> f64 {
    value as f64
}

/// Unit of a figure, which determines its format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unit {
    Milliseconds,
    Share,
    Count,
    Factor,
    /// Count without a meaningful ratio.
    Errors,
}

impl Unit {
    fn show(self, value: f64) -> String {
        match self {
            Self::Milliseconds if value < 9.95 => format!("{value:.1} ms"),
            Self::Milliseconds => format!("{value:.0} ms"),
            Self::Share => format!("{:.1} %", value * 100.0),
            Self::Count | Self::Errors => grouped(value),
            Self::Factor => format!("{value:.2}"),
        }
    }
}

/// Formats a whole number with a comma between groups of three digits.
fn grouped(value: f64) -> String {
    let digits = format!("{value:.0}");
    let mut text = String::with_capacity(digits.len() * 4 / 3 + 1);
    for (n, digit) in digits.chars().enumerate() {
        if n > 0 && (digits.len() - n) % 3 == 0 {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Describes the second figure relative to the first.
fn compared(before: f64, after: f64) -> String {
    let (low, high) = (before.min(after), before.max(after));
    if low <= 0.0 {
        return String::new();
    }
    match format!("{:.1}x", high / low).as_str() {
        "1.0x" => "same".to_owned(),
        times if after < before => format!("{times} less"),
        times => format!("{times} more"),
    }
}

impl Display for Report {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.intro(f)?;
        self.table(f)?;
        self.caveats(f)?;
        write!(
            f,
            "\n\
Next, engines of your own; docs/quick-start.md has the ports, the modes, and the file for vLLM:
  python -m sglang.launch_server --model-path MODEL --page-size {BLOCK_SIZE} --enable-cache-report --kv-events-config \\
    '{{\"publisher\": \"zmq\", \"endpoint\": \"tcp://*:5557\", \"replay_endpoint\": \"tcp://*:5657\"}}'
  pointsman serve --model MODEL --worker http://HOST:30000
"
        )
    }
}

/// Addresses of a fleet and example commands for them.
pub(super) fn addresses<G: DemoGateway>(fleet: &Fleet<G>) -> String {
    let gateway = fleet.address();
    let mut text = format!("\nGateway   http://{gateway} ({})\n", DEMO_POLICY.name());
    for (n, engine) in fleet.engines().iter().enumerate() {
        let label = if n == 0 { "Engines" } else { "" };
        text += &format!("{label:<10}{}, events from {} on\n", engine.url(), engine.event_endpoint(0));
    }
    if let Some(LivePage { address, token, token_file }) = fleet.live_page() {
        text += &format!(
            "\
Live page http://{address}/admin/page
Token     {token}
  pointsman top --admin http://{address} --token-file {}
",
            token_file.display()
        );
    }
    text += &format!(
        "\
  curl http://{gateway}/v1/models
  curl -N http://{gateway}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{{\"model\": \"{MODEL}\", \"stream\": true, \"messages\": [{{\"role\": \"user\", \"content\": \"Hello.\"}}]}}'
  curl http://{gateway}/metrics
The load goes on. Ctrl-C stops everything.
"
    );
    text
}

#[cfg(test)]
mod tests {
    use super::super::Times;
    use super::*;

    fn figures(policy: &str, ms: f64, cached_tokens: u64) -> Figures {
        let times = Times { mean_ms: ms, p50_ms: ms / 2.0, p99_ms: 4.0 * ms };
        let hit_rate = count(cached_tokens) / 2e6;
        Figures {
            policy: policy.to_owned(),
            requests: 640,
            first_token: times,
            between_tokens: times,
            whole_answer: times,
            prompt_tokens: 2_000_000,
            cached_tokens,
            hit_rate,
            spread_requests: 1.0,
            spread_computed: 1.25,
            ..Figures::default()
        }
    }

    fn report(change: fn(&mut Figures)) -> Report {
        let mut routed = figures(DEMO_POLICY.name(), 40.0, 1_800_000);
        change(&mut routed);
        Report::new(&DemoConfig::default(), figures("round_robin", 200.0, 1_000_000), routed)
    }

    #[test]
    fn the_table_has_units_and_directions_of_ratios() {
        let text = report(|_| ()).to_string();
        let row = |name: &str| {
            let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name}:\n{text}"));
            line[36..].split_whitespace().collect::<Vec<_>>().join(" ")
        };
        assert_eq!(row("time to first token, mean"), "200 ms 40 ms 5.0x less");
        assert_eq!(row("prompt tokens found"), "50.0 % 90.0 % 1.8x more");
        assert_eq!(row("prompt tokens computed"), "1,000,000 200,000 5.0x less");
        assert_eq!(row("busiest rank / mean: requests"), "1.00 1.00 same");
        assert_eq!(row("errors"), "0 0");
        assert!(!text.contains(|c: char| c.is_control() && c != '\n'), "plain text");
        assert!(text.lines().all(|line| line.len() <= 120 && line == line.trim_end()), "{text}");
    }

    #[test]
    fn a_busy_machine_is_named_beside_the_times() {
        let late = report(|routed| routed.timer_lag.p99_ms = 35.0);
        let text = late.to_string();
        assert!(!late.times_usable && text.contains("timers were 35 ms late at p99"), "{text}");
        assert!(text.contains("200 ms") && text.contains("90.0 %"), "{text}");
    }

    #[test]
    fn errors_are_listed_and_counted() {
        let failed = report(|routed| (routed.errors, routed.error_reasons) = (2, vec!["answered 503: no".to_owned()]));
        assert!(!failed.is_clean() && report(|_| ()).is_clean());
        assert!(failed.to_string().contains("latency: answered 503: no"));
        let json: serde_json::Value = serde_json::from_str(&failed.json()).expect("JSON");
        assert_eq!((&json["routed"]["errors"], &json["routed"]["first_token"]["mean_ms"]), (&2.into(), &40.0.into()));
    }
}
