//! Report of a replay: one flat object.

use std::io::{self, Write};
use std::num::NonZeroU32;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use pointsman::policy::Policy;

use crate::cli::{Knowledge, Replay, policy_name};
use crate::loop_state::Outcome;

/// Figures of the measured half of one run, with the arguments of the run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Name of the router.
    pub target: String,
    /// Requests divided by wall time, including the time of the simulated engines.
    pub requests_per_second: f64,
    /// CPU time of all threads minus that of the simulated engines, in µs per request.
    pub router_cpu_us_per_request: f64,
    /// CPU time of the simulated engines and of the token copies in place of a caller's, in µs per request.
    pub engine_cpu_us_per_request: f64,
    /// Route times: from the call of `route`, in the open loop from the scheduled arrival.
    pub route_us: Percentiles,
    /// Number of blocks in the engines' events per request.
    pub event_blocks_per_request: f64,
    /// Prompt blocks in the chosen rank's cache divided by all complete prompt blocks.
    pub hit_rate: f64,
    /// In-flight requests of the most loaded rank divided by the mean, averaged over samples.
    pub load_max_over_mean: f64,
    /// Resident memory at the end: router, workload and simulated caches. None if the system does not report it.
    pub rss_bytes: Option<u64>,
    /// Resident memory before the router started: mostly the workload.
    pub rss_before_bytes: Option<u64>,
    /// Number of measured requests, equal to the number of warm-up requests or one more.
    pub requests: usize,
    /// Selection policy.
    pub policy: Policy,
    /// Source of the router's knowledge of caches.
    #[serde(default)]
    pub knowledge: Knowledge,
    /// Number of workers.
    pub workers: u32,
    /// Number of ranks per worker.
    pub dp_size: u32,
    /// Mean rate of an open loop in requests per second; none in the closed loop.
    #[serde(default)]
    pub rate: Option<NonZeroU32>,
    /// Number of concurrent clients of the closed loop; 0 in the open loop.
    pub clients: usize,
    /// Whether clients yield to each other after each request.
    pub take_turns: bool,
    /// Number of runtime threads. The router's own threads are additional and count too.
    pub threads: usize,
    /// Number of requests in flight.
    pub inflight: usize,
    /// Tokens per block.
    pub block_size: u32,
    /// Number of blocks in the cache of one rank.
    pub kv_blocks: usize,
    /// Requested number of index shards; the router's default if none.
    pub shards: Option<u32>,
    /// Seed of the router and of a generated workload.
    pub seed: u64,
    /// Number of requests between injected crashes; none without crashes.
    pub kill_every: Option<NonZeroU32>,
}

/// Percentiles of a latency distribution in µs, accurate to 0.1 %.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Percentiles {
    /// Median.
    pub p50: f64,
    /// 99th percentile.
    pub p99: f64,
    /// 99.9th percentile.
    pub p999: f64,
}

impl Report {
    /// Creates the report of `outcome`, a run of `target` with `options`.
    #[must_use]
    pub fn new(target: &str, options: &Replay, outcome: &Outcome) -> Self {
        let requests = outcome.requests as f64;
        let us_per_request = |time: Duration| time.as_secs_f64() * 1e6 / requests;
        let percentile = |quantile| outcome.route_ns.value_at_quantile(quantile) as f64 / 1e3;
        let common = &options.common;
        Self {
            target: target.to_owned(),
            requests_per_second: requests / outcome.wall.as_secs_f64(),
            router_cpu_us_per_request: us_per_request(outcome.router_cpu),
            engine_cpu_us_per_request: us_per_request(outcome.engine_cpu),
            route_us: Percentiles { p50: percentile(0.5), p99: percentile(0.99), p999: percentile(0.999) },
            event_blocks_per_request: outcome.event_blocks as f64 / requests,
            hit_rate: outcome.cached_blocks as f64 / outcome.prompt_blocks.max(1) as f64,
            load_max_over_mean: outcome.load_max_over_mean,
            rss_bytes: outcome.rss_bytes,
            rss_before_bytes: outcome.rss_before_bytes,
            requests: outcome.requests,
            policy: common.policy,
            knowledge: common.knowledge,
            workers: options.workers,
            dp_size: common.dp_size,
            rate: options.rate,
            clients: if options.rate.is_some() { 0 } else { options.clients },
            take_turns: common.take_turns,
            threads: options.threads,
            inflight: common.inflight,
            block_size: common.block_size.get(),
            kv_blocks: common.kv_blocks,
            shards: common.shards,
            seed: common.seed,
            kill_every: options.kill_every,
        }
    }

    /// Writes the report as one line of JSON or as text.
    ///
    /// # Errors
    /// `out` fails.
    pub fn write(&self, out: impl Write, json: bool) -> io::Result<()> {
        if json { self.write_json(out) } else { self.write_text(out) }
    }

