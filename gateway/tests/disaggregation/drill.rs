//! Many requests of mixed lengths through both pools, while clients leave and engines restart: each request ends with
//! the right text or a named error, and nothing stays booked, held or running.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use pointsman_gateway::formats::handover::Protocol;
use pointsman_trial::mock::{MockConfig, MockEngine};
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::pools::{BLOCK_SIZE, Pools, Size, body, completion};
use super::{prompt, ranks};
use crate::common::proxy::{receive, request, send};

/// Requests per protocol, unless [`REQUESTS_VARIABLE`] has another number.
const REQUESTS: u64 = 160;
const REQUESTS_VARIABLE: &str = "HANDOVER_DRILL_REQUESTS";

/// Different prompts. Each of [`GROUPS`] shares its first blocks.
const PROMPTS: u32 = 60;
const GROUPS: u32 = 12;

/// Concurrent clients.
const CLIENTS: u64 = 24;

/// Requests between two restarts of an engine.
const RESTART_EVERY: u64 = 60;

/// One of so many clients leaves before the end of its response.
const LEAVES: u64 = 40;

#[expect(clippy::disallowed_methods, reason = "longer drills are started by hand")]
fn requests() -> u64 {
    std::env::var(REQUESTS_VARIABLE).ok().and_then(|given| given.parse().ok()).unwrap_or(REQUESTS)
}

