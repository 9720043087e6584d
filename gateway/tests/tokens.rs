//! Tokenization of a model's prompts: from local files, from an engine, or not at all.
//!
//! These tests cover the parts of `prompt::Tokens` that need sockets, threads or metrics. The token ids themselves are
//! tested beside the tokenizer.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::http::StatusCode;
use axum::routing::{MethodRouter, post};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle, PrometheusRecorder};
use pointsman_gateway::formats::openai::{ChatParts, ClientPrompt};
use pointsman_gateway::net::upstream::{Upstream, WorkerAccess};
use pointsman_gateway::settings::{TokenSourceChoice, TokensSettings};
use pointsman_gateway::tokens::{AnyWorker, PromptContext, TokenSource, Tokens};
use serde_json::Value;

use crate::common::authority::client_trusting;
use crate::common::proxy::until;

fn data(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokens").join(name)
}

fn upstream() -> WorkerAccess {
    Upstream::new(client_trusting(&[]), Duration::from_secs(10)).into()
}

fn settings(source: TokenSourceChoice) -> TokensSettings {
    let (engine_timeout_ms, wait_ms, parity_check) = (60_000, 60_000, false);
    TokensSettings { source, engine_timeout_ms, wait_ms, parity_check, ..TokensSettings::default() }
}

fn with_files(source: TokenSourceChoice) -> TokensSettings {
    TokensSettings { tokenizer_file: Some(data("tokenizer.json")), ..settings(source) }
}

/// A worker that may be registered later.
#[derive(Clone, Default)]
struct Worker(Arc<Mutex<Option<String>>>);

impl Worker {
    fn at(endpoint: &str) -> Self {
        Self(Arc::new(Mutex::new(Some(endpoint.to_owned()))))
    }

    fn any(&self) -> AnyWorker {
        let endpoint = Arc::clone(&self.0);
        Arc::new(move |but, is_available| {
            let endpoint = endpoint.lock().expect("lock not poisoned").clone();
            endpoint.filter(|endpoint| Some(endpoint.as_str()) != but && is_available(endpoint))
        })
    }
}

async fn tokens(settings: &TokensSettings, worker: &Worker) -> Tokens {
    Tokens::start(settings, "m", upstream(), worker.any()).await.expect("the files can be used")
}

/// A worker with this handler for `/tokenize`. Returns its address and its request count.
async fn answering(
    answer: impl Fn(Value) -> (StatusCode, String) + Clone + Send + Sync + 'static,
) -> (String, Arc<AtomicUsize>) {
    let queries = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&queries);
    let handler = move |body: Bytes| {
        count.fetch_add(1, Ordering::Relaxed);
        let answer = answer(serde_json::from_slice(&body).unwrap_or_default());
        async move { answer }
    };
    (serving(post(handler)).await, queries)
}

/// Address of a worker with this handler for `/tokenize`.
async fn serving(handler: MethodRouter) -> String {
    let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("free port on loopback");
    let url = format!("http://{}", listener.local_addr().expect("local address"));
    tokio::spawn(async move { axum::serve(listener, Router::new().route("/tokenize", handler)).await });
    url
}

/// The tokens of a prompt and their source, requested with an alias.
async fn tokens_of(tokens: &Tokens, prompt: ClientPrompt) -> (Vec<u32>, TokenSource) {
    let tokens_of = tokens.of(&prompt, PromptContext::default()).await;
    (tokens_of.ids.into_owned(), tokens_of.source)
}

fn recorder() -> (PrometheusRecorder, PrometheusHandle) {
    let recorder = PrometheusBuilder::new().build_recorder();
    let handle = recorder.handle();
    (recorder, handle)
}

fn chat(messages: &'static str) -> ClientPrompt {
    let messages = Bytes::from_static(messages.as_bytes());
    ClientPrompt::Chat(Box::new(ChatParts { messages, ..ChatParts::default() }))
}

fn text(text: &str) -> ClientPrompt {
    ClientPrompt::Text(text.to_owned())
}

