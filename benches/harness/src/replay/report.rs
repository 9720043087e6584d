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
    /// Resident memory after the warm-up.
    pub rss_warm_bytes: Option<u64>,
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
