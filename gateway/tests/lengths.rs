//! Lengths at the gateway: prompts above the model's context length, output limits, and work of several prompts and outputs.

use std::path::Path;

use pointsman::config::EventMode;
use pointsman::policy::Policy;
use pointsman::{Prompt, RouteRequest};
use pointsman_gateway::app::Gateway;
use pointsman_gateway::settings::{TokenSourceChoice, TokensSettings};
use serde_json::json;
use tokio::net::TcpStream;

use crate::common::proxy::{Act, Scripted, at_rest, eventually, gateway, post, send, settings, stream, until, worker};

const COMPLETIONS: &str = "/v1/completions";

#[tokio::test]
async fn prompts_above_the_model_length_are_rejected_before_placement() {
    let mut settings = settings(vec![worker(1, "http://127.0.0.1:9", 1)]); // no listener
    settings.models[0].workers[0].config.max_model_len = Some(8);
    let gateway = gateway(settings).await;
    let body = |tokens: u32| json!({ "model": "mock", "prompt": (1..=tokens).collect::<Vec<_>>(), "max_tokens": 1 });
    let refused = post(&gateway, COMPLETIONS, &body(9)).await;
    assert_eq!((refused.status, refused.code().as_str()), (400, "context_length_exceeded"), "{refused:?}");
    assert!(refused.text().contains("9 tokens") && refused.text().contains("8 tokens"), "{refused:?}");
    assert_eq!(post(&gateway, COMPLETIONS, &body(8)).await.status, 502, "a prompt of the maximum length is placed");
    at_rest(&gateway).await;
}

