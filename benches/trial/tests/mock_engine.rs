//! Tests of the mock engine over loopback sockets, from the view of clients and routers.

use std::collections::BTreeSet;

use pointsman_trial::mock::{Dialect, EventFormat, Fault, Faults, MockConfig, MockEngine, MockError, Tier, tokenize};
use serde_json::{Value as Json, json};
use tokio::io::AsyncReadExt;
use tokio::time::timeout;

use crate::common::{self, PATIENCE, Rebuilt, Subscriber, get, held, post, replay, replay_frames, request, send};

/// Configuration at full speed with blocks of four tokens.
fn fast() -> MockConfig {
    MockConfig { block_size: 4, kv_blocks: 65, time_scale: 0.0, ..MockConfig::default() }
}

async fn started(config: MockConfig) -> MockEngine {
    MockEngine::start(config).await.expect("the engine starts")
}

/// A prompt of token ids that are unique to `seed`.
fn prompt(seed: u32, tokens: u32) -> Vec<u32> {
    (0..tokens).map(|n| seed * 1_000 + n).collect()
}

/// Completes a prompt on a rank and returns the number of cached tokens.
async fn complete(engine: &MockEngine, rank: u16, tokens: &[u32], output_tokens: u32) -> u64 {
    let body = json!({ "prompt": tokens, "max_tokens": output_tokens });
    let header = format!("X-data-parallel-rank: {rank}\r\n");
    let answer = request(engine.address(), "POST", "/v1/completions", &header, &body.to_string()).await;
    let answer = answer.expect("a response");
    assert_eq!(answer.status, 200, "{answer:?}");
    cached(&answer.json())
}

fn cached(answer: &Json) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("the usage contains cached tokens")
}

async fn quiet(engine: &MockEngine) {
    timeout(PATIENCE, engine.quiet()).await.expect("the engine is idle before the timeout");
}

#[tokio::test]
async fn completions_report_exact_usage_and_cached_tokens() {
    let engine = started(fast()).await;
    let body = json!({ "model": "mock", "prompt": prompt(1, 13), "max_tokens": 5 });
    let first = post(&engine, "/v1/completions", &body).await;
    assert_eq!(first.status, 200, "{first:?}");
    let (first, second) = (first.json(), post(&engine, "/v1/completions", &body).await.json());
    assert_eq!(
        first["usage"],
        json!({ "prompt_tokens": 13, "completion_tokens": 5, "total_tokens": 18, "prompt_tokens_details": { "cached_tokens": 0 } })
    );
    assert_eq!(first["choices"], second["choices"], "equal prompts have equal responses");
    assert_eq!(cached(&second), 12, "all complete blocks");
    assert_eq!(complete(&engine, 0, &prompt(1, 12), 1).await, 8, "the last token is always computed");
    assert_eq!(complete(&engine, 0, &[prompt(1, 8), prompt(2, 8)].concat(), 1).await, 8);

    let text = json!({ "prompt": "one two three four five six seven eight nine", "max_tokens": 1 });
    assert_eq!(post(&engine, "/v1/completions", &text).await.json()["usage"]["prompt_tokens"], 9);
    assert_eq!(cached(&post(&engine, "/v1/completions", &text).await.json()), 8);
    engine.shutdown().await;
}

