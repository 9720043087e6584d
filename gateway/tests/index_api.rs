//! The served index: overlaps, projected loads and dumps for other routers.

use std::path::PathBuf;

use pointsman::hashing::{HashScheme, HashedPrompt};
use pointsman::internals::hashing::{BlockHasher, MmBlocks};
use pointsman::protocol::{
    EngineHash, KvEvent, RouterEvent, StorageTier, StoredBlock, WorkerConfig, WorkerId, WorkerRank,
};
use pointsman::{Snapshot, internals::snapshot::SnapshotLayout};
use pointsman_gateway::app::Gateway;
use pointsman_trial::mock::{MockConfig, MockEngine};
use serde_json::{Value, json};

use crate::common::admin::{ALIAS, AdminClient, MODEL, TOKEN, file, settings};
use crate::common::proxy::{published, until};

const INDEX_TOKEN: &str = "index-0123456789ab";

/// A prompt of three blocks of four tokens and a part of one.
const PROMPT: [u32; 13] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13];

fn block_hashes(tokens: &[u32]) -> HashedPrompt {
    let scheme = HashScheme::new(4.try_into().expect("not zero"));
    HashedPrompt::from_tokens(&BlockHasher::new(scheme), tokens, &MmBlocks::NONE)
}

/// A gateway with two workers. Worker 1 holds two blocks of the prompt on the device and one in host memory.
async fn start() -> AdminClient {
    let client = AdminClient::with(with_index_token()).await;
    let router = client.router();
    for worker in [1, 2] {
        let config = WorkerConfig::at(format!("http://127.0.0.1:{worker}"));
        router.upsert_worker(WorkerId(worker), config).await.expect("valid");
    }
    let hashed = block_hashes(&PROMPT);
    let names = hashed.sequence_hashes().iter().map(|hash| EngineHash(hash.0)).collect::<Vec<_>>();
    let block = |n: usize| StoredBlock { engine_hash: names[n], block_hash: hashed.block_hashes()[n] };
    let event = |tier, parent, blocks| RouterEvent {
        rank: WorkerRank::new(WorkerId(1), 0),
        tier,
        data: KvEvent::Stored { parent, blocks },
    };
    let events = vec![
        event(StorageTier::Device, None, vec![block(0), block(1)]),
        event(StorageTier::HostPinned, Some(names[1]), vec![block(2)]),
    ];
    router.apply_events(events).await.expect("up");
    router.flush().await.expect("up");
    client
}

fn with_index_token() -> pointsman_gateway::settings::Settings {
    let mut settings = settings();
    let admin = settings.admin.as_mut().expect("enabled");
    admin.index_token_file = Some(file(format!("{INDEX_TOKEN}\n").as_bytes()));
    settings
}

async fn post(client: &AdminClient, path: &str, body: &Value) -> (u16, Value) {
    let token = format!("authorization: Bearer {INDEX_TOKEN}");
    let answer = client.send_with_headers("POST", path, &body.to_string(), &[&token]).await;
    (answer.status, answer.json())
}

#[tokio::test]
async fn overlaps_are_reported_per_rank_and_tier() {
    let client = start().await;
    let hashes: Vec<u64> = block_hashes(&PROMPT).block_hashes().iter().map(|hash| hash.0).collect();
    let bodies = [
        json!({ "model": MODEL, "tokens": PROMPT }),
        json!({ "model": ALIAS, "block_hashes": hashes }),
        json!({ "model": MODEL, "block_hashes": hashes, "prompt_tokens": 13 }),
    ];
    for (body, tokens) in bodies.iter().zip([13, 12, 13]) {
        let (status, answer) = post(&client, "/v1/index/overlaps", body).await;
        assert_eq!(status, 200, "{answer}");
        assert_eq!((answer["block_size"].as_u64(), answer["tokens"].as_u64()), (Some(4), Some(tokens)));
        assert_eq!(answer["hash"], json!({ "scheme": "xxh3-64", "seed": 1337, "is_eagle": false }));
        let ranks = answer["ranks"].as_array().expect("ranks");
        assert_eq!(ranks[0]["rank"], json!({ "worker": "1", "rank": 0 }));
        let blocks = |rank: &Value| {
            ["device_blocks", "host_pinned_blocks", "disk_blocks"].map(|field| rank[field].as_u64().expect("a number"))
        };
        assert_eq!((blocks(&ranks[0]), blocks(&ranks[1])), ([2, 3, 3], [0, 0, 0]), "{body}");
    }
    // Another salt has other hashes.
    let (_, answer) =
        post(&client, "/v1/index/overlaps", &json!({ "model": MODEL, "tokens": PROMPT, "cache_salt": "s" })).await;
    assert_eq!(answer["ranks"][0]["disk_blocks"], 0);
}

