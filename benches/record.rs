//! Instructions of the flight recorder and of shadow policies, for callgrind.
//!
//! Runs a number of decisions of the scheduler alone (`decide`, as in `select.rs`) or of whole requests (`route`, as in
//! `route.rs`, with hashed prompts) and prints nothing but the bytes of records. The instructions of one request are the
//! difference of two runs with different numbers of requests, divided by the difference of these numbers:
//!
//! ```console
//! $ valgrind --tool=callgrind target/dist/deps/record-... decide 512 latency on none 2000
//! ```
//!
//! Arguments: `decide` or `route`, ranks, policy, recorder `on` or `off`, shadow policies joined by commas or `none`,
//! and the number of requests. Shadows decide every request.

use std::error::Error;

use pointsman::RouterConfig;
use pointsman::internals::config::{RecorderConfig, ShadowConfig};
use pointsman::policy::PolicyConfig;
use pointsman::{RouteRequest, Router};
use tokio::runtime::Builder;

#[allow(dead_code, reason = "other benchmarks use the rest")]
#[path = "common/routed.rs"]
mod routed;
#[allow(dead_code, reason = "other benchmarks use the rest")]
#[path = "common/still.rs"]
mod still;

use routed::{Prompts, busy};
use still::Still;

fn main() -> Result<(), Box<dyn Error>> {
    let given: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let [part, ranks, policy, recorder, shadows, requests] = &given[..] else {
        return Ok(()); // run by `cargo bench` or `cargo test`, without arguments
    };
    let (ranks, requests): (u32, u64) = (ranks.parse()?, requests.parse()?);
    let of = |name: &str| serde_json::from_value::<PolicyConfig>(name.into());
    let shadows = shadows.split(',').filter(|name| *name != "none").map(of);
    let bytes_max = if recorder == "on" { RecorderConfig::default().bytes_max } else { 0 };
    let config = RouterConfig {
        policy: of(policy)?,
        recorder: RecorderConfig { bytes_max, ..RecorderConfig::default() },
        shadow: ShadowConfig { policies: shadows.collect::<Result<_, _>>()?, share: 1.0 },
        ..RouterConfig::default()
    };
    match part.as_str() {
        "decide" => decide(config, ranks, requests),
        "route" => route(config, ranks, requests)?,
        other => return Err(format!("part {other}, must be decide or route").into()),
    }
    Ok(())
}

fn decide(config: RouterConfig, ranks: u32, requests: u64) {
    let mut still = Still::new(config.clone(), ranks as usize);
    if config.recorder.bytes_max > 0 {
        still.record(&config);
    }
    for _ in 0..requests {
        still.decide();
    }
    eprintln!("{} bytes recorded in {} decisions", still.recorded_bytes(), still.requests);
}

fn route(config: RouterConfig, ranks: u32, requests: u64) -> Result<(), Box<dyn Error>> {
    let runtime = Builder::new_current_thread().enable_time().build()?;
    let prompts = Prompts::new();
    runtime.block_on(async {
        let (router, active): (Router, _) = busy(ranks, config).await;
        for request in 0..requests as usize {
            drop(router.route(RouteRequest::new("measured", prompts.hashed(request))).await?);
        }
        drop(active);
        Ok(())
    })
}