#[tokio::test]
async fn streamed_and_whole_chats_are_equal_and_the_next_turn_is_cached() {
    let engine = started(fast()).await;
    let mut chat = json!({ "messages": [{ "role": "user", "content": "What is a block, please?" }], "max_tokens": 9 });
    let whole = post(&engine, "/v1/chat/completions", &chat).await.json();
    let text = whole["choices"][0]["message"]["content"].as_str().expect("a response").to_owned();

    chat["stream"] = true.into();
    chat["stream_options"] = json!({ "include_usage": true });
    let streamed = post(&engine, "/v1/chat/completions", &chat).await;
    let events = streamed.events();
    let (done, chunks) = events.split_last().expect("an event stream");
    assert_eq!((*done, streamed.is_whole), ("[DONE]", true));
    let chunks: Vec<Json> = chunks.iter().map(|data| serde_json::from_str(data).expect("chunks are JSON")).collect();
    let (usage, chunks) = chunks.split_last().expect("a usage record");
    assert_eq!((&usage["choices"], &usage["usage"]["completion_tokens"]), (&json!([]), &json!(9)));
    let delta = |chunk: &Json| chunk["choices"][0]["delta"]["content"].as_str().expect("content").to_owned();
    assert_eq!(chunks.iter().map(delta).collect::<String>(), text);
    assert_eq!(chunks[0]["choices"][0]["delta"]["role"], "assistant");
    let reasons: Vec<&Json> = chunks.iter().map(|chunk| &chunk["choices"][0]["finish_reason"]).collect();
    assert!(reasons[..9].iter().all(|reason| reason.is_null()) && *reasons[9] == json!("length"), "{reasons:?}");

    let messages = json!([
        { "role": "user", "content": "What is a block, please?" },
        { "role": "assistant", "content": text },
        { "role": "user", "content": [{ "type": "text", "text": "And a rank?" }] },
    ]);
    let next = post(&engine, "/v1/chat/completions", &json!({ "messages": messages, "max_tokens": 1 })).await.json();
    // The last generated token was never computed.
    let computed = whole["usage"]["total_tokens"].as_u64().expect("a count") - 1;
    assert_eq!(cached(&next), computed / 4 * 4);
    engine.shutdown().await;
}

#[tokio::test]
async fn invalid_requests_are_rejected_in_openai_format() {
    let engine = started(MockConfig { body_bytes_max: 10_000, max_model_len: Some(100), ..fast() }).await;
    let cases = [
        (json!({ "model": "other", "prompt": "x" }), 404, "NotFoundError"),
        (json!({ "prompt": prompt(1, 100) }), 400, "BadRequestError"),
        (json!({ "prompt": [] }), 400, "BadRequestError"),
        (json!({ "prompt": ["x"] }), 400, "BadRequestError"),
        (json!({ "prompt": "x", "n": 2 }), 400, "BadRequestError"),
        (json!({ "prompt": "x", "cache_salt": "" }), 400, "BadRequestError"),
        (json!({ "prompt": "x", "max_tokens": 0 }), 400, "BadRequestError"),
        (json!({ "max_tokens": 1 }), 400, "BadRequestError"),
        (json!({ "prompt": "x".repeat(20_000) }), 413, "BadRequestError"),
    ];
    for (body, status, kind) in cases {
        let answer = post(&engine, "/v1/completions", &body).await;
        assert_eq!((answer.status, &answer.json()["error"]["type"]), (status, &json!(kind)), "{answer:?}");
    }
    for broken in ["", "{", "[1]", &"[".repeat(9_000)] {
        let answer = request(engine.address(), "POST", "/v1/chat/completions", "", broken).await.expect("a response");
        assert_eq!(answer.status, 400, "{answer:?}");
    }
    assert_eq!(get(&engine, "/nowhere").await.status, 404);
    assert_eq!(get(&engine, "/v1/completions").await.status, 405);
    assert!(engine.is_quiet(), "no request was submitted");
    engine.shutdown().await;
}

#[tokio::test]
async fn the_header_or_the_lowest_load_selects_the_rank() {
    let engine = started(MockConfig { data_parallel_size: 2, ..fast() }).await;
    assert_eq!(complete(&engine, 1, &prompt(1, 9), 1).await, 0);
    assert_eq!((held(&engine, 0, Tier::Device).len(), held(&engine, 1, Tier::Device).len()), (0, 2));
    assert_eq!(complete(&engine, 1, &prompt(1, 9), 1).await, 8);
    assert_eq!(complete(&engine, 0, &prompt(1, 9), 1).await, 0, "caches are apart");
    let body = json!({ "prompt": prompt(2, 9), "max_tokens": 1 }).to_string();
    let status = async |engine: &MockEngine, rank: &str| {
        let header = format!("x-data-parallel-rank: {rank}\r\n");
        request(engine.address(), "POST", "/v1/completions", &header, &body).await.expect("a response").status
    };
    assert_eq!((status(&engine, "2").await, status(&engine, "x").await), (400, 200), "vLLM reads past nonsense");
    engine.restart(Dialect::SglangMap).await.expect("the engine restarts");
    assert_eq!((status(&engine, "2").await, status(&engine, "x").await), (400, 400), "SGLang does not");
    engine.shutdown().await;

    // Runs at the pace of the modelled GPU, so that the first request is still running when the second arrives.
    let engine = started(MockConfig { data_parallel_size: 2, time_scale: 1.0, ..fast() }).await;
    let long = json!({ "prompt": prompt(1, 9), "max_tokens": 200 }).to_string();
    let running = send(engine.address(), "POST", "/v1/completions", "", &long).await;
    timeout(PATIENCE, async {
        while held(&engine, 0, Tier::Device).is_empty() {
            tokio::task::yield_now().await;
        }
    })
    .await
    .expect("the first request starts on rank 0");
    post(&engine, "/v1/completions", &json!({ "prompt": prompt(2, 9), "max_tokens": 1 })).await;
    assert_eq!(held(&engine, 1, Tier::Device).len(), 2, "the second request ran on rank 1");
    drop(running);
    engine.shutdown().await;
}

