//! Tests of disaggregated serving between mock engines over loopback HTTP.

use pointsman_trial::mock::{EngineRole, HandoverCounters, HandoverProtocol, MockConfig, MockEngine, Tier};
use serde_json::{Value as Json, json};
use tokio::time::timeout;

use crate::common::{Answer, PATIENCE, post, request, send};

/// A prefill engine and a decode engine with blocks of four tokens at full speed.
struct Pair {
    prefill: MockEngine,
    decode: MockEngine,
}

impl Pair {
    async fn start(protocol: HandoverProtocol) -> Self {
        Self::start_with(protocol, |_| {}).await
    }

    async fn start_with(protocol: HandoverProtocol, change: impl Fn(&mut MockConfig)) -> Self {
        let start = async |role| {
            let mut config = MockConfig { handover: Some(protocol), role, ..fast() };
            change(&mut config);
            MockEngine::start(config).await.expect("the engine starts")
        };
        Self { prefill: start(EngineRole::Prefill).await, decode: start(EngineRole::Decode).await }
    }

    fn bootstrap_address(&self) -> String {
        format!("127.0.0.1:{}", self.prefill.config().bootstrap_port.expect("a bootstrap server"))
    }

    /// Waits until no request runs, checks the sum of the blocks, and stops both engines.
    async fn end(self) {
        for engine in [self.prefill, self.decode] {
            until(&engine, |counters| counters.running_now == 0).await;
            sum(&engine.handover());
            engine.shutdown().await;
        }
    }
}

fn fast() -> MockConfig {
    MockConfig { block_size: 4, kv_blocks: 65, time_scale: 0.0, ..MockConfig::default() }
}

fn sum(counters: &HandoverCounters) {
    let ended = counters.blocks_claimed_total + counters.blocks_expired_total + counters.blocks_lost_total;
    assert_eq!(ended + counters.holding_now, counters.blocks_held_total, "{counters:?}");
}

/// Waits until the counters of an engine meet a condition.
async fn until(engine: &MockEngine, condition: impl Fn(&HandoverCounters) -> bool) -> HandoverCounters {
    let wait = async {
        loop {
            let counters = engine.handover();
            sum(&counters);
            if condition(&counters) {
                return counters;
            }
            tokio::task::yield_now().await;
        }
    };
    timeout(PATIENCE, wait).await.unwrap_or_else(|_| panic!("{:?}", engine.handover()))
}

fn prompt(seed: u32, tokens: u32) -> Vec<u32> {
    (0..tokens).map(|n| seed * 1_000 + n).collect()
}

fn body(fields: Json) -> Json {
    let mut body = json!({ "prompt": prompt(1, 10), "max_tokens": 5 });
    let (body_fields, fields) = (body.as_object_mut().expect("an object"), fields.as_object().expect("an object"));
    body_fields.extend(fields.clone());
    body
}

/// A body with a change.
fn with(mut body: Json, name: &str, value: Json) -> Json {
    body[name] = value;
    body
}

async fn post_with(engine: &MockEngine, header: &str, body: &Json) -> Answer {
    let answer = request(engine.address(), "POST", "/v1/completions", header, &body.to_string()).await;
    answer.expect("a response")
}

async fn complete(engine: &MockEngine, body: &Json) -> Answer {
    post(engine, "/v1/completions", body).await
}

fn text(answer: &Answer) -> String {
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()["choices"][0]["text"].as_str().expect("text").to_owned()
}

fn cached(answer: &Answer) -> u64 {
    answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("cached tokens")
}

/// Output of an engine without disaggregated serving.
async fn reference() -> String {
    let engine = MockEngine::start(fast()).await.expect("the engine starts");
    let text = text(&complete(&engine, &body(json!({}))).await);
    engine.shutdown().await;
    text
}

async fn rejects(engine: &MockEngine, header: &str, bodies: &[Json]) {
    for body in bodies {
        let before = engine.handover();
        let answer = post_with(engine, header, body).await;
        assert_eq!(answer.status, 400, "{body}: {answer:?}");
        let after = engine.handover();
        assert_eq!(
            (after.rejected, after.blocks_held_total),
            (before.rejected + 1, before.blocks_held_total),
            "{body}"
        );
    }
}