#[tokio::test]
async fn prompts_that_cannot_fit_are_rejected_by_their_length() {
    let mut settings = settings(vec![worker(1, "http://127.0.0.1:9", 1)]); // no listener
    settings.models[0].workers[0].config.max_model_len = Some(100);
    let data = |name: &str| Some(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokens").join(name));
    settings.models[0].tokens = TokensSettings {
        source: TokenSourceChoice::Local,
        tokenizer_file: data("tokenizer.json"),
        chat_template_file: data("llama3.jinja"),
        parity_check: false,
        // Only the length can reject: the tokens come too late.
        wait_ms: 1,
        ..TokensSettings::default()
    };
    let gateway = gateway(settings).await;
    // The longest token has 19 bytes.
    let long = "a".repeat(19 * 100 + 1);
    let refused = post(&gateway, COMPLETIONS, &json!({ "model": "mock", "prompt": long })).await;
    assert_eq!((refused.status, refused.code().as_str()), (400, "context_length_exceeded"), "{refused:?}");
    assert!(refused.text().contains("101 tokens") && refused.text().contains("100 tokens"), "{refused:?}");
    let message = json!([{ "role": "user", "content": long }]);
    let chat = json!({ "model": "mock", "max_tokens": 1, "messages": message });
    rejected_once_rendered(&gateway, "/v1/chat/completions", &chat, "maximum context length is 100 tokens").await;
    rejected_once_rendered(&gateway, "/v1/messages", &chat, "\"invalid_request_error\"").await;
    at_rest(&gateway).await;
}

/// Sends a chat until its text was rendered in time, and expects its rejection.
async fn rejected_once_rendered(gateway: &Gateway, path: &str, chat: &serde_json::Value, expected: &str) {
    eventually("the text is rendered in time", async || {
        let answer = post(gateway, path, chat).await;
        // Without a listener, a placed prompt fails.
        assert!(answer.status == 502 || answer.status == 400 && answer.text().contains(expected), "{answer:?}");
        answer.status == 400
    })
    .await;
}

/// The next turn of a conversation arrives while the previous turn is still in progress. It follows the cached prompt
/// whatever its `max_tokens`. An explicit expected output length takes effect.
#[tokio::test]
async fn an_output_limit_does_not_change_placement() {
    for (headers, max_tokens, follows) in [
        ("", 200, true),
        ("", 4_096, true),
        ("", 32_768, true),
        ("x-pointsman-expected-output-tokens: 32768\r\n", 32_768, false),
        ("x-pointsman-expected-output-tokens: 32768\r\n", 200, true),
    ] {
        let first = "data: {\"choices\":[{\"index\":0,\"text\":\"so\"}]}\n\n";
        let hangs = move |_| [stream(&[first]), vec![Act::Hang]].concat();
        let workers = [Scripted::start(hangs).await, Scripted::start(hangs).await];
        let mut settings = settings(vec![worker(1, &workers[0].url(), 1), worker(2, &workers[1].url(), 1)]);
        settings.models[0].router.policy = Policy::Latency.into();
        let gateway = gateway(settings).await;
        let request_counts = || workers.each_ref().map(|worker| worker.requests().len());
        let turn = turn(&gateway, headers, 6_400, max_tokens).await;
        let mut head = [0; 1];
        turn.peek(&mut head).await.expect("response received");
        let home = usize::from(request_counts()[0] == 0);
        let next = self::turn(&gateway, headers, 6_600, max_tokens).await;
        until("the next turn was sent", || request_counts().iter().sum::<usize>() == 2).await;
        assert_eq!(request_counts()[home] == 2, follows, "{headers:?} and {max_tokens}: {:?}", request_counts());
        drop((turn, next));
        at_rest(&gateway).await;
    }
}

async fn turn(gateway: &Gateway, headers: &str, tokens: u32, max_tokens: u32) -> TcpStream {
    let prompt: Vec<u32> = (1..=tokens).collect();
    let body = json!({ "model": "mock", "prompt": prompt, "max_tokens": max_tokens, "stream": true });
    send(gateway.address(), "POST", COMPLETIONS, headers, body.to_string().as_bytes()).await
}

/// Prefill tokens, blocks and sequences that are booked.
async fn booked(gateway: &Gateway) -> (u64, u64, u32) {
    let router = gateway.router("mock").expect("the model is served");
    let loads = router.potential_loads(RouteRequest::query(Prompt::Tokens(&[]))).await.expect("one rank");
    (loads[0].potential_prefill_tokens, loads[0].potential_decode_blocks, loads[0].active_requests)
}

/// A gateway with blocks of four tokens in front of this worker.
async fn kv_gateway(engine: &Scripted) -> Gateway {
    let mut settings = settings(vec![worker(1, &engine.url(), 1)]);
    settings.models[0].router.block_size = Some(4);
    settings.models[0].router.policy = Policy::Kv.into();
    settings.models[0].router.events.mode = EventMode::Off;
    gateway(settings).await
}

async fn streamed(gateway: &Gateway, mut body: serde_json::Value) -> TcpStream {
    body["stream"] = true.into();
    send(gateway.address(), "POST", COMPLETIONS, "", body.to_string().as_bytes()).await
}

#[tokio::test]
async fn further_prompts_and_outputs_are_booked() {
    let engine = Scripted::responding_with(vec![Act::Hang]).await;
    let gateway = kv_gateway(&engine).await;
    for (n, (choices, is_list, expected)) in
        [(1, false, (64, 16, 1)), (8, false, (64, 16, 8)), (2, true, (96, 24, 6))].into_iter().enumerate()
    {
        // New prompts, of which nothing is cached.
        let first = 1_000 * n as u32;
        let (a, b): (Vec<u32>, Vec<u32>) = ((first..first + 64).collect(), (first + 500..first + 532).collect());
        let prompt = if is_list { json!([a, b, a]) } else { json!(a) };
        let client = streamed(&gateway, json!({ "prompt": prompt, "n": choices })).await;
        until("the request was sent", || engine.request_count() == n + 1).await;
        assert_eq!(booked(&gateway).await, expected);
        drop(client);
        at_rest(&gateway).await;
    }
}

#[tokio::test]
async fn prompt_logprobs_get_no_credit_for_cached_blocks() {
    let fine = "data: {\"choices\":[{\"text\":\"a\"}]}\n\ndata: [DONE]\n\n";
    let answers = move |n| if n == 0 { crate::common::proxy::answer("200 OK", fine) } else { vec![Act::Hang] };
    let engine = Scripted::start(answers).await;
    let gateway = kv_gateway(&engine).await;
    let prompt: Vec<u32> = (1..=64).collect();
    let served = post(&gateway, COMPLETIONS, &json!({ "prompt": prompt, "stream": true })).await;
    assert_eq!(served.status, 200);
    for (n, (body, prefill_tokens)) in [
        (json!({ "prompt": prompt }), 4), // the last block is computed
        (json!({ "prompt": prompt, "prompt_logprobs": 1 }), 64),
        (json!({ "prompt": prompt, "echo": true, "logprobs": 0 }), 64),
    ]
    .into_iter()
    .enumerate()
    {
        let client = streamed(&gateway, body).await;
        until("the request was sent", || engine.request_count() == n + 2).await;
        assert_eq!(booked(&gateway).await.0, prefill_tokens);
        drop(client);
        at_rest(&gateway).await;
    }
}