/// Sends requests with shared prefixes, salts, an adapter, generated blocks and evictions, and resets the cache
/// halfway.
async fn churn(engine: &MockEngine) {
    for round in 0_u32..40 {
        let shared = prompt(round % 3, 8 + 4 * (round % 5));
        let tokens = [shared, prompt(50 + round, 10)].concat();
        let salt = (round % 4 == 1).then_some("tenant");
        let model = if round % 7 == 3 { "adapter" } else { "mock" };
        let body = json!({ "model": model, "prompt": tokens, "max_tokens": 1 + round % 9, "cache_salt": salt });
        let answer = post(engine, "/v1/completions", &body).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        if round == 20 {
            quiet(engine).await;
            assert_eq!(post(engine, "/reset_prefix_cache", &json!({})).await.status, 200);
        }
    }
    quiet(engine).await;
}

#[tokio::test]
async fn events_of_every_dialect_rebuild_the_held_blocks() {
    let formats = [
        (EventFormat::from(Dialect::VllmArray), "CPU"),
        (EventFormat { dialect: Dialect::VllmArray, binary_hashes: true }, "CPU"),
        (EventFormat::from(Dialect::VllmMap), "CPU"),
        (EventFormat { dialect: Dialect::VllmMap, binary_hashes: true }, "CPU"),
        (EventFormat::from(Dialect::SglangArray), "CPU_PINNED"),
        (EventFormat::from(Dialect::SglangMap), "CPU_PINNED"),
    ];
    for (format, host_medium) in formats {
        let EventFormat { dialect, binary_hashes } = format;
        let config = MockConfig { dialect, binary_hashes, host_kv_blocks: 20, kv_blocks: 17, ..fast() };
        let config = MockConfig { loras: vec!["adapter".to_owned()], ..config };
        let engine = started(config).await;
        let mut seed = 500;
        let mut live = Subscriber::new(&engine, 0, async || {
            seed += 1;
            complete(&engine, 0, &prompt(seed, 5), 1).await;
        })
        .await;
        quiet(&engine).await;
        let before = replay(&engine, 0, 0).await;
        let from = before.len() as u64;
        churn(&engine).await;
        let last = engine.sequence_next(0) - 1;
        let mut batches = before;
        batches.extend(live.until(last).await.into_iter().filter(|batch| batch.sequence >= from));
        assert!(batches.iter().map(|batch| batch.sequence).eq(0..=last), "{format:?}");
        assert_eq!(batches, replay(&engine, 0, 0).await, "replayed batches equal sent batches");
        let rebuilt = Rebuilt::from_batches(&batches);
        assert_eq!(rebuilt.blocks("GPU"), held(&engine, 0, Tier::Device), "{format:?}");
        assert_eq!(rebuilt.blocks(host_medium), held(&engine, 0, Tier::Host), "{format:?}");
        assert!(!held(&engine, 0, Tier::Host).is_empty(), "the device evicted");
        engine.shutdown().await;
    }
}