#[tokio::test]
async fn loads_include_the_prompt_and_book_nothing() {
    let client = start().await;
    let load = async |body: Value| {
        let (status, answer) = post(&client, "/v1/index/loads", &body).await;
        assert_eq!(status, 200, "{answer}");
        let ranks = answer["ranks"].as_array().expect("ranks").clone();
        let fields = ["potential_prefill_tokens", "potential_decode_blocks", "active_requests"];
        ranks.iter().map(|rank| fields.map(|field| rank[field].as_u64().expect("a number"))).collect::<Vec<_>>()
    };
    assert_eq!(load(json!({ "model": MODEL })).await, [[0, 0, 0]; 2]);
    assert_eq!(load(json!({ "model": MODEL, "prompt_tokens": 40 })).await, [[40, 10, 0]; 2]);
    let with_prompt = load(json!({ "model": MODEL, "tokens": PROMPT })).await;
    assert!(with_prompt[0][0] < with_prompt[1][0] && with_prompt[1][0] == 13, "{with_prompt:?}");
    assert_eq!(client.router().health().leases, 0);
}

#[tokio::test]
async fn invalid_queries_name_the_rule() {
    let client = start().await;
    for (path, body, code, rule) in [
        ("overlaps", json!({ "model": MODEL }), "invalid_prompt", "one of tokens, prompt and block_hashes"),
        ("overlaps", json!({ "model": MODEL, "tokens": [1], "prompt": "a" }), "invalid_prompt", "one of tokens"),
        ("overlaps", json!({ "model": MODEL, "tokens": [1], "prompt_tokens": 1 }), "invalid_prompt", "must be absent"),
        ("overlaps", json!({ "model": MODEL, "block_hashes": [1], "cache_salt": "s" }), "invalid_prompt", "include"),
        (
            "overlaps",
            json!({ "model": MODEL, "block_hashes": [1], "prompt_tokens": 3 }),
            "invalid_prompt",
            "at least 4",
        ),
        ("overlaps", json!({ "model": MODEL, "token": [1] }), "invalid_json", "unknown field `token`"),
        ("overlaps", json!({ "tokens": [1] }), "invalid_json", "missing field `model`"),
        ("loads", json!({ "model": "other" }), "model_not_found", "unknown model"),
        ("loads", json!({ "model": MODEL, "tokens": [1], "block_hashes": [1] }), "invalid_prompt", "one of tokens"),
        ("overlaps?model=m", json!({}), "unknown_query", "does not accept a query"),
    ] {
        let (status, answer) = post(&client, &format!("/v1/index/{path}"), &body).await;
        let error = &answer["error"];
        assert!(status >= 400 && error["code"] == code, "{body}: {answer}");
        assert!(error["message"].as_str().expect("text").contains(rule), "{body}: {answer}");
    }
}

