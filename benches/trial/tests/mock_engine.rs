//! Tests of the mock engine over loopback sockets, from the view of clients and routers.

use pointsman_trial::mock::{Dialect, MockConfig, MockEngine, Tier};
use serde_json::{Value as Json, json};

use crate::common::{get, held, post, request};

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
}