#[tokio::test]
async fn salts_and_adapters_are_published_if_the_dialect_supports_them() {
    for dialect in [Dialect::VllmArray, Dialect::VllmMap, Dialect::SglangArray, Dialect::SglangMap] {
        let engine = started(MockConfig { dialect, loras: vec!["adapter".to_owned()], ..fast() }).await;
        let body = json!({ "model": "adapter", "prompt": prompt(1, 9), "max_tokens": 1, "cache_salt": "tenant" });
        assert_eq!(post(&engine, "/v1/completions", &body).await.status, 200);
        quiet(&engine).await;
        let rebuilt = Rebuilt::from_batches(&replay(&engine, 0, 0).await);
        let namespaces: BTreeSet<_> = rebuilt.by_medium["GPU"]
            .values()
            .map(|known| (known.parent.is_some(), known.lora_name.as_deref(), known.cache_salt.as_deref()))
            .collect();
        let expected = match dialect {
            Dialect::SglangArray => [(false, None, None), (true, None, None)],
            Dialect::SglangMap => [(false, Some("adapter"), Some("tenant")), (true, Some("adapter"), Some("tenant"))],
            _ => [(false, Some("adapter"), Some("tenant")), (true, Some("adapter"), None)],
        };
        assert_eq!(namespaces, BTreeSet::from(expected), "{dialect:?}");
        engine.shutdown().await;
    }
}

#[tokio::test]
async fn replay_uses_the_framing_of_the_dialect_and_is_limited_by_the_ring() {
    for dialect in [Dialect::VllmArray, Dialect::VllmMap, Dialect::SglangArray, Dialect::SglangMap] {
        let engine = started(MockConfig { dialect, replay_messages_max: 4, ..fast() }).await;
        for seed in 0..6 {
            complete(&engine, 0, &prompt(seed, 5), 1).await;
        }
        quiet(&engine).await;
        let expected: &[&[u8]] = if dialect.replays_with_topic() { &[b"kv-events", b""] } else { &[] };
        let answers = replay_frames(&engine, 0, 0).await;
        let (end, batches) = answers.split_last().expect("an end mark");
        let sequences: Vec<u8> = batches.iter().map(|frames| frames[frames.len() - 2][7]).collect();
        assert_eq!(sequences, [2, 3, 4, 5], "{dialect:?}");
        assert!(batches.iter().all(|frames| frames.len() == 2 + expected.len() / 2));
        assert!(
            batches
                .iter()
                .all(|frames| frames.first().map(|f| f.as_ref()) == expected.first().copied() || expected.is_empty())
        );
        assert_eq!(end.len(), 2 + expected.len() / 2);
        assert!(end.first().is_some_and(|frame| frame.is_empty() == dialect.replays_with_topic()));
        assert!(end.last().is_some_and(|payload| payload.is_empty()));
        assert_eq!(replay(&engine, 0, 5).await.len(), 1);
        assert_eq!(replay(&engine, 0, 6).await, []);
        engine.shutdown().await;
    }
}

#[tokio::test]
async fn a_restart_resets_sequences_changes_the_dialect_and_breaks_streams() {
    let engine = started(MockConfig { time_scale: 1.0, ..fast() }).await;
    let mut seed = 0;
    let mut provoke = async || {
        seed += 1;
        complete(&engine, 0, &prompt(seed, 5), 1).await;
    };
    let mut live = Subscriber::new(&engine, 0, &mut provoke).await;
    let streaming = json!({ "prompt": prompt(900, 9), "max_tokens": 240, "stream": true }).to_string();
    let mut running = send(engine.address(), "POST", "/v1/completions", "", &streaming).await;
    let mut begun = [0; 16];
    timeout(PATIENCE, running.read_exact(&mut begun))
        .await
        .expect("response start before the timeout")
        .expect("response start");
    assert!(engine.sequence_next(0) > 0);

    engine.restart(Dialect::SglangArray).await.expect("the engine restarts");
    assert_eq!((engine.sequence_next(0), engine.held(0, Tier::Device).len()), (0, 0));
    let mut rest = Vec::new();
    let _ = timeout(PATIENCE, running.read_to_end(&mut rest)).await.expect("end before the timeout");
    assert!(!String::from_utf8_lossy(&rest).contains("[DONE]"), "the stream broke");

    // The subscriber reconnects to the new incarnation on its own.
    let first = live.provoked(&mut provoke).await;
    quiet(&engine).await;
    let batches = replay(&engine, 0, 0).await;
    assert_eq!(batches[0].sequence, 0);
    assert!(batches.contains(&first));
    assert_eq!(Rebuilt::from_batches(&batches).blocks("GPU"), held(&engine, 0, Tier::Device));
    let impossible = EventFormat { dialect: Dialect::SglangMap, binary_hashes: true };
    assert!(matches!(engine.restart(impossible).await, Err(MockError::Config(_))));
    engine.shutdown().await;
}