fn nixl_prefill() -> Json {
    let params = json!({ "do_remote_decode": true, "do_remote_prefill": false });
    body(json!({ "max_tokens": 1, "kv_transfer_params": params }))
}

/// Runs a prefill leg and returns its parameters.
async fn nixl_params(pair: &Pair) -> Json {
    let answer = complete(&pair.prefill, &nixl_prefill()).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()["kv_transfer_params"].clone()
}

#[tokio::test]
async fn nixl_rejects_every_violation() {
    let pair = Pair::start(HandoverProtocol::VllmNixl).await;
    let leg = nixl_prefill;
    let no_limit = with(leg(), "max_tokens", Json::Null);
    let one_flag = with(leg(), "kv_transfer_params", json!({ "do_remote_decode": true }));
    rejects(
        &pair.prefill,
        "",
        &[
            with(leg(), "stream", json!(true)),
            with(leg(), "stream_options", json!({ "include_usage": true })),
            with(leg(), "max_tokens", json!(2)),
            no_limit,
            with(leg(), "min_tokens", json!(2)),
            with(leg(), "kv_transfer_params", json!({ "do_remote_decode": true, "do_remote_prefill": true })),
            with(leg(), "kv_transfer_params", json!("text")),
        ],
    )
    .await;
    assert_eq!(complete(&pair.prefill, &with(leg(), "n", json!(2))).await.status, 400);
    assert_eq!(complete(&pair.prefill, &one_flag).await.status, 200, "do_remote_prefill is optional");
    let chat = json!({ "messages": [{ "role": "user", "content": "x" }], "max_tokens": 1, "max_completion_tokens": 1,
        "kv_transfer_params": { "do_remote_decode": true } });
    assert_eq!(post(&pair.prefill, "/v1/chat/completions", &chat).await.status, 400);
    rejects(&pair.decode, "", &[leg()]).await;

    let params = nixl_params(&pair).await;
    let decode = |params: Json| body(json!({ "kv_transfer_params": params }));
    let mut wrong = vec![with(decode(params.clone()), "prompt", json!(prompt(2, 10)))];
    wrong.push(with(decode(params.clone()), "prompt", json!(prompt(1, 11))));
    for name in ["x_opaque", "remote_host", "transfer_mode", "remote_blocks_expiry_time"] {
        wrong.push(decode(with(params.clone(), name, json!("changed"))));
        let mut missing = params.clone();
        missing.as_object_mut().expect("an object").remove(name);
        wrong.push(decode(missing));
    }
    rejects(&pair.decode, "", &wrong).await;
    rejects(&pair.prefill, "", &[decode(params.clone())]).await;
    assert_eq!(complete(&pair.decode, &decode(params)).await.status, 200, "rejected claims leave the blocks held");
    pair.end().await;
}

#[tokio::test]
async fn mooncake_legs_meet_by_their_transfer_id() {
    let pair = Pair::start_with(HandoverProtocol::VllmMooncake, |config| config.data_parallel_size = 2).await;
    let bootstrap = pair.bootstrap_address().parse().expect("an address");
    let ranks = request(bootstrap, "GET", "/query", "", "").await.expect("a response").json();
    let prefill = |id: &str| {
        let params = json!({ "do_remote_decode": true, "do_remote_prefill": false, "transfer_id": id });
        body(json!({ "max_tokens": 1, "kv_transfer_params": params }))
    };
    let decode = |id: &str, rank: &str| {
        let params = json!({ "do_remote_prefill": true, "do_remote_decode": false, "transfer_id": id,
            "remote_bootstrap_addr": format!("http://{}", pair.bootstrap_address()),
            "remote_engine_id": ranks[rank]["engine_id"] });
        body(json!({ "kv_transfer_params": params }))
    };
    let rank = "X-data-parallel-rank: 1\r\n";
    let leg = decode("a", "1");
    let early = complete(&pair.decode, &leg);
    let late = async {
        until(&pair.decode, |counters| counters.running_now == 1).await;
        post_with(&pair.prefill, rank, &prefill("a")).await
    };
    let (second, first) = tokio::join!(early, late);
    assert_eq!((text(&second), cached(&second), first.status), (reference().await, 9, 200));
    assert_eq!(pair.prefill.held(1, Tier::Device).len(), 2);

    rejects(&pair.prefill, "", &[prefill("b")]).await;
    rejects(&pair.prefill, rank, &[with(prefill("b"), "kv_transfer_params", json!({ "do_remote_decode": true }))])
        .await;
    assert_eq!(post_with(&pair.prefill, rank, &prefill("b")).await.status, 200);
    rejects(&pair.prefill, rank, &[prefill("b")]).await;
    rejects(&pair.decode, "", &[decode("b", "0"), with(decode("b", "1"), "prompt", json!(prompt(2, 10)))]).await;
    assert_eq!(complete(&pair.decode, &decode("b", "1")).await.status, 200);
    pair.end().await;
}

