//! Instructions of the flight recorder, of shadow policies and of folded KV events, for callgrind.
//!
//! Runs a number of decisions of the scheduler alone (`decide`: from request to Book, with prepared responses of the ranks
//! in `common/still.rs`) or of whole requests (`route`: hashed prompts, the fleet of `common/routed.rs`) and prints nothing
//! but the bytes of records. The instructions of one request are the difference of two runs with different numbers of
//! requests, divided by the difference of these numbers:
//!
//! ```console
//! $ valgrind --tool=callgrind target/dist/deps/record-... decide 512 latency on none 2000
//! ```
//!
//! Arguments: `decide` or `route`, ranks, policy, recorder `on` or `off`, shadow policies joined by commas or `none`,
//! and the number of requests. Shadows decide every request.
//!
//! `pages` decodes and applies stores and removals of pages of `ranks` tokens in blocks of `policy` tokens
//! (`--toggle-collect='*publish*'`), and hashes and queries the prompts (`'*ask*'`).

use std::error::Error;
use std::num::NonZeroU32;

use pointsman::RouterConfig;
use pointsman::hashing::{HashScheme, HashedPrompt};
use pointsman::internals::config::{RecorderConfig, ShadowConfig};
use pointsman::internals::index::{Index, Overlaps};
use pointsman::internals::protocol::{Generation, Slot};
use pointsman::internals::wire::{Decoder, DecoderLimits, WireConfig};
use pointsman::policy::PolicyConfig;
use pointsman::protocol::{WorkerId, WorkerRank};
use pointsman::{RouteRequest, Router};
use tokio::runtime::Builder;

#[allow(dead_code, reason = "tests use the rest")]
#[path = "../tests/common/msgpack.rs"]
mod msgpack;
#[path = "common/routed.rs"]
mod routed;
#[path = "common/still.rs"]
mod still;

use msgpack::{Msg, batch};
use routed::{Prompts, busy};
use still::Still;

fn main() -> Result<(), Box<dyn Error>> {
    let given: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let [part, ranks, policy, recorder, shadows, requests] = &given[..] else {
        return Ok(()); // run by `cargo bench` or `cargo test`, without arguments
    };
    let (ranks, requests): (u32, u64) = (ranks.parse()?, requests.parse()?);
    if part == "pages" {
        pages(ranks, policy.parse()?, requests);
        return Ok(());
    }
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
        other => return Err(format!("part {other}, must be decide, route or pages").into()),
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

/// Stores prompts of 1,024 tokens in pages of `page_size` tokens, removes each 64 prompts later, and queries the next.
fn pages(page_size: u32, block_size: NonZeroU32, prompts: u64) {
    let rank = WorkerRank::new(WorkerId(1), 0);
    let wire = WireConfig { rank, ranks: 0..1, block_size, is_eagle: false, limits: DecoderLimits::default() };
    let (mut decoder, mut index, mut overlaps) = (Decoder::new(wire), Index::new(), Overlaps::default());
    index.register(rank, Slot(0), Generation(1));
    let mut hits = 0;
    for prompt in 0..prompts {
        let name = move |prompt: u64, page: u64| (prompt << 32 | page).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let names = |prompt: u64| (0..u64::from(1024 / page_size)).map(move |page| name(prompt, page)).collect::<Msg>();
        let tokens: Vec<_> = (0..1024).map(|token| ((prompt * 7919 + token * 31) % 150_000) as u32).collect();
        let token_ids = tokens.iter().map(|token| u64::from(*token)).collect();
        let stored = ["BlockStored".into(), names(prompt), Msg::Nil, token_ids, u64::from(page_size).into()];
        let removed = prompt.checked_sub(64).map(|old| Msg::from(["BlockRemoved".into(), names(old)]));
        publish(&mut decoder, &mut index, &batch(removed.into_iter().chain([stored.into()])));
        hits += ask(&index, &mut overlaps, block_size, &tokens);
    }
    eprintln!("{hits} blocks found");
}

#[inline(never)]
fn publish(decoder: &mut Decoder, index: &mut Index, payload: &[u8]) {
    let mut events = Vec::new();
    decoder.decode(payload, &mut events);
    events.iter().for_each(|event| _ = index.apply(event));
}

#[inline(never)]
fn ask(index: &Index, overlaps: &mut Overlaps, block_size: NonZeroU32, tokens: &[u32]) -> u32 {
    let prompt = HashedPrompt::hash(HashScheme::new(block_size), tokens, &[]).expect("no images");
    index.overlaps(prompt.block_hashes(), overlaps);
    overlaps.hits().iter().map(|hit| hit.device_blocks).sum()
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
