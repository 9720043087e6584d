//! Report of a replay: one flat object.

use std::io::{self, Write};
use std::ops::Deref;

use serde::{Deserialize, Serialize};

use super::Replay;
use crate::results::write_figures;

/// Figures of the measured half of one run, with the arguments of the run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Name of the router.
    pub target: String,
    /// The figures.
    #[serde(flatten)]
    pub figures: Figures,
    /// Arguments of the run. The number of clients is 0 in an open loop.
    #[serde(flatten)]
    pub options: Replay,
}

/// Figures of the measured half.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Figures {
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
    /// In-flight requests of the most loaded rank divided by the mean, averaged over samples. 1 is even.
    pub load_max_over_mean: f64,
    /// Resident memory at the end: router, workload and simulated caches. None if the system does not report it.
    pub rss_bytes: Option<u64>,
    /// Resident memory before the router started: mostly the workload.
    pub rss_before_bytes: Option<u64>,
    /// Number of measured requests, equal to the number of warm-up requests or one more.
    pub requests: usize,
}

/// Percentiles of a latency distribution in µs, accurate to 0.1 %.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Percentiles {
    /// Median.
    pub p50: f64,
    /// 99th percentile.
    pub p99: f64,
    /// 99.9th percentile.
    pub p999: f64,
}

impl Deref for Report {
    type Target = Figures;

    fn deref(&self) -> &Figures {
        &self.figures
    }
}

impl Report {
    /// Writes the report as one line of JSON or as text.
    ///
    /// # Errors
    /// `out` fails.
    pub fn write(&self, out: impl Write, json: bool) -> io::Result<()> {
        write_figures(out, self, json)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use serde_json::Value;

    use super::*;

    #[derive(Parser)]
    struct Arguments {
        #[command(flatten)]
        replay: Replay,
    }

    #[test]
    fn json_is_one_line_with_all_documented_keys() {
        let figures = Figures {
            requests_per_second: 2_000.0,
            router_cpu_us_per_request: 40.5,
            engine_cpu_us_per_request: 20.5,
            route_us: Percentiles { p50: 500.25, p99: 990.5, p999: 999.5 },
            event_blocks_per_request: 250.0,
            hit_rate: 0.3,
            load_max_over_mean: 1.5,
            rss_bytes: Some(1 << 30),
            rss_before_bytes: None,
            requests: 1_000,
        };
        let options = Arguments::parse_from(["test", "--workers", "8", "--seed", "7"]).replay;
        let report = Report { target: "pointsman".to_owned(), figures, options };
        let mut line = Vec::new();
        report.write(&mut line, true).expect("written");
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
        assert_eq!((&json["policy"], &json["take_turns"]), (&"latency".into(), &false.into()));
        for key in ["p50", "p99", "p999"] {
            assert!(json["route_us"][key].is_f64(), "{key}: {line}");
        }
        assert_eq!(serde_json::from_str::<Report>(&line).expect("reads back"), report);
    }
}