#[tokio::test]
async fn p2p_legs_meet_by_their_request_id() {
    let pair = Pair::start(HandoverProtocol::VllmP2pNccl).await;
    let id = |unique: &str| {
        let (prefill, decode) = (pair.prefill.address(), pair.decode.address());
        format!("X-Request-Id: ___prefill_addr_{prefill}___decode_addr_{decode}_{unique}\r\n")
    };
    let (leg, whole, header) = (body(json!({ "max_tokens": 1 })), body(json!({})), id("a"));
    let early = post_with(&pair.decode, &header, &whole);
    let late = async {
        until(&pair.decode, |counters| counters.running_now == 1).await;
        post_with(&pair.prefill, &header, &leg).await
    };
    let (second, first) = tokio::join!(early, late);
    assert_eq!((text(&second), cached(&second), first.status), (reference().await, 9, 200));
    assert_eq!(pair.prefill.handover().blocks_claimed_total, 2);

    let params = with(leg.clone(), "kv_transfer_params", json!({ "do_remote_decode": true }));
    rejects(&pair.prefill, &header, &[whole.clone(), params]).await;
    let elsewhere = "X-Request-Id: ___prefill_addr_127.0.0.1:1___decode_addr_127.0.0.1:2_a\r\n";
    rejects(&pair.prefill, elsewhere, std::slice::from_ref(&leg)).await;
    assert_eq!(post_with(&pair.prefill, &id("b"), &leg).await.status, 200);
    rejects(&pair.decode, &id("b"), &[with(whole, "prompt", json!(prompt(2, 10)))]).await;
    pair.end().await;
}

fn room(pair: &Pair, room: u64) -> Json {
    let port = pair.prefill.config().bootstrap_port;
    body(json!({ "bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": room }))
}

#[tokio::test]
async fn sglang_rejects_every_violation() {
    let pair = Pair::start(HandoverProtocol::Sglang).await;
    let leg = || room(&pair, 7);
    for engine in [&pair.prefill, &pair.decode] {
        let bodies = [
            body(json!({})),
            with(leg(), "bootstrap_host", Json::Null),
            with(leg(), "bootstrap_room", json!("x")),
            with(leg(), "bootstrap_room", json!(u64::MAX)),
            with(leg(), "bootstrap_room", json!([7])),
            with(leg(), "bootstrap_port", json!(70_000)),
            with(leg(), "bootstrap_host", json!(["127.0.0.1", "127.0.0.1"])),
            with(leg(), "routed_dp_rank", json!(1)),
        ];
        rejects(engine, "", &bodies).await;
    }
    let wrong = with(leg(), "disagg_prefill_dp_rank", json!(3));
    let leg = leg();
    let prefill = complete(&pair.prefill, &leg);
    let decode = async {
        until(&pair.prefill, |counters| counters.legs_prefill == 1).await;
        rejects(&pair.decode, "", &[wrong]).await;
        complete(&pair.decode, &leg).await
    };
    let (first, second) = tokio::join!(prefill, decode);
    assert_eq!((first.status, second.status), (200, 200));
    pair.end().await;
}

#[tokio::test]
async fn sglang_legs_without_counterpart_time_out() {
    let pair = Pair::start_with(HandoverProtocol::Sglang, |config| config.block_lease_ms = 20).await;
    for engine in [&pair.prefill, &pair.decode] {
        assert_eq!(complete(engine, &room(&pair, 7)).await.status, 500);
        assert_eq!(engine.handover().late_or_unknown, 1);
    }
    assert_eq!(pair.prefill.handover().blocks_held_total, 0);
    pair.end().await;
}

