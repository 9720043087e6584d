//! Anthropic Messages through the gateway: translated, passed, counted, rejected and aborted.

use pointsman_gateway::settings::{ConfigFile, MessagesMode, Settings, Sources, TenantSettings, TokenSourceChoice};
use pointsman_trial::mock::{MockConfig, MockEngine};
use serde_json::{Value as Json, json};

use crate::common::directory::Directory;
use crate::common::proxy::{
    Answer, Scripted, answer, at_rest, gateway, get, post, receive, request, send, settings, stream, stream_end, worker,
};

const MESSAGES: &str = "/v1/messages";
const COUNT: &str = "/v1/messages/count_tokens";

fn body(stream: bool) -> Json {
    let messages = json!([{ "role": "user", "content": [{ "type": "text", "text": "What does a pointsman do?" }] }]);
    json!({ "model": "mock", "max_tokens": 8, "system": "Be brief.", "messages": messages, "stream": stream })
}

fn messages_mode(mut settings: Settings, mode: MessagesMode) -> Settings {
    settings.models[0].messages = mode;
    settings
}

/// Names and data of the events.
fn events(answer: &Answer) -> Vec<(&str, Json)> {
    let parse = |text: &str| serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
    let events = answer.text().split_terminator("\n\n").map(|event| {
        let (name, data) = event.split_once('\n').expect("two lines");
        (name.strip_prefix("event: ").expect("a name"), parse(data.strip_prefix("data: ").expect("data")))
    });
    events.collect()
}

