//! Dialects of engines with offloading, several cache groups and sleep, under random traffic: the index equals the caches
//! of the engines per tier and namespace, and no tenant sees the blocks of another.
//!
//! `DIALECT_EVENTS` sets the number of events of each dialect.

use std::collections::BTreeSet;

use pointsman::protocol::{BlockHash, KvEvent, RouterEvent, WorkerId};
use pointsman::{Prompt, RequestOptions, RouteRequest};
use pointsman_trial::mock::{Dialect, MockConfig, MockEngine, Tier};
use serde_json::{Value, json};

use crate::common::admin::{ALIAS, AdminClient, MODEL, settings};
use crate::common::fleet::Fleet;
use crate::common::proxy::{published, request, until};
use crate::common::workload::{BLOCK_SIZE, block_hashes_of};
use crate::engines::Account;

/// Events of a plain `cargo test`.
const EVENTS: u64 = 2_000;

#[expect(clippy::disallowed_methods, reason = "test effort is not router configuration")]
fn events_min() -> u64 {
    std::env::var("DIALECT_EVENTS").ok().and_then(|events| events.parse().ok()).unwrap_or(EVENTS)
}

/// Random traffic on two engines of this dialect, with cleared caches and, if it has a connector, sleep in between.
async fn stays_exact(dialect: Dialect, page_size: u32) {
    let mut fleet = Fleet::start_with(&[dialect.into(); 2], page_size).await;
    let mut account = Account::default();
    for round in 0_u8.. {
        fleet.traffic(150).end().await;
        account.quiet_point(&mut fleet, &format!("{dialect:?}, round {round}")).await;
        if fleet.events() >= events_min() {
            break;
        }
        match round % 4 {
            1 => fleet.reset_caches().await,
            3 | 0 if dialect.has_connector() => fleet.sleep(usize::from(round % 2), 1 + round / 4 % 2).await,
            _ => {}
        }
    }
    let Account { salted_overlaps, probes, as_predicted, hits } = account;
    assert!(salted_overlaps > 0 || dialect.beside_window_blocks() > 0);
    assert!(hits > 0 && as_predicted == probes);
}

macro_rules! exact {
    ($($name:ident: $dialect:ident, $page_size:expr;)+) => {$(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $name() {
            stays_exact(Dialect::$dialect, $page_size).await;
        }
    )+};
}

exact! {
    offloaded_names_stay_exact: VllmOffloading, BLOCK_SIZE;
    self_describing_copies_stay_exact: VllmSelfDescribing, BLOCK_SIZE;
    copies_in_mooncakes_store_stay_exact: VllmMooncake, BLOCK_SIZE;
    chunks_of_lmcache_change_nothing: VllmLmcache, BLOCK_SIZE;
    sliding_windows_stay_exact: VllmWindow, BLOCK_SIZE;
    mamba_states_stay_exact: VllmMamba, BLOCK_SIZE;
    pages_of_one_token_are_folded_exactly: SglangMap, 1;
}

const PROMPTS: u32 = 12;

fn prompt(n: u32) -> Vec<u32> {
    (0..41).map(|token| 1_000 * n + token).collect()
}

/// What a tenant sees of a prompt: the responses of the index, the explanation, and the cached blocks of a placement.
async fn seen(client: &AdminClient, tokens: &[u32], salt: Option<&str>) -> (Vec<Value>, u32) {
    let mut answers = Vec::new();
    for path in ["/v1/index/overlaps", "/v1/index/loads", "/admin/models/mock/overlap", "/admin/models/mock/explain"] {
        let mut body = json!({ "tokens": tokens, "cache_salt": salt });
        if path.starts_with("/v1") {
            body["model"] = MODEL.into();
        }
        let answer = client.send("POST", path, &body.to_string()).await;
        assert_eq!(answer.status, 200, "{path}: {}", String::from_utf8_lossy(&answer.body));
        let mut answer = answer.json();
        // Costs and ages change with time.
        if let Some(rank) = answer.pointer_mut("/explanation/ranks/0") {
            *rank = json!([rank["cached_tokens"], rank["overlap"]]);
            answer["explanation"]["request"].take();
        }
        answers.push(answer);
    }
    let options = RequestOptions { cache_salt: salt.map(Into::into), ..RequestOptions::default() };
    let request = RouteRequest { options, ..RouteRequest::new("query", Prompt::Tokens(tokens)) };
    (answers, client.router().route(request).await.expect("a placement").overlap().total_blocks())
}

