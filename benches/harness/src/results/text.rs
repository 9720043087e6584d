//! Text form of a summary. Figures without measurements are marked as unknown.

use std::io::{self, Write};

use super::{Distribution, Summary};

impl Summary {
    /// Writes the summary as text, without its warnings: [`super::Reporting`] writes them separately.
    ///
    /// # Errors
    /// `out` fails.
    pub fn write_text(&self, mut out: impl Write) -> io::Result<()> {
        let Self { policy, workload, workers, dp_size, seed, requests, warmup_requests, answered, .. } = self;
        let fleet = if *workers > 0 { format!("{workers} workers of {dp_size} ranks") } else { "unknown fleet".into() };
        writeln!(
            out,
            "{policy} on {workload}: {fleet}, seed {seed}, {requests} requests after {warmup_requests} to warm"
        )?;
        for (name, times) in [
            ("first token", self.ttft_seconds),
            ("per token", self.itl_seconds),
            ("token gaps", self.token_gap_seconds),
            ("end to end", self.e2e_seconds),
            ("in the router", self.queue_seconds),
            ("regret", self.regret_seconds),
        ] {
            writeln!(out, "  {name:<15}{}", times.map_or_else(|| "       not known".to_owned(), latencies))?;
        }
        writeln!(
            out,
            "                 regret: time to first token beyond that of the best rank for this request alone"
        )?;
        writeln!(out, "  throughput     {}", self.throughput())?;
        writeln!(
            out,
            "  hit rate       {:>10} of prompt tokens, {} reachable",
            percent(self.hit_rate),
            percent(self.reachable_hit_rate)
        )?;
        if let Some(error) = self.predicted_ttft_error {
            writeln!(
                out,
                "  predicted      {:>10} off the first token's time on average, bias {}, over {} requests",
                error.mean_absolute_relative.map_or_else(|| time(error.mean_absolute_seconds), |of| percent(Some(of))),
                time(error.bias_seconds),
                error.count
            )?;
        }
        let spread = self.load_max_over_mean.map_or_else(|| "not known".to_owned(), |spread| format!("{spread:.2}"));
        writeln!(
            out,
            "  load           {spread:>10} max over mean: work of the busiest rank to that of the mean rank, 1 is even"
        )?;
        if let Some(preemptions @ 1..) = self.preemptions {
            writeln!(out, "  preempted      {preemptions:>10} times")?;
        }
        if answered < requests {
            let reasons: Vec<_> = self.failures.iter().map(|(reason, count)| format!("{count} × {reason}")).collect();
            writeln!(out, "  failed         {:>10}: {}", requests - answered, reasons.join("; "))?;
        }
        Ok(())
    }

    fn throughput(&self) -> String {
        format!(
            "{:>10.2} requests and {:.0} tokens a second over {:.1} s",
            self.requests_per_second, self.output_tokens_per_second, self.duration_seconds
        )
    }
}

fn latencies(times: Distribution) -> String {
    let Distribution { mean, p50, p90, p99, .. } = times;
    format!("{:>10} mean, {} p50, {} p90, {} p99", time(mean), time(p50), time(p90), time(p99))
}

/// Formats seconds with a suitable unit.
pub(crate) fn time(seconds: f64) -> String {
    let ms = seconds * 1e3;
    if ms.abs() >= 1_000.0 { format!("{seconds:.2} s") } else { format!("{ms:.1} ms") }
}

/// Formats a share as a percentage.
pub(crate) fn percent(share: Option<f64>) -> String {
    share.map_or_else(|| "not known".to_owned(), |share| format!("{:.1} %", share * 100.0))
}