#[tokio::test]
async fn a_stopped_engine_restarts_on_the_same_addresses() {
    let engine = started(MockConfig { data_parallel_size: 3, ..fast() }).await;
    complete(&engine, 2, &prompt(1, 9), 1).await;
    let (config, endpoint) = (engine.config().clone(), engine.event_endpoint(2));
    let taken = MockEngine::start(config.clone()).await;
    assert!(matches!(taken, Err(MockError::Listen { .. })), "the ports are taken");
    engine.shutdown().await;
    let engine = started(config).await;
    assert_eq!((engine.event_endpoint(2), engine.sequence_next(2)), (endpoint, 0));
    assert_eq!(complete(&engine, 2, &prompt(1, 9), 1).await, 0, "the cache is empty");
    engine.shutdown().await;
}

#[tokio::test]
async fn a_dropped_engine_frees_its_ports() {
    let engine = started(fast()).await;
    let config = engine.config().clone();
    complete(&engine, 0, &prompt(1, 9), 1).await;
    drop(engine);
    let again = async {
        loop {
            match MockEngine::start(config.clone()).await {
                Ok(engine) => return engine,
                Err(_) => tokio::task::yield_now().await,
            }
        }
    };
    timeout(PATIENCE, again).await.expect("ports are released before the timeout").shutdown().await;
}

#[tokio::test]
async fn subscribers_reconnect_to_every_incarnation() {
    let engine = started(fast()).await;
    let mut seed = 0;
    let mut provoke = async || {
        seed += 1;
        complete(&engine, 0, &prompt(seed, 5), 1).await;
    };
    let mut live = Subscriber::new(&engine, 0, &mut provoke).await;
    for dialect in [Dialect::VllmArray, Dialect::SglangArray, Dialect::SglangMap, Dialect::VllmMap] {
        engine.restart(dialect).await.expect("the engine restarts");
        timeout(PATIENCE, live.provoked(&mut provoke)).await.expect("messages arrive in time");
    }
    engine.shutdown().await;
}

#[tokio::test]
async fn the_same_seed_and_requests_give_the_same_bytes() {
    let run = async |seed| {
        let engine = started(MockConfig { seed, loras: vec!["adapter".to_owned()], ..fast() }).await;
        churn(&engine).await;
        let batches = replay(&engine, 0, 0).await;
        engine.shutdown().await;
        batches
    };
    let first = run(1).await;
    assert_eq!(first, run(1).await);
    assert_ne!(first, run(2).await);
}

#[tokio::test]
async fn faults_affect_live_but_not_replayed_events() {
    let engine = started(fast()).await;
    let mut seed = 0;
    let mut provoke = async || {
        seed += 1;
        complete(&engine, 0, &prompt(seed, 5), 1).await;
    };
    let mut live = Subscriber::new(&engine, 0, &mut provoke).await;
    quiet(&engine).await;
    let from = engine.sequence_next(0);
    let shares =
        Faults { drop_share: 0.2, duplicate_share: 0.2, reorder_share: 0.2, mangle_share: 0.2, ..Faults::default() };
    engine.set_faults(shares).expect("shares are shares");
    for _ in 0..100 {
        provoke().await;
    }
    quiet(&engine).await;
    engine.set_faults(Faults::default()).expect("no faults");
    provoke().await;
    quiet(&engine).await;
    let last = engine.sequence_next(0) - 1;
    let received: Vec<_> = live.until(last).await.into_iter().filter(|batch| batch.sequence >= from).collect();
    let replayed = replay(&engine, 0, from).await;
    assert!(replayed.iter().map(|batch| batch.sequence).eq(from..=last));

    let done = engine.faults().done();
    let whole = |batch: &&common::Batch| replayed.contains(batch);
    let sequences: BTreeSet<u64> = received.iter().map(|batch| batch.sequence).collect();
    assert_eq!(replayed.len() - sequences.len(), usize::try_from(done[&Fault::Drop]).expect("small"));
    assert_eq!(received.len() - sequences.len(), usize::try_from(done[&Fault::Duplicate]).expect("small"));
    assert!(received.iter().filter(whole).count() < received.len(), "some are mangled: {done:?}");
    assert!(!received.is_sorted_by_key(|batch| batch.sequence), "some are late: {done:?}");
    let all = replay(&engine, 0, 0).await;
    assert_eq!(Rebuilt::from_batches(&all).blocks("GPU"), held(&engine, 0, Tier::Device));
    engine.shutdown().await;
}