/// A number that depends on `n` and `use_of` alone (SplitMix64 finalizer).
fn mixed(n: u64, use_of: u64) -> u64 {
    let x = n.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(use_of.wrapping_mul(0xD1B5_4A32_D192_ED03));
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// Prompt `n`: blocks of its group, then its own.
fn tokens(n: u32) -> Vec<u32> {
    let mut tokens = prompt(1_000 + n % GROUPS, 2 + n % 7);
    tokens.truncate((tokens.len() / BLOCK_SIZE as usize) * BLOCK_SIZE as usize);
    tokens.extend(prompt(2_000 + n, 1 + n % 13));
    tokens
}

fn output_tokens(n: u32) -> u32 {
    2 + n % 24
}

/// How requests ended.
#[derive(Default, Debug)]
struct Ends {
    complete: AtomicU64,
    left: AtomicU64,
    /// Error responses by code, and streams cut off by a restart.
    failed: std::sync::Mutex<BTreeMap<String, u64>>,
    cached_tokens: AtomicU64,
    remote: AtomicU64,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_request_ends_and_no_block_stays_held() {
    let expected = Arc::new(texts().await);
    for protocol in Protocol::ALL {
        drill(protocol, &expected).await;
    }
}

/// Texts of one engine that serves alone, by prompt.
async fn texts() -> Vec<String> {
    let config = MockConfig { block_size: BLOCK_SIZE, time_scale: 0.0, seed: 0, ..MockConfig::default() };
    let engine = MockEngine::start(config).await.expect("the engine starts");
    let mut texts = Vec::new();
    for n in 0..PROMPTS {
        let body = body(&tokens(n), output_tokens(n), false).to_string();
        texts.push(completion(&request(engine.address(), "POST", "/v1/completions", "", body.as_bytes()).await).0);
    }
    texts
}

async fn drill(protocol: Protocol, expected: &Arc<Vec<String>>) {
    let size = Size { prefills: 3, decodes: 3, ranks: ranks(protocol) };
    let configure = |config: &mut MockConfig| {
        config.time_scale = 20.0;
        config.block_lease_ms = 2_000;
    };
    let pools = Arc::new(Pools::start_with(protocol, size, configure, |_| {}).await);
    let (ends, next, total) = (Arc::new(Ends::default()), Arc::new(AtomicU64::new(0)), requests());
    let mut tasks = JoinSet::new();
    for _ in 0..CLIENTS {
        let (pools, ends, next, expected) =
            (Arc::clone(&pools), Arc::clone(&ends), Arc::clone(&next), Arc::clone(expected));
        tasks.spawn(async move {
            loop {
                let n = next.fetch_add(1, Ordering::Relaxed);
                if n >= total {
                    return;
                }
                one(&pools, &ends, &expected, n).await;
            }
        });
    }
    let mut restarts = 0;
    while !tasks.is_empty() {
        tokio::select! {
            biased;
            ended = tasks.join_next() => ended.expect("a client").expect("no panic"),
            () = sleep(Duration::from_millis(5)) => {}
        }
        let sent = next.load(Ordering::Relaxed);
        if sent / RESTART_EVERY > restarts && sent < total {
            restarts += 1;
            let engines = if restarts % 2 == 0 { &pools.prefills } else { &pools.decodes };
            let engine = &engines[usize::try_from(restarts / 2).expect("an index") % engines.len()];
            engine.restart(engine.config().events()).await.expect("restarts");
        }
    }
    pools.at_rest().await;
    // Blocks whose decode leg failed stay held until their lease ends.
    crate::common::proxy::until("all leases have ended", || Pools::sum(&pools.prefills, |sums| sums.holding_now) == 0)
        .await;

    let of = |counter: fn(&pointsman_trial::mock::HandoverCounters) -> u64| Pools::sum(&pools.prefills, counter);
    let (held, claimed) = (of(|sums| sums.blocks_held_total), of(|sums| sums.blocks_claimed_total));
    let (expired, lost) = (of(|sums| sums.blocks_expired_total), of(|sums| sums.blocks_lost_total));
    let failed = ends.failed.lock().expect("lock not poisoned").clone();
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    assert_eq!(count(&ends.complete) + count(&ends.left) + failed.values().sum::<u64>(), total, "{protocol}");
    assert_eq!(held, claimed + expired + lost, "{protocol}");
    assert!(count(&ends.complete) >= total * 9 / 10, "{protocol}: {ends:?}");
    assert!(count(&ends.cached_tokens) > 0 && count(&ends.remote) > 0, "{protocol}: {ends:?}");
    // A restart cuts off the streams of its rank. Every other failure has a name.
    assert!(failed.keys().all(|name| ["cut off", "worker_failed"].contains(&name.as_str())), "{protocol}: {failed:?}");
    assert!(restarts > 0 || failed.is_empty(), "{protocol}: {failed:?}");
}

async fn one(pools: &Pools, ends: &Ends, expected: &[String], n: u64) {
    let index = u32::try_from(mixed(n, 1) % u64::from(PROMPTS)).expect("an index");
    let is_stream = !mixed(n, 2).is_multiple_of(4);
    let tokens = tokens(index);
    let body = body(&tokens, output_tokens(index), is_stream).to_string();
    let stream = send(pools.gateway.address(), "POST", "/v1/completions", "", body.as_bytes()).await;
    if mixed(n, 3).is_multiple_of(LEAVES) {
        sleep(Duration::from_micros(mixed(n, 4) % 60_000)).await;
        drop(stream);
        ends.left.fetch_add(1, Ordering::Relaxed);
        return;
    }
    let fail = |name: &str| {
        *ends.failed.lock().expect("lock not poisoned").entry(name.to_owned()).or_default() += 1;
    };
    let Some(answer) = receive(stream).await else { return fail("cut off") };
    if !answer.is_whole || (answer.status == 200 && is_stream && !answer.text().ends_with("data: [DONE]\n\n")) {
        return fail("cut off");
    }
    if answer.status != 200 {
        let error = answer.json();
        let code = error["error"]["code"].as_str().map(str::to_owned);
        return fail(&code.unwrap_or_else(|| error["error"]["message"].to_string()));
    }
    let (text, cached) = completion(&answer);
    assert_eq!(text, expected[index as usize], "prompt {index}");
    ends.complete.fetch_add(1, Ordering::Relaxed);
    if answer.header("x-pointsman-prefill") == Some("remote") {
        ends.remote.fetch_add(1, Ordering::Relaxed);
    }
    ends.cached_tokens.fetch_add(cached.unwrap_or_default(), Ordering::Relaxed);
}