#[tokio::test]
async fn the_token_of_the_index_opens_the_index_only() {
    let client = start().await;
    let body = json!({ "model": MODEL }).to_string();
    let status = async |method: &str, path: &str, token: &str| {
        let token = format!("authorization: Bearer {token}");
        client.send_with_headers(method, path, &body, &[&token]).await.status
    };
    assert_eq!(status("POST", "/v1/index/loads", INDEX_TOKEN).await, 200);
    assert_eq!(status("POST", "/v1/index/loads", TOKEN).await, 200);
    assert_eq!(status("POST", "/v1/index/loads", "another-0123456789").await, 401);
    for path in ["/admin/models", "/metrics", "/ready", "/v1/indexes", "/v1/index"] {
        assert_eq!(status("GET", path, INDEX_TOKEN).await, 401, "{path}");
    }
    assert_eq!(status("GET", "/v1/index/loads", INDEX_TOKEN).await, 405);
    assert_eq!(status("GET", "/v1/index/events", INDEX_TOKEN).await, 404);
    // Without a token file the token of operators alone opens it.
    let without = AdminClient::start().await;
    let token = format!("authorization: Bearer {INDEX_TOKEN}");
    assert_eq!(without.send_with_headers("POST", "/v1/index/loads", &body, &[&token]).await.status, 401);
    assert_eq!(without.send("POST", "/v1/index/loads", &body).await.status, 200);
    // A missing file is a start error.
    let mut missing = settings();
    missing.admin.as_mut().expect("enabled").index_token_file = Some(PathBuf::from("/nonexistent/token"));
    let error = Gateway::start(missing).await.err().expect("refused").to_string();
    assert!(error.contains("/nonexistent/token"), "{error}");
}

#[tokio::test]
async fn dumps_are_snapshots_or_events_of_all_ranks_or_one() {
    let client = AdminClient::with(with_index_token()).await;
    let router = client.router();
    let config = MockConfig { block_size: 4, time_scale: 0.0, data_parallel_size: 2, ..MockConfig::default() };
    let engine = MockEngine::start(config).await.expect("the engine starts");
    let config = WorkerConfig { data_parallel_size: 2, ..published(&engine) };
    router.upsert_worker(WorkerId(7), config).await.expect("valid");
    for n in 0..6_u32 {
        let prompt: Vec<u32> = (0..20).map(|token| 100 * (n + 1) + token).collect();
        let body = json!({ "model": ALIAS, "prompt": prompt, "max_tokens": 1 }).to_string();
        let answer = client.send_as_client("/v1/completions", &body).await;
        assert_eq!(answer.status, 200, "{}", String::from_utf8_lossy(&answer.body));
    }
    let has_all = |rank: u16| {
        let sources = router.kv_sources();
        let applied = sources[usize::from(rank)].applied.map_or(0, |applied| applied + 1);
        applied > 0 && applied == engine.sequence_next(rank)
    };
    until("all events applied", || has_all(0) && has_all(1)).await;
    router.flush().await.expect("up");

    let path = "/v1/index/dump?model=mock";
    let all = client.send("GET", path, "").await;
    assert_eq!(all.status, 200, "{}", String::from_utf8_lossy(&all.body));
    let snapshot = Snapshot::decode(&all.body).expect("a snapshot");
    snapshot.check_layout(&SnapshotLayout::of(router.config(), router.block_size())).expect("its layout");
    assert_eq!(snapshot.ranks.len(), 2);
    assert!(all.head.contains("x-snapshot-ranks: 2"), "{}", all.head);
    assert!(all.head.contains(&format!("x-dump-blocks: {}", snapshot.block_count())), "{}", all.head);
    for (n, rank) in (0..).zip(&snapshot.ranks) {
        assert_eq!((rank.rank, rank.position.next), (WorkerRank::new(WorkerId(7), n), engine.sequence_next(n as u16)));
        let one = client.send("GET", &format!("{path}&rank=7/{n}&format=snapshot"), "").await;
        let one = Snapshot::decode(&one.body).expect("a snapshot");
        assert_eq!(one.ranks, std::slice::from_ref(rank));
        let lines = client.send("GET", &format!("{path}&rank=7/{n}&format=events"), "").await.body;
        let lines = lines.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
        let events: Vec<RouterEvent> = lines.map(|line| serde_json::from_slice(line).expect("an event")).collect();
        assert_eq!(events, rank.events);
    }
    for (query, status, code) in [
        ("", 400, "invalid_query"),
        ("?model=mock&format=xml", 400, "invalid_query"),
        ("?model=mock&from=7", 400, "invalid_query"),
        ("?model=mock&rank=7", 400, "invalid_query"),
        ("?model=mock&rank=8/0", 404, "rank_not_found"),
        ("?model=other", 404, "model_not_found"),
    ] {
        let answer = client.send("GET", &format!("/v1/index/dump{query}"), "").await;
        assert_eq!((answer.status, answer.code().as_str()), (status, code), "{query}");
    }
    engine.shutdown().await;
}