    /// Source of the requests: clients or a rate.
    fn source(&self) -> String {
        match self.rate {
            Some(rate) => format!("{rate} requests a second"),
            None => format!("{} clients{}", self.clients, if self.take_turns { " in turn" } else { "" }),
        }
    }

    /// Writes the report as one line of JSON.
    ///
    /// # Errors
    /// `out` fails.
    pub fn write_json(&self, mut out: impl Write) -> io::Result<()> {
        serde_json::to_writer(&mut out, self)?;
        writeln!(out)
    }

    /// Writes the report as text.
    ///
    /// # Errors
    /// `out` fails.
    pub fn write_text(&self, mut out: impl Write) -> io::Result<()> {
        let Percentiles { p50, p99, p999 } = self.route_us;
        let mib = |bytes: Option<u64>| bytes.map_or("unknown".to_owned(), |bytes| format!("{} MiB", bytes >> 20));
        writeln!(
            out,
            "{}, policy {}: {} workers of {} ranks, {}, {} threads, {} in flight, {} requests measured",
            self.target,
            policy_name(self.policy),
            self.workers,
            self.dp_size,
            self.source(),
            self.threads,
            self.inflight,
            self.requests
        )?;
        writeln!(out, "  router CPU     {:>10.1} µs a request", self.router_cpu_us_per_request)?;
        writeln!(out, "  route          {p50:>10.1} µs p50, {p99:.1} p99, {p999:.1} p99.9")?;
        writeln!(out, "  throughput     {:>10.0} requests a second", self.requests_per_second)?;
        writeln!(out, "  hit rate       {:>10.3} of prompt blocks", self.hit_rate)?;
        writeln!(out, "  load           {:>10.2} max over mean", self.load_max_over_mean)?;
        writeln!(out, "  event blocks   {:>10.1} a request", self.event_blocks_per_request)?;
        writeln!(out, "  engines' CPU   {:>10.1} µs a request, not the router's", self.engine_cpu_us_per_request)?;
        writeln!(
            out,
            "  resident       {:>10}, of it {} before the router",
            mib(self.rss_bytes),
            mib(self.rss_before_bytes)
        )
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use hdrhistogram::Histogram;
    use serde_json::Value;

    use super::*;

    #[derive(Parser)]
    struct Arguments {
        #[command(flatten)]
        replay: Replay,
    }

    fn report() -> Report {
        let mut route_ns = Histogram::new_with_bounds(1, 60_000_000_000, 3).expect("bounds");
        for us in 1..=1_000_u64 {
            route_ns.record(us * 1_000).expect("within bounds");
        }
        let outcome = Outcome {
            requests: 1_000,
            wall: Duration::from_millis(500),
            router_cpu: Duration::from_millis(40),
            engine_cpu: Duration::from_millis(20),
            route_ns,
            prompt_blocks: 190_000,
            cached_blocks: 57_000,
            event_blocks: 250_000,
            load_max_over_mean: 1.5,
            rss_bytes: Some(1 << 30),
            rss_before_bytes: None,
        };
        let arguments = Arguments::parse_from(["test", "--workers", "8", "--seed", "7"]);
        Report::new("pointsman", &arguments.replay, &outcome)
    }

    #[test]
    fn figures_are_per_request_and_percentiles_in_microseconds() {
        let report = report();
        assert_eq!(report.requests_per_second, 2_000.0);
        assert_eq!(report.router_cpu_us_per_request, 40.0);
        assert_eq!((report.hit_rate, report.event_blocks_per_request), (0.3, 250.0));
        for (found, exact) in
            [(report.route_us.p50, 500.0), (report.route_us.p99, 990.0), (report.route_us.p999, 999.0)]
        {
            assert!((found / exact - 1.0).abs() < 0.002, "{found} for {exact}");
        }
    }

    #[test]
    fn json_is_one_line_with_all_documented_keys() {
        let mut line = Vec::new();
        report().write_json(&mut line).expect("written");
        let line = String::from_utf8(line).expect("text");
        assert_eq!(line.matches('\n').count(), 1);
        let json: Value = serde_json::from_str(&line).expect("json");
        for key in [
            "requests_per_second",
            "router_cpu_us_per_request",
            "event_blocks_per_request",
            "hit_rate",
            "load_max_over_mean",
            "rss_bytes",
            "workers",
            "seed",
        ] {
            assert!(json[key].is_number(), "{key}: {line}");
        }
        assert_eq!(json["policy"], "latency");
        assert_eq!(json["take_turns"], false);
        for key in ["p50", "p99", "p999"] {
            assert!(json["route_us"][key].is_f64(), "{key}: {line}");
        }
        assert_eq!(serde_json::from_str::<Report>(&line).expect("reads back"), report());
    }
}