fn error_type(answer: &Answer) -> String {
    let json = answer.json();
    assert_eq!(json["type"], "error", "{answer:?}");
    assert_eq!(json["request_id"].as_str(), answer.header("x-request-id"), "{answer:?}");
    assert!(json["error"]["message"].as_str().is_some_and(|message| !message.is_empty()), "{answer:?}");
    json["error"]["type"].as_str().expect("a type").to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mock_engine_serves_messages() {
    let config = MockConfig { time_scale: 0.0, ..MockConfig::default() };
    let engine = MockEngine::start(config).await.expect("start succeeds");
    let mut settings = settings(vec![worker(1, &engine.url(), 1)]);
    settings.models[0].aliases = vec!["claude".to_owned()];
    settings.models[0].tokens.source = TokenSourceChoice::Engine;
    let gateway = gateway(settings).await;
    let mut named = body(false);
    named["model"] = "claude".into();
    let whole = post(&gateway, MESSAGES, &named).await;
    let message = whole.json();
    assert_eq!((whole.status, &message["type"], &message["role"]), (200, &json!("message"), &json!("assistant")));
    assert_eq!((&message["model"], &message["stop_reason"]), (&json!("claude"), &json!("max_tokens")));
    assert_eq!(message["content"][0]["type"], "text");
    assert_eq!(message["usage"]["output_tokens"], 8);
    let length = message["usage"]["input_tokens"].as_u64().expect("a count")
        + message["usage"]["cache_read_input_tokens"].as_u64().expect("a count");

    let streamed = post(&gateway, MESSAGES, &body(true)).await;
    assert!(streamed.is_whole && streamed.header("content-type").is_some_and(|kind| kind.contains("event-stream")));
    let events = events(&streamed);
    assert_eq!((events[0].0, events[events.len() - 1].0), ("message_start", "message_stop"));
    assert_eq!(events[0].1["message"]["usage"]["input_tokens"], length);
    let deltas = events.iter().filter(|(name, _)| *name == "content_block_delta");
    let text: String = deltas.map(|(_, event)| event["delta"]["text"].as_str().expect("text")).collect();
    assert!(!text.is_empty());
    let end = &events[events.len() - 2].1;
    assert_eq!((&end["delta"]["stop_reason"], &end["usage"]["output_tokens"]), (&json!("max_tokens"), &json!(8)));

    let counted =
        post(&gateway, COUNT, &json!({ "model": "mock", "system": "Be brief.", "messages": body(false)["messages"] }))
            .await;
    assert_eq!((counted.status, counted.json()), (200, json!({ "input_tokens": length })));
    at_rest(&gateway).await;
    let page = get(&gateway, "/metrics").await;
    for endpoint in ["messages", "count_tokens"] {
        let series = format!("requests_total{{model=\"mock\",endpoint=\"{endpoint}\",status=\"200\"}} ");
        assert!(page.text().contains(&series), "{series}");
    }
    engine.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_and_streams_with_tools_are_translated() {
    let chat = "data: {\"choices\":[{\"delta\":{\"content\":\"a\"},\"finish_reason\":\"stop\"}]}\n\n";
    let scripted = Scripted::start(move |_| [stream(&[chat, "data: [DONE]\n\n"]), vec![stream_end()]].concat()).await;
    let mut settings = settings(vec![worker(1, &scripted.url(), 1)]);
    settings.models[0].upstream_name = Some("served".to_owned());
    let gateway = gateway(settings).await;
    let mut body = body(true);
    body["tools"] = json!([{ "name": "f", "input_schema": { "type": "object" } }]);
    let headers = "x-api-key: k\r\nanthropic-version: 2023-06-01\r\nanthropic-beta: a,b\r\nx-request-id: r1\r\n";
    let answer =
        request(gateway.address(), "POST", "/v1/messages?beta=true", headers, body.to_string().as_bytes()).await;
    assert_eq!(
        (answer.status, answer.header("x-request-id"), answer.header("request-id")),
        (200, Some("r1"), Some("r1"))
    );
    let events = events(&answer);
    let names: Vec<&str> = events.iter().map(|(name, _)| *name).collect();
    assert_eq!((names[0], names[names.len() - 1]), ("message_start", "message_stop"));
    let got = &scripted.requests()[0];
    assert!(got.head.starts_with("POST /v1/chat/completions HTTP/1.1\r\n"), "{}", got.head);
    assert_eq!(
        (got.header("x-api-key"), got.header("authorization"), got.header("x-request-id")),
        (None, None, Some("r1"))
    );
    let chat: Json = serde_json::from_str(got.text()).expect("JSON");
    assert_eq!((&chat["model"], &chat["stream_options"]["include_usage"]), (&json!("served"), &json!(true)));
    assert_eq!(chat["tools"][0]["function"]["name"], "f");
    at_rest(&gateway).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn passed_requests_reach_the_engine_unchanged() {
    let events = [
        "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"role\":\"assistant\"}}\n\n",
        "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"delta\":{\"text\":\"a\"}}\n\n",
        "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
    ];
    let scripted = Scripted::start(move |n| match n {
        0 => [stream(&events), vec![stream_end()]].concat(),
        1 => answer("200 OK", "{\"type\":\"message\",\"content\":[]}"),
        2 => answer("200 OK", "{\"input_tokens\":5}"),
        // A stream without its last event.
        _ => [stream(&events[..2]), vec![stream_end()]].concat(),
    })
    .await;
    let settings = settings(vec![worker(1, &scripted.url(), 1)]);
    let gateway = gateway(messages_mode(settings, MessagesMode::Pass)).await;
    let streamed = post(&gateway, MESSAGES, &body(true)).await;
    assert_eq!((streamed.status, streamed.text()), (200, events.concat().as_str()));
    let whole = post(&gateway, MESSAGES, &body(false)).await;
    assert_eq!(whole.json(), json!({ "type": "message", "content": [] }));
    let counted = post(&gateway, COUNT, &body(false)).await;
    assert_eq!((counted.status, counted.json()), (200, json!({ "input_tokens": 5 })));
    let cut = post(&gateway, MESSAGES, &body(true)).await;
    assert!(!cut.is_whole, "{cut:?}");
    let requests = scripted.requests();
    assert_eq!(requests[0].text(), body(true).to_string());
    for (request, path) in requests.iter().zip([MESSAGES, MESSAGES, COUNT]) {
        assert!(request.head.starts_with(&format!("POST {path} HTTP/1.1\r\n")), "{}", request.head);
    }
    at_rest(&gateway).await;
}

/// An engine without `/tokenize` whose template wants the system message first.
async fn strict_engine() -> Scripted {
    let chat = r#"{"choices":[{"message":{"role":"assistant","content":"hi"},"finish_reason":"stop"}]}"#;
    let refusal = r#"{"error":{"message":"System message must be at the beginning.","code":400}}"#;
    Scripted::with(Vec::new(), move |_, got| {
        let body: Json = serde_json::from_str(got.text()).expect("JSON");
        let messages = body["messages"].as_array().expect("messages");
        match messages.iter().skip(1).any(|message| message["role"] == "system") {
            true => answer("400 Bad Request", refusal),
            false => answer("200 OK", chat),
        }
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn templates_that_want_the_system_message_first_are_tried_once() {
    let engine = strict_engine().await;
    let gateway = gateway(settings(vec![worker(1, &engine.url(), 1)])).await;
    let mut inline = body(false);
    let messages = inline["messages"].as_array_mut().expect("a list");
    messages.push(json!({ "role": "system", "content": "Agents: none." }));
    for _ in 0..2 {
        let answer = post(&gateway, MESSAGES, &inline).await;
        assert_eq!(answer.status, 200, "{answer:?}");
    }
    let requests = engine.requests();
    let last: Json = serde_json::from_str(requests[requests.len() - 1].text()).expect("JSON");
    assert_eq!(last["messages"][1]["content"], "What does a pointsman do?\n\nAgents: none.");
    assert_eq!(requests.len(), 4, "two trials and two requests");
    at_rest(&gateway).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn passed_requests_that_cannot_be_converted_pass() {
    let scripted = Scripted::responding_with(answer("200 OK", "{\"type\":\"message\",\"content\":[]}")).await;
    let both = |mode| messages_mode(settings(vec![worker(1, &scripted.url(), 1)]), mode);
    let reference = json!([{ "type": "tool_result", "tool_use_id": "t", "content": [{ "type": "server_made" }] }]);
    let bodies = [
        json!({ "model": "mock", "max_tokens": 5, "messages": [{ "role": "user", "content": reference }] }),
        json!({ "model": "mock", "max_tokens": 0, "messages": [{ "role": "user", "content": "x" }] }),
        json!({ "model": "mock", "max_tokens": 5, "messages": [{ "role": "user", "content": "x" }],
                "tools": [{ "type": "web_search_20250305", "name": "web_search" }] }),
    ];
    let pass = gateway(both(MessagesMode::Pass)).await;
    for body in &bodies {
        let answer = post(&pass, MESSAGES, body).await;
        assert_eq!(answer.status, 200, "{answer:?}");
    }
    let texts: Vec<String> = scripted.requests().iter().map(|request| request.text().to_owned()).collect();
    assert_eq!(texts, bodies.each_ref().map(Json::to_string));
    at_rest(&pass).await;
    let translate = gateway(both(MessagesMode::Translate)).await;
    for body in &bodies {
        assert_eq!(error_type(&post(&translate, MESSAGES, body).await), "invalid_request_error");
    }
    at_rest(&translate).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_of_the_context_length_use_anthropics_words() {
    let of_vllm = r#"{"error":{"message":"This model's maximum context length is 64 tokens. However, your prompt contains at least 100 input tokens.","code":400}}"#;
    let scripted = Scripted::responding_with(answer("400 Bad Request", of_vllm)).await;
    for mode in [MessagesMode::Translate, MessagesMode::Pass] {
        let gateway = gateway(messages_mode(settings(vec![worker(1, &scripted.url(), 1)]), mode)).await;
        let answer = post(&gateway, MESSAGES, &body(false)).await;
        assert_eq!(answer.json()["error"]["message"], "prompt is too long: 100 tokens > 64 maximum", "{mode:?}");
        at_rest(&gateway).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_have_anthropic_format() {
    let scripted = Scripted::start(|n| match n {
        0 => answer(
            "400 Bad Request",
            "{\"error\":{\"message\":\"too long\",\"type\":\"BadRequestError\",\"code\":400}}",
        ),
        1 => answer("422 Unprocessable Entity", "{\"detail\":\"no\"}"),
        _ => answer("503 Service Unavailable", "{\"object\":\"error\",\"message\":\"busy\"}"),
    })
    .await;
    let mut settings = settings(vec![worker(1, &scripted.url(), 1)]);
    settings.gateway.body_bytes_max = 1_024;
    settings.gateway.attempts_max = 1;
    let gateway = gateway(settings).await;
    for (status, kind, message) in [
        (400, "invalid_request_error", "too long"),
        (422, "invalid_request_error", "no"),
        (503, "overloaded_error", "busy"),
    ] {
        let answer = post(&gateway, MESSAGES, &body(false)).await;
        assert_eq!((answer.status, error_type(&answer).as_str()), (status, kind));
        assert_eq!(answer.json()["error"]["message"], message);
        assert_eq!(answer.header("content-type"), Some("application/json"));
    }
    let mut unknown = body(false);
    unknown["model"] = "other".into();
    let mut unsupported = body(false);
    unsupported["messages"][0]["content"][0]["type"] = "server_tool_use".into();
    let cases = [
        (MESSAGES, unknown.to_string(), 404, "not_found_error"),
        (MESSAGES, unsupported.to_string(), 400, "invalid_request_error"),
        (MESSAGES, "{".to_owned(), 400, "invalid_request_error"),
        (MESSAGES, " ".repeat(1_025), 413, "request_too_large"),
        (COUNT, body(false).to_string(), 501, "api_error"),
    ];
    for (path, body, status, kind) in cases {
        let answer = request(gateway.address(), "POST", path, "", body.as_bytes()).await;
        assert_eq!((answer.status, error_type(&answer).as_str()), (status, kind), "{body}");
    }
    let method = request(gateway.address(), "GET", MESSAGES, "", b"").await;
    assert_eq!((method.status, error_type(&method).as_str()), (405, "invalid_request_error"));
    assert_eq!(method.header("allow"), Some("POST"));
    let chat = post(&gateway, "/v1/chat/completions", &json!({ "model": "other", "messages": [] })).await;
    assert_eq!(chat.code(), "model_not_found", "other paths keep their format");
    at_rest(&gateway).await;
}

/// Round-robin: one of two requests starts at the failing worker.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_error_event_before_the_first_token_is_retried_in_both_modes() {
    let failed = "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"api_error\",\"message\":\"dead\"}}\n\n";
    let message = [
        "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"role\":\"assistant\"}}\n\n",
        "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"delta\":{\"text\":\"a\"}}\n\n",
        "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
    ];
    let chat =
        ["data: {\"choices\":[{\"delta\":{\"content\":\"a\"},\"finish_reason\":\"stop\"}]}\n\n", "data: [DONE]\n\n"];
    for (mode, served) in [(MessagesMode::Pass, message.to_vec()), (MessagesMode::Translate, chat.to_vec())] {
        let bad = Scripted::start(move |_| [stream(&[message[0], failed]), vec![stream_end()]].concat()).await;
        let good = Scripted::start(move |_| [stream(&served), vec![stream_end()]].concat()).await;
        let settings = settings(vec![worker(1, &bad.url(), 1), worker(2, &good.url(), 1)]);
        let gateway = gateway(messages_mode(settings, mode)).await;
        while bad.requests().is_empty() {
            let answer = post(&gateway, MESSAGES, &body(true)).await;
            let events = events(&answer);
            assert_eq!((answer.status, events[events.len() - 1].0), (200, "message_stop"), "{answer:?}");
        }
        at_rest(&gateway).await;
        drop(good);
        let answer = post(&gateway, MESSAGES, &body(true)).await;
        assert_eq!((answer.status, error_type(&answer).as_str()), (500, "api_error"));
        assert_eq!(answer.json()["error"]["message"], "dead");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tenants_send_their_key_in_either_header() {
    for mode in [MessagesMode::Translate, MessagesMode::Pass] {
        send_keys_of_tenants(mode).await;
    }
}

async fn send_keys_of_tenants(mode: MessagesMode) {
    const FINE: &str = "{\"choices\":[{\"message\":{\"content\":\"fine\"},\"finish_reason\":\"stop\"}]}";
    let scripted = Scripted::start(|_| answer("200 OK", FINE)).await;
    let directory = Directory::new();
    let mut settings = messages_mode(settings(vec![worker(1, &scripted.url(), 1)]), mode);
    settings.gateway.salt_secret_file = Some(directory.write("salt", "0123456789abcdef"));
    let keys_file = directory.write("keys", "tenant-key-0123456789\n");
    settings.tenants = vec![TenantSettings { name: "acme".to_owned(), keys_file, ..TenantSettings::default() }];
    let gateway = gateway(settings).await;
    let body = body(false).to_string();
    let shown = [
        ("x-api-key: tenant-key-0123456789\r\n", 200),
        ("authorization: Bearer tenant-key-0123456789\r\n", 200),
        ("authorization: Bearer other\r\nx-api-key: tenant-key-0123456789\r\n", 200),
        ("x-api-key: other\r\n", 401),
        ("", 401),
    ];
    for (headers, status) in shown {
        let stream = send(gateway.address(), "POST", MESSAGES, headers, body.as_bytes()).await;
        let answer = receive(stream).await.expect("a response");
        assert_eq!(answer.status, status, "{headers}");
        if status == 401 {
            assert_eq!(error_type(&answer), "authentication_error");
        }
    }
    let requests = scripted.requests();
    assert_eq!(requests.len(), 3);
    for request in requests {
        assert_eq!((request.header("x-api-key"), request.header("authorization")), (None, None));
        assert!(request.text().contains("\"cache_salt\":\""), "{}", request.text());
    }
    at_rest(&gateway).await;
}

#[test]
fn passed_messages_of_tenants_are_warned_of() {
    let warned = |messages: &str| {
        let text = format!(
            "[gateway]\nsalt_secret_file = \"s\"\n[[tenants]]\nname = \"t\"\nkeys_file = \"k\"\n[[models]]\nname = \"m\"\n\
             worker_urls = [\"http://a:1\"]\nmessages = \"{messages}\"\n"
        );
        let file = Some(ConfigFile { text, directory: "/etc".into() });
        let loaded = Sources { file, ..Sources::default() }.load().expect("accepted");
        let warnings = loaded.settings.warnings();
        warnings.iter().any(|warning| warning.starts_with("model \"m\" passes Anthropic Messages"))
    };
    assert!(warned("pass") && !warned("translate"));
}