fn block_hashes(salt: Option<&str>) -> BTreeSet<BlockHash> {
    let of = |n| block_hashes_of(4, &prompt(n), None, salt);
    (0..PROMPTS).flat_map(of).collect()
}

/// Checks that tenant `a` sees its blocks and nobody else does.
async fn assert_separate(client: &AdminClient, when: &str) {
    client.router().flush().await.expect("up");
    let mut seen_by_owner = 0;
    for n in 0..PROMPTS {
        seen_by_owner += seen(client, &prompt(n), Some("a")).await.1;
        for salt in [None, Some("b")] {
            let unknown = seen(client, &prompt(PROMPTS + n), salt).await;
            assert_eq!(seen(client, &prompt(n), salt).await, unknown, "{when}: {salt:?} sees prompt {n}");
            assert_eq!(unknown.1, 0);
        }
    }
    assert!(seen_by_owner > 0, "{when}: the tenant sees nothing");
    let dump = client.send("GET", "/v1/index/dump?model=mock&format=events", "").await.body;
    let lines = dump.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    let events = lines.map(|line| serde_json::from_slice::<RouterEvent>(line).expect("an event"));
    let dumped: BTreeSet<BlockHash> = events
        .flat_map(|event| match event.data {
            KvEvent::Stored { blocks, .. } => blocks.into_iter().map(|block| block.block_hash).collect(),
            KvEvent::Offloaded { blocks, .. } => blocks.into_iter().filter_map(|(_, hash)| hash).collect::<Vec<_>>(),
            _ => Vec::new(),
        })
        .collect();
    assert!(!dumped.is_empty() && dumped.is_subset(&block_hashes(Some("a"))), "{when}");
    assert!([None, Some("b")].iter().all(|salt| dumped.is_disjoint(&block_hashes(*salt))));
}

#[tokio::test]
async fn nobody_else_sees_the_offloaded_blocks_of_a_salted_tenant() {
    use Dialect::{VllmLmcache, VllmMooncake, VllmOffloading, VllmSelfDescribing};
    for dialect in [VllmOffloading, VllmSelfDescribing, VllmMooncake, VllmLmcache] {
        let client = AdminClient::with(settings()).await;
        let config = MockConfig { dialect, block_size: 4, kv_blocks: 66, host_kv_blocks: 200, ..MockConfig::default() };
        let engine = MockEngine::start(MockConfig { time_scale: 0.0, ..config }).await.expect("the engine starts");
        client.router().upsert_worker(WorkerId(7), published(&engine)).await.expect("valid");
        for n in 0..PROMPTS {
            let body = json!({ "model": ALIAS, "prompt": prompt(n), "max_tokens": 1, "cache_salt": "a" }).to_string();
            assert_eq!(client.send_as_client("/v1/completions", &body).await.status, 200);
        }
        let applied = || client.router().kv_sources()[0].applied.map_or(0, |applied| applied + 1);
        until("all events applied", || engine.is_quiet() && applied() == engine.sequence_next(0)).await;
        let (device, host) = (engine.held(0, Tier::Device).len(), engine.held(0, Tier::Host).len());
        assert!(device < 66 && (host == 120 || dialect == VllmLmcache), "{dialect:?}: {device}, {host}");
        assert_separate(&client, &format!("{dialect:?}")).await;
        if host > 0 {
            assert_eq!(request(engine.address(), "POST", "/reset_prefix_cache", "", b"").await.status, 200);
            until("the clear applied", || engine.is_quiet() && applied() == engine.sequence_next(0)).await;
            assert_separate(&client, &format!("{dialect:?}, host only")).await;
        }
        engine.shutdown().await;
    }
}
