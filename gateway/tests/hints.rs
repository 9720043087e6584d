//! Hints to engines: sessions of programs and priorities, for workers that receive them.

use pointsman::NamedWorker;
use pointsman::protocol::WorkerConfig;
use pointsman_gateway::app::Gateway;
use pointsman_trial::mock::{Dialect, MockConfig, MockEngine};
use serde_json::{Value as Json, json};

use crate::common::proxy::{Act, Answer, Got, Scripted, answer, at_rest, gateway, request, settings, until, worker};

/// Stream of a response that ends so.
fn ending_with(reason: &str) -> Vec<Act> {
    let delta = if reason == "stop" { r#""content":"hi""# } else { r#""tool_calls":[{"index":0,"id":"1"}]"# };
    let event = format!(r#"{{"choices":[{{"index":0,"delta":{{{delta}}},"finish_reason":"{reason}"}}]}}"#);
    answer("200 OK", &format!("data: {event}\n\ndata: [DONE]\n\n"))
}

async fn chat(gateway: &Gateway, headers: &str, fields: Json) -> Answer {
    let mut body =
        json!({ "model": "mock", "messages": [{ "role": "user", "content": "x" }], "tools": [], "stream": true });
    body.as_object_mut().expect("an object").extend(fields.as_object().expect("an object").clone());
    let answer = request(gateway.address(), "POST", "/v1/chat/completions", headers, body.to_string().as_bytes()).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    answer
}

fn field(got: &Got, name: &str) -> Json {
    serde_json::from_slice::<Json>(&got.body).expect("JSON")[name].clone()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_that_receive_hints_have_sessions_until_the_end_of_a_turn() {
    let engine = Scripted::start(|n| ending_with(if n == 0 { "tool_calls" } else { "stop" })).await;
    let mut worker = worker(1, &engine.url(), 1);
    (worker.config.session_hints, worker.config.priority_hints) = (true, true);
    let gateway = gateway(settings(vec![worker])).await;
    chat(&gateway, "x-session-id: s\r\nx-pointsman-priority: 3\r\n", json!({})).await;
    chat(&gateway, "x-session-id: s\r\n", json!({ "priority": 7 })).await;
    until("the session is closed", || engine.request_count() == 3).await;
    let got = engine.requests();
    let id = field(&got[0], "session_id");
    assert_eq!(id.as_str().map(str::len), Some(32), "{id}");
    assert_eq!([&got[1], &got[2]].map(|got| field(got, "session_id")), [id.clone(), id]);
    assert_eq!([&got[0], &got[1]].map(|got| field(got, "priority")), [json!(3), json!(7)]);
    assert!(got[2].head.starts_with("POST /close_session "), "{}", got[2].head);
    // Sessions of clients stay theirs, and a request without tools or name has none.
    let own = [
        ("x-session-id: s\r\n", json!({ "session_id": "own" })),
        ("x-session-id: s\r\n", json!({ "session_params": {} })),
        ("x-session-id: s\r\n", json!({ "tools": null })),
        ("", json!({})),
    ];
    for (headers, fields) in own {
        chat(&gateway, headers, fields.clone()).await;
        let got = engine.requests().pop().expect("it was sent");
        assert_eq!(field(&got, "session_id"), fields["session_id"]);
    }
    at_rest(&gateway).await;
    assert_eq!(engine.request_count(), 7, "nothing is closed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_to_another_worker_closes_the_session() {
    let engine = Scripted::responding_with(ending_with("tool_calls")).await;
    let other = Scripted::responding_with(ending_with("tool_calls")).await;
    let mut workers = vec![worker(1, &engine.url(), 1), worker(2, &other.url(), 1)];
    workers.iter_mut().for_each(|worker| worker.config.session_hints = true);
    let gateway = gateway(settings(workers)).await;
    for _ in 0..3 {
        chat(&gateway, "x-session-id: s\r\n", json!({})).await;
    }
    until("both sessions were closed", || engine.request_count() + other.request_count() == 5).await;
    let closes = |at: &Scripted| at.requests().iter().filter(|got| got.head.starts_with("POST /close")).count();
    assert_eq!(closes(&engine) + closes(&other), 2);
    at_rest(&gateway).await;
}

/// A gateway before a mock engine with a cache of 63 blocks, which may evict blocks of sessions last.
async fn with_engine(session_radix_cache: bool) -> (Gateway, MockEngine) {
    let config = MockConfig {
        session_radix_cache,
        dialect: Dialect::SglangMap,
        block_size: 16,
        kv_blocks: 64,
        time_scale: 0.0,
        ..MockConfig::default()
    };
    let engine = MockEngine::start(config).await.expect("it starts");
    let config = WorkerConfig { session_hints: true, ..WorkerConfig::at(engine.url()) };
    (gateway(settings(vec![NamedWorker { id: None, config, probe: true }])).await, engine)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn contexts_of_programs_in_tool_calls_outlive_other_requests() {
    let prompt = |name: &str| json!([{ "role": "user", "content": format!("{name} ").repeat(400) }]);
    for is_supported in [true, false] {
        let (gateway, _engine) = with_engine(is_supported).await;
        let call = async |name: &str, headers: &str| {
            let fields = json!({ "messages": prompt(name), "max_tokens": 2, "stream": false });
            let usage = chat(&gateway, headers, fields).await.json()["usage"].clone();
            (usage["prompt_tokens"].as_u64(), usage["prompt_tokens_details"]["cached_tokens"].as_u64())
        };
        let session = "x-session-id: agent\r\n";
        let (prompt_tokens, _) = call("agent", session).await;
        for other in ["a", "b", "c", "d"] {
            assert_eq!(call(other, "").await.1, Some(0));
        }
        let all = prompt_tokens.map(|tokens| (tokens - 1) / 16 * 16);
        assert_eq!(call("agent", session).await.1, if is_supported { all } else { Some(0) });
    }
}