#[tokio::test]
async fn an_abort_during_the_transfer_is_torn() {
    let pair = Pair::start(HandoverProtocol::Sglang).await;
    let leg = with(room(&pair, 7), "rid", json!("a"));
    let decode = complete(&pair.decode, &leg);
    let abort = async {
        until(&pair.decode, |counters| counters.running_now == 1).await;
        post(&pair.decode, "/abort_request", &json!({ "rid": "a" })).await
    };
    let (answer, aborted) = tokio::join!(decode, abort);
    assert_eq!((answer.status, aborted.status), (200, 200));
    assert_eq!(answer.json()["choices"][0]["finish_reason"], "abort");
    assert_eq!(pair.decode.handover().torn, 1);

    let client = send(pair.decode.address(), "POST", "/v1/completions", "", &leg.to_string()).await;
    until(&pair.decode, |counters| counters.running_now == 1).await;
    drop(client);
    until(&pair.decode, |counters| counters.torn == 2 && counters.running_now == 0).await;

    let client = send(pair.prefill.address(), "POST", "/v1/completions", "", &leg.to_string()).await;
    until(&pair.prefill, |counters| counters.legs_prefill == 1).await;
    drop(client);
    until(&pair.prefill, |counters| counters.running_now == 0 && counters.holding_now == 0).await;
    let (first, second) = tokio::join!(complete(&pair.prefill, &leg), complete(&pair.decode, &leg));
    assert_eq!((first.status, second.status), (200, 200), "the room is free again");
    pair.end().await;
}

fn context() -> Json {
    body(json!({ "disaggregated_params": { "request_type": "context_only" } }))
}

#[tokio::test]
async fn tensorrt_legs_meet_by_their_parameters() {
    let pair = Pair::start(HandoverProtocol::TensorrtLlm).await;
    let first = complete(&pair.prefill, &context()).await.json();
    let choice = &first["choices"][0];
    assert_eq!((&choice["finish_reason"], &first["prompt_token_ids"]), (&json!("not_finished"), &json!(prompt(1, 10))));
    let params = with(choice["disaggregated_params"].clone(), "request_type", json!("generation_only"));
    let generation = body(json!({ "disaggregated_params": params }));
    rejects(&pair.prefill, "", &[with(context(), "stream", json!(true)), generation.clone()]).await;
    let changed = |name: &str, value: Json| body(json!({ "disaggregated_params": with(params.clone(), name, value) }));
    let wrong = [
        context(),
        changed("first_gen_tokens", json!([1])),
        changed("ctx_request_id", json!(1)),
        changed("encoded_opaque_state", json!("x")),
        changed("request_type", json!("other")),
        with(generation.clone(), "prompt", json!(prompt(2, 10))),
        with(generation.clone(), "prompt", json!("one two")),
    ];
    rejects(&pair.decode, "", &wrong).await;
    let second = complete(&pair.decode, &generation).await;
    assert_eq!((text(&second), cached(&second)), (reference().await, 9));
    assert_eq!(complete(&pair.decode, &generation).await.status, 500, "a transfer is claimed once");
    assert_eq!(pair.decode.handover().late_or_unknown, 1);

    let only = complete(&pair.prefill, &with(context(), "max_tokens", json!(1))).await.json();
    assert_eq!((&only["choices"][0]["finish_reason"], pair.prefill.handover().holding_now), (&json!("stop"), 0));

    let chat = json!({ "messages": [{ "role": "user", "content": "one two three four" }], "max_tokens": 4,
        "disaggregated_params": { "request_type": "context_only" } });
    let first = post(&pair.prefill, "/v1/chat/completions", &chat).await.json();
    let mut generation = with(chat, "prompt_token_ids", first["prompt_token_ids"].clone());
    generation["disaggregated_params"] =
        with(first["choices"][0]["disaggregated_params"].clone(), "request_type", json!("generation_only"));
    generation["messages"] = json!([]);
    assert_eq!(post(&pair.decode, "/v1/chat/completions", &generation).await.status, 200);
    pair.end().await;
}