#[tokio::test]
async fn a_paused_publisher_is_not_quiet() {
    let engine = started(fast()).await;
    engine.set_faults(Faults { pause_publisher: true, ..Faults::default() }).expect("a valid pause");
    complete(&engine, 0, &prompt(1, 9), 1).await;
    assert!(!engine.is_quiet());
    assert_eq!((engine.sequence_next(0), replay(&engine, 0, 0).await.len()), (0, 0));
    engine.set_faults(Faults::default()).expect("no faults");
    quiet(&engine).await;
    assert_eq!(replay(&engine, 0, 0).await.len(), 1);
    engine.shutdown().await;
}

#[tokio::test]
async fn a_client_disconnect_cancels_its_request() {
    let engine = started(MockConfig { time_scale: 1.0, kv_blocks: 7168, ..fast() }).await;
    for stream in [true, false] {
        // Two minutes of modelled GPU time, much longer than the test runs.
        let body = json!({ "prompt": prompt(1, 9), "max_tokens": 20_000, "stream": stream }).to_string();
        let client = send(engine.address(), "POST", "/v1/completions", "", &body).await;
        timeout(PATIENCE, async {
            while engine.is_quiet() {
                tokio::task::yield_now().await;
            }
        })
        .await
        .expect("the request starts before the timeout");
        drop(client);
        quiet(&engine).await;
    }
    engine.shutdown().await;
}

#[tokio::test]
async fn probes_return_the_engine_configuration() {
    let config = MockConfig { data_parallel_size: 2, loras: vec!["adapter".to_owned()], ..fast() };
    let engine = started(config).await;
    assert_eq!(get(&engine, "/health").await.status, 200);
    let models = get(&engine, "/v1/models").await.json();
    assert_eq!((&models["data"][0]["id"], &models["data"][1]["id"]), (&json!("mock"), &json!("adapter")));
    assert_eq!(models["data"][0]["max_model_len"], 256);

    let info = get(&engine, "/server_info").await.json();
    let events = &info["kv_events"];
    assert_eq!(format!("tcp://127.0.0.1:{}", events["endpoint_port_base"]), engine.event_endpoint(0));
    assert_eq!(format!("tcp://127.0.0.1:{}", events["replay_endpoint_port_base"]), engine.replay_endpoint(0));
    assert_eq!(engine.event_endpoint(1), format!("tcp://127.0.0.1:{}", engine.config().event_port.unwrap() + 1));
    assert_eq!(
        (&events["block_size"], &events["dp_size"], &events["topic"]),
        (&json!(4), &json!(2), &json!("kv-events"))
    );

    complete(&engine, 1, &prompt(1, 9), 2).await;
    complete(&engine, 1, &prompt(1, 9), 2).await;
    let metrics = get(&engine, "/metrics").await.body;
    for line in [
        "vllm:num_requests_running{engine=\"0\",model_name=\"mock\"} 0",
        "vllm:num_requests_waiting{engine=\"1\",model_name=\"mock\"} 0",
        "vllm:kv_cache_usage_perc{engine=\"1\",model_name=\"mock\"} 0",
        "vllm:prefix_cache_queries_total{engine=\"1\",model_name=\"mock\"} 18",
        "vllm:prefix_cache_hits_total{engine=\"1\",model_name=\"mock\"} 8",
        "vllm:prefix_cache_hits_total{engine=\"0\",model_name=\"mock\"} 0",
        "vllm:cache_config_info{block_size=\"4\",enable_prefix_caching=\"True\",engine=\"1\",num_gpu_blocks=\"65\"} 1",
    ] {
        assert!(metrics.lines().any(|found| found == line), "{line} is not in\n{metrics}");
    }

    let text = "user\nhi there\nassistant\n";
    let tokens = post(&engine, "/tokenize", &json!({ "prompt": text })).await.json();
    assert_eq!(tokens["tokens"], json!(tokenize(text)));
    let chat = json!({ "messages": [{ "role": "user", "content": "hi there" }] });
    assert_eq!(post(&engine, "/tokenize", &chat).await.json(), tokens);
    engine.shutdown().await;

    let engine = started(MockConfig { no_server_info: true, ..fast() }).await;
    assert_eq!(get(&engine, "/server_info").await.status, 404);
    engine.shutdown().await;
}