const HELLO: &str = r#"[{"role":"user","content":"Hello"}]"#;

#[tokio::test]
async fn local_files_provide_tokens_and_prompts_are_counted() {
    let (recorder, page) = recorder();
    let _recording = metrics::set_default_local_recorder(&recorder);
    let tokens = tokens(&with_files(TokenSourceChoice::Auto), &Worker::default()).await;
    assert_eq!(tokens.source(), TokenSource::Local);
    assert_eq!(tokens_of(&tokens, ClientPrompt::Tokens(vec![1, 2, 3])).await, (vec![1, 2, 3], TokenSource::Request));
    let (chat_ids, of_chat) = tokens_of(&tokens, chat(HELLO)).await;
    let (text_ids, of_text) = tokens_of(&tokens, text("Hello")).await;
    assert_eq!((of_chat, of_text), (TokenSource::Local, TokenSource::Local));
    assert!(chat_ids.len() > text_ids.len() && text_ids.len() > 1);
    let image = chat(r#"[{"role":"user","content":[{"type":"input_audio","input_audio":{}}]}]"#);
    assert_eq!(tokens_of(&tokens, image).await, (Vec::new(), TokenSource::None));
    tokens.of(&ClientPrompt::Opaque("embeds"), PromptContext::default()).await;
    let page = page.render();
    let lines = [
        r#"pointsman_gateway_tokens_source{model="m",source="local"} 1"#,
        r#"pointsman_gateway_tokens_source{model="m",source="none"} 0"#,
        r#"pointsman_gateway_tokens_total{model="m",source="request",reason=""} 1"#,
        r#"pointsman_gateway_tokens_total{model="m",source="local",reason=""} 2"#,
        r#"pointsman_gateway_tokens_total{model="m",source="none",reason="multimodal"} 1"#,
        r#"pointsman_gateway_tokens_total{model="m",source="none",reason="embeds"} 1"#,
        "# HELP pointsman_gateway_tokenize_seconds ",
    ];
    for line in lines {
        assert!(page.contains(line), "{line}\n{page}");
    }
}

#[tokio::test]
async fn without_a_source_prompts_have_no_tokens() {
    let (recorder, page) = recorder();
    let _recording = metrics::set_default_local_recorder(&recorder);
    let tokens = tokens(&with_files(TokenSourceChoice::None), &Worker::default()).await;
    assert_eq!(tokens.source(), TokenSource::None);
    assert_eq!(tokens.of(&chat(HELLO), PromptContext::default()).await.source, TokenSource::None);
    let page = page.render();
    assert!(page.contains(r#"pointsman_gateway_tokens_source{model="m",source="none"} 1"#), "{page}");
    assert!(page.contains(r#"pointsman_gateway_tokens_total{model="m",source="none",reason="off"} 1"#), "{page}");
}

#[tokio::test]
async fn unusable_files_are_named() {
    let start = async |settings: TokensSettings| {
        let started = Tokens::start(&settings, "m", upstream(), Worker::default().any()).await;
        started.err().expect("start fails").to_string()
    };
    let file = |name: &str| TokensSettings { tokenizer_file: Some(data(name)), ..settings(TokenSourceChoice::Local) };
    assert!(start(settings(TokenSourceChoice::Local)).await.contains("tokenizer_file"));
    assert!(start(file("missing.json")).await.contains("missing.json cannot be read"));
    assert!(start(file("expected.json")).await.contains("expected.json is no tokenizer"));
    let template = TokensSettings { chat_template_file: Some(data("expected.json")), ..file("tokenizer.json") };
    assert!(start(template).await.contains("no chat_template"));
}

#[tokio::test]
async fn tokenize_queries_use_the_format_of_the_engine() {
    let queries = Arc::new(Mutex::new(Vec::new()));
    let recorded = Arc::clone(&queries);
    let (url, _) = answering(move |query| {
        recorded.lock().unwrap().push(query);
        (StatusCode::OK, r#"{"count": 2, "tokens": [7, 9], "token_strs": null}"#.to_owned())
    })
    .await;
    let tokens = tokens(&settings(TokenSourceChoice::Engine), &Worker::at(&url)).await;
    assert_eq!(tokens_of(&tokens, text("Hello")).await, (vec![7, 9], TokenSource::Engine));
    let parts = ChatParts {
        messages: Bytes::from_static(HELLO.as_bytes()),
        tools: Some(Bytes::from_static(b"[]")),
        template_kwargs: Some(Bytes::from_static(br#"{"a":1}"#)),
        add_generation_prompt: Some(false),
        continue_final_message: Some(true),
        ..ChatParts::default()
    };
    assert_eq!(
        tokens.of(&ClientPrompt::Chat(Box::new(parts)), PromptContext::default()).await.source,
        TokenSource::Engine
    );
    let expected = serde_json::json!([
        { "model": "m", "prompt": "Hello" },
        {
            "model": "m", "messages": [{ "role": "user", "content": "Hello" }], "tools": [],
            "chat_template_kwargs": { "a": 1 }, "add_generation_prompt": false, "continue_final_message": true,
        },
    ]);
    assert_eq!(Value::from(queries.lock().unwrap().clone()), expected);
}

#[tokio::test]
async fn later_engines_are_found() {
    let (recorder, page) = recorder();
    let _recording = metrics::set_default_local_recorder(&recorder);
    let worker = Worker::default();
    let tokens = tokens(&settings(TokenSourceChoice::Auto), &worker).await;
    assert_eq!(tokens.of(&text("a"), PromptContext::default()).await.source, TokenSource::None);
    let (url, _) = answering(|_| (StatusCode::OK, r#"{"tokens":[1]}"#.to_owned())).await;
    *worker.0.lock().unwrap() = Some(url);
    assert_eq!(tokens.of(&text("a"), PromptContext::default()).await.source, TokenSource::Engine);
    let page = page.render();
    assert!(page.contains(r#"pointsman_gateway_tokens_source{model="m",source="engine"} 1"#), "{page}");
    assert!(page.contains(r#"pointsman_gateway_tokens_total{model="m",source="none",reason="no_worker"} 1"#), "{page}");
}

#[tokio::test]
async fn failing_engines_are_paused() {
    let long = format!(r#"{{"tokens":[{}1]}}"#, "1,".repeat(1 << 20));
    let failures = [
        (StatusCode::NOT_FOUND, String::new()),
        (StatusCode::OK, "[1, 2]".to_owned()),
        (StatusCode::OK, r#"{"tokens":[-1]}"#.to_owned()),
        (StatusCode::OK, long),
    ];
    for answer in failures {
        let shown = format!("{:.40}", answer.1);
        let (url, queries) = answering(move |_| answer.clone()).await;
        let tokens = tokens(&settings(TokenSourceChoice::Engine), &Worker::at(&url)).await;
        for _ in 0..8 {
            assert_eq!(tokens.of(&text("a"), PromptContext::default()).await.source, TokenSource::None, "{shown}");
        }
        assert_eq!(queries.load(Ordering::Relaxed), 5, "{shown}");
        // Chats are counted separately because some engines tokenize plain text only.
        tokens.of(&chat(HELLO), PromptContext::default()).await;
        assert_eq!(queries.load(Ordering::Relaxed), 6, "{shown}");
    }
}

#[tokio::test]
async fn a_failing_worker_costs_no_prompt_its_tokens() {
    let (failing, failed) = answering(|_| (StatusCode::INTERNAL_SERVER_ERROR, String::new())).await;
    let (good, answered) = answering(|_| (StatusCode::OK, r#"{"tokens":[1]}"#.to_owned())).await;
    // The failing worker is always tried first.
    let any: AnyWorker = Arc::new(move |but, _| Some(if but.is_none() { failing.clone() } else { good.clone() }));
    let tokens = Tokens::start(&settings(TokenSourceChoice::Engine), "m", upstream(), any).await.unwrap();
    for _ in 0..8 {
        assert_eq!(tokens_of(&tokens, text("a")).await, (vec![1], TokenSource::Engine));
    }
    assert_eq!((failed.load(Ordering::Relaxed), answered.load(Ordering::Relaxed)), (8, 8));
}

#[tokio::test]
async fn large_prompts_and_responses_are_tokenized() {
    let ids = "1,".repeat(1 << 17) + "2";
    let answer = format!(r#"{{"tokens":[{ids}]}}"#);
    let (url, queries) = answering(move |_| (StatusCode::OK, answer.clone())).await;
    let tokens = tokens(&settings(TokenSourceChoice::Engine), &Worker::at(&url)).await;
    let large = |part: &str| {
        let messages =
            format!(r#"[{{"role":"user","content":[{{"type":"text","text":"{}"}}{part}]}}]"#, "a ".repeat(1 << 17));
        ClientPrompt::Chat(Box::new(ChatParts { messages: Bytes::from(messages), ..ChatParts::default() }))
    };
    for prompt in [large(""), text(&"a ".repeat(1 << 17))] {
        let (ids, source) = tokens_of(&tokens, prompt).await;
        assert_eq!((ids.len(), ids.last(), source), ((1 << 17) + 1, Some(&2), TokenSource::Engine));
    }
    // Large prompts are validated as strictly as small ones.
    assert_eq!(tokens_of(&tokens, large(r#",{"type":"image_url"}"#)).await.1, TokenSource::None);
    assert_eq!(queries.load(Ordering::Relaxed), 2);
}

#[tokio::test]
async fn parity_with_an_engine_is_counted() {
    let cases = [("[1, 2, 3]", "different"), ("{}", "unanswered")];
    for (answer, result) in cases {
        let (recorder, page) = recorder();
        let _recording = metrics::set_default_local_recorder(&recorder);
        let answer = answer.to_owned();
        let answer = move |_| (StatusCode::OK, format!(r#"{{"tokens":{answer}}}"#));
        let (url, _) = answering(answer).await;
        let settings = TokensSettings { parity_check: true, ..with_files(TokenSourceChoice::Local) };
        let _tokens = tokens(&settings, &Worker::at(&url)).await;
        await_line(&page, &format!(r#"pointsman_gateway_tokens_parity_total{{model="m",result="{result}"}} 3"#)).await;
    }
}

/// A worker with the tokenizer of [`with_files`].
async fn equal_worker() -> String {
    let theirs = Arc::new(tokens(&with_files(TokenSourceChoice::Local), &Worker::default()).await);
    let handler = move |body: Bytes| {
        let theirs = Arc::clone(&theirs);
        async move {
            let query: Value = serde_json::from_slice(&body).expect("JSON");
            let prompt = match query["prompt"].as_str() {
                Some(prompt) => text(prompt),
                None => {
                    let messages = Bytes::from(query["messages"].to_string());
                    ClientPrompt::Chat(Box::new(ChatParts { messages, ..ChatParts::default() }))
                }
            };
            let ids = theirs.of(&prompt, PromptContext::default()).await;
            serde_json::json!({ "tokens": ids.ids }).to_string()
        }
    };
    serving(post(handler)).await
}

async fn await_source(tokens: &Tokens, source: TokenSource) {
    until(&format!("the source is {source:?}"), || tokens.source() == source).await;
}

#[tokio::test]
async fn workers_tokenize_while_the_local_tokenizer_differs() {
    let (recorder, page) = recorder();
    let _recording = metrics::set_default_local_recorder(&recorder);
    let (other, _) = answering(|_| (StatusCode::OK, r#"{"tokens":[1,2,3]}"#.to_owned())).await;
    let worker = Worker::at(&other);
    let settings = TokensSettings { parity_check: true, ..with_files(TokenSourceChoice::Auto) };
    let tokens = tokens(&settings, &worker).await;
    await_source(&tokens, TokenSource::Engine).await;
    assert_eq!(tokens_of(&tokens, text("Hello")).await, (vec![1, 2, 3], TokenSource::Engine));
    let media = chat(r#"[{"role":"user","content":[{"type":"input_audio","input_audio":{}}]}]"#);
    assert_eq!(tokens_of(&tokens, media).await.1, TokenSource::None, "neither source has tokens of audio");
    let expected = "the tokenizer differs from that of 1 of 1 workers: workers tokenize the prompts until it is equal; \
                    update tokens.tokenizer_file";
    assert_eq!(tokens.warnings()[0], expected);
    await_line(&page, r#"pointsman_gateway_tokens_source{model="m",source="engine"} 1"#).await;

    // A worker with an equal tokenizer takes its place.
    *worker.0.lock().unwrap() = Some(equal_worker().await);
    await_source(&tokens, TokenSource::Local).await;
    assert_eq!(tokens_of(&tokens, text("Hello")).await.1, TokenSource::Local);
    assert!(!tokens.warnings().iter().any(|warning| warning.contains("differs")), "{:?}", tokens.warnings());
    assert!(page.render().contains(r#"parity_total{model="m",result="equal"}"#));
    await_line(&page, r#"pointsman_gateway_tokens_source{model="m",source="local"} 1"#).await;
}

#[tokio::test]
async fn an_explicit_local_source_stays_and_is_warned_of() {
    let (other, _) = answering(|_| (StatusCode::OK, r#"{"tokens":[1,2,3]}"#.to_owned())).await;
    let settings = TokensSettings { parity_check: true, ..with_files(TokenSourceChoice::Local) };
    let tokens = tokens(&settings, &Worker::at(&other)).await;
    until("a warning", || !tokens.warnings().is_empty()).await;
    assert!(tokens.warnings()[0].contains("their cached prefixes are missed"), "{:?}", tokens.warnings());
    assert_eq!(tokens_of(&tokens, text("Hello")).await.1, TokenSource::Local);
}

#[tokio::test]
async fn workers_that_cannot_tokenize_do_not_replace_the_local_tokenizer() {
    let (recorder, page) = recorder();
    let _recording = metrics::set_default_local_recorder(&recorder);
    let (unable, _) = answering(|_| (StatusCode::NOT_FOUND, String::new())).await;
    let settings = TokensSettings { parity_check: true, ..with_files(TokenSourceChoice::Auto) };
    let tokens = tokens(&settings, &Worker::at(&unable)).await;
    await_line(&page, r#"pointsman_gateway_tokens_parity_total{model="m",result="unanswered"} 3"#).await;
    assert_eq!((tokens.source(), tokens.warnings()), (TokenSource::Local, Vec::new()));
}

#[tokio::test]
async fn prompts_without_tokens_are_reported() {
    let (unable, _) = answering(|_| (StatusCode::NOT_FOUND, String::new())).await;
    let tokens = tokens(&settings(TokenSourceChoice::Auto), &Worker::at(&unable)).await;
    assert_eq!(tokens.of(&ClientPrompt::Tokens(vec![1]), PromptContext::default()).await.missing, None);
    assert_eq!(tokens.warnings(), Vec::<String>::new());
    for _ in 0..5 {
        assert_eq!(tokens.of(&text("a"), PromptContext::default()).await.missing, Some("engine_failed"));
    }
    assert_eq!(tokens.of(&text("a"), PromptContext::default()).await.missing, Some("engine_paused"));
    let recent = tokens.recent();
    assert_eq!((recent.prompts, recent.missing, recent.reason), (7, 6, Some("engine_paused")));
    let expected = "6 of the last 7 prompts were routed by load only, without tokens (engine_paused): set \
                    tokens.tokenizer_file (--tokenizer), or raise tokens.engine_timeout_ms";
    assert_eq!(tokens.warnings(), [expected]);
}

async fn await_line(page: &PrometheusHandle, line: &str) {
    until(line, || page.render().contains(line)).await;
}
