//! Streams that move to another rank after a failure of their engine.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use pointsman::protocol::Engine;
use pointsman_gateway::app::Gateway;
use pointsman_gateway::settings::{GatewaySettings, TokenSourceChoice, TokensSettings};
use pointsman_trial::mock::{MockConfig, MockEngine};
use serde_json::{Value, json};
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use crate::common::directory::Directory;
use crate::common::proxy::{
    Act, Answer, Got, Scripted, gateway, get, receive, send, settings, stream, stream_end, until, worker,
};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const DONE: &str = "data: [DONE]\n\n";

/// A gateway with a model name of its own, because tests share the metrics.
struct Site {
    gateway: Gateway,
    model: String,
}

impl Site {
    async fn start(urls: &[String], migrations_max: u32) -> Self {
        Self::with(urls, migrations_max, |_| {}).await
    }

    async fn with(urls: &[String], migrations_max: u32, change: impl FnOnce(&mut GatewaySettings)) -> Self {
        Self::serving(Engine::Sglang, settings(Vec::new()).models.remove(0).tokens, urls, migrations_max, change).await
    }

    async fn serving(
        engine: Engine,
        tokens: TokensSettings,
        urls: &[String],
        migrations_max: u32,
        change: impl FnOnce(&mut GatewaySettings),
    ) -> Self {
        static SITES: AtomicUsize = AtomicUsize::new(0);
        let model = format!("migrating-{}", SITES.fetch_add(1, Ordering::Relaxed));
        let mut settings = settings((1..).zip(urls).map(|(n, url)| worker(n, url, 1)).collect());
        settings.gateway.stream_migrations_max = migrations_max;
        settings.models[0].workers.iter_mut().for_each(|worker| worker.config.engine = Some(engine));
        change(&mut settings.gateway);
        settings.models[0].tokens = tokens;
        settings.models[0].name.clone_from(&model);
        settings.models[0].upstream_name = Some("mock".to_owned());
        Self { gateway: gateway(settings).await, model }
    }

    async fn send(&self, path: &str, body: &Value) -> TcpStream {
        let mut body = body.clone();
        body["model"] = self.model.as_str().into();
        send(self.gateway.address(), "POST", path, "", body.to_string().as_bytes()).await
    }

    /// The response, with the model name of the worker.
    async fn post(&self, path: &str, body: &Value) -> Answer {
        self.answer(self.send(path, body).await).await
    }

    async fn answer(&self, connection: TcpStream) -> Answer {
        let mut answer = receive(connection).await.expect("a response");
        answer.body = answer.text().replace(&self.model, "mock").into();
        answer
    }

    /// Sends requests until the worker has received one. Returns the response to it.
    async fn reach(&self, worker: &Scripted, body: &Value) -> Answer {
        loop {
            let answer = self.post(CHAT, body).await;
            if !worker.requests().is_empty() {
                return answer;
            }
        }
    }

    /// Value of a series of the model.
    async fn counted(&self, name: &str, labels: &str) -> u64 {
        let page = get(&self.gateway, "/metrics").await;
        page.metric(&format!("pointsman_gateway_{name}{{model=\"{}\"{labels}}}", self.model), &[]) as u64
    }

    async fn migrations(&self, result: &str) -> u64 {
        self.counted("stream_migrations_total", &format!(",result=\"{result}\"")).await
    }

    async fn at_rest(&self) {
        let router = self.gateway.router(&self.model).expect("model is served").clone();
        until("all bookings have ended", || router.health().leases == 0).await;
    }
}

fn chat(more: Value) -> Value {
    let mut body = json!({ "messages": [{ "role": "user", "content": "hi" }], "stream": true });
    body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    body
}

/// Events of an attempt: a role, one text each, the end.
fn events(id: &str, texts: &[&str]) -> Vec<String> {
    let chunk = |delta: Value, finish: Option<&str>| {
        let choices = json!([{ "index": 0, "delta": delta, "finish_reason": finish }]);
        format!("data: {}\n\n", json!({ "id": id, "created": 1, "model": "mock", "choices": choices }))
    };
    let role = chunk(json!({ "role": "assistant", "content": "" }), None);
    let texts = texts.iter().map(|text| chunk(json!({ "content": text }), None));
    let end = chunk(json!({}), Some("stop"));
    std::iter::once(role).chain(texts).chain([end, DONE.to_owned()]).collect()
}

/// Text of all chunks.
fn text(answer: &Answer) -> String {
    let data = answer.text().split("\n\n").filter_map(|event| event.strip_prefix("data: "));
    let chunks = data.filter_map(|data| serde_json::from_str::<Value>(data).ok());
    let choices = chunks.map(|chunk| chunk["choices"][0].clone());
    let texts = choices
        .map(|choice| choice["delta"]["content"].as_str().or(choice["text"].as_str()).unwrap_or_default().to_owned());
    texts.collect()
}

/// A worker that sends these bytes in response to its first request and then fails with `act`. It completes each later
/// request with these texts.
async fn failing(sent: Vec<u8>, act: Act, texts: &'static [&'static str]) -> Scripted {
    let respond = move |nth| match nth {
        0 => {
            let sent = str::from_utf8(&sent).expect("text");
            stream(&[sent]).into_iter().chain([act.clone()]).collect()
        }
        _ => whole(texts),
    };
    Scripted::start(respond).await
}

fn whole(texts: &[&str]) -> Vec<Act> {
    let events = events("second", texts).concat();
    stream(&[&events]).into_iter().chain([stream_end()]).collect()
}

async fn completing(texts: &'static [&'static str]) -> Scripted {
    Scripted::start(move |_| whole(texts)).await
}

fn resumed(got: &Got) -> Value {
    serde_json::from_slice(&got.body).expect("JSON")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_fails_at_any_byte_is_resumed() {
    let all = ["one", " two", " three"];
    let events = events("first", &all);
    let bytes = events.concat();
    let text_end = bytes.find("\"finish_reason\":\"stop\"").map(|at| bytes[..at].rfind("data:").expect("a start"));
    let text_end = text_end.expect("an end");
    let first_text = events[0].len() + events[1].len();
    // Each event boundary, and positions within each event.
    let mut cuts: Vec<usize> = (first_text..text_end).step_by(37).collect();
    cuts.extend((2..5).map(|n| events[..n].iter().map(String::len).sum::<usize>()));
    for (n, cut) in cuts.into_iter().enumerate() {
        let done = bytes[..cut].matches("\n\n").count() - 1;
        let rest: &'static [&'static str] = [&[" two", " three"][..], &[" three"], &[]][done - 1];
        let act = [Act::Close, Act::Reset][n % 2].clone();
        let bad = failing(bytes[..cut].into(), act, &[]).await;
        let good = completing(rest).await;
        let site = Site::start(&[bad.url(), good.url()], 1).await;
        // The first request may be placed on either worker.
        let answer = site.post(CHAT, &chat(json!({ "max_tokens": 20 }))).await;
        let answer =
            if bad.requests().is_empty() { site.post(CHAT, &chat(json!({ "max_tokens": 20 }))).await } else { answer };
        assert!(answer.is_whole, "{cut}: {answer:?}");
        assert_eq!(text(&answer), "one two three", "{cut}");
        assert_eq!((answer.text().matches("\"role\"").count(), answer.text().matches(DONE).count()), (1, 1));
        assert!(!answer.text().contains("second"), "{cut}: the ids are those of the first attempt");
        let body = resumed(good.requests().last().expect("a request"));
        let messages = body["messages"].as_array().expect("a list");
        assert_eq!(messages.last().expect("a message")["content"], all[..done].concat(), "{cut}");
        assert_eq!((&body["max_tokens"], &body["continue_final_message"]), (&json!(20 - done), &json!(true)));
        assert_eq!(site.migrations("resumed").await, 1);
        site.at_rest().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silence_and_a_missing_end_mark_are_resumed() {
    let start = events("first", &["one"])[..2].concat();
    for act in [Act::Hang, stream_end()] {
        let bad = failing(start.clone().into(), act, &[]).await;
        let good = completing(&[" two"]).await;
        let site = Site::with(&[bad.url(), good.url()], 1, |settings| settings.idle_timeout_ms = 1_000).await;
        let answer = site.reach(&bad, &chat(json!({}))).await;
        assert!(answer.is_whole, "{answer:?}");
        assert_eq!(text(&answer), "one two");
        site.at_rest().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_error_event_is_resumed_or_forwarded() {
    let error = "data: {\"error\":{\"message\":\"engine died\",\"code\":500}}\n\n";
    let (begin, error) = (events("first", &["one"])[..2].concat(), [error, DONE].concat());
    let start = begin.clone() + &error;
    // In chunks of their own, because an error beside the first token is retried before the response starts.
    let failing = async || {
        let (begin, error) = (begin.clone(), error.clone());
        Scripted::start(move |_| stream(&[&begin, &error]).into_iter().chain([stream_end()]).collect()).await
    };
    for (migrations_max, seed) in [(1, json!(null)), (1, json!(1)), (0, json!(null))] {
        let bad = failing().await;
        let good = completing(&[" two"]).await;
        let site = Site::start(&[bad.url(), good.url()], migrations_max).await;
        let answer = site.reach(&bad, &chat(json!({ "seed": seed }))).await;
        assert!(answer.is_whole, "{answer:?}");
        let is_resumed = migrations_max == 1 && seed.is_null();
        match is_resumed {
            true => assert_eq!(text(&answer), "one two"),
            false => assert_eq!(answer.text(), start),
        }
        assert_eq!(site.migrations("resumed").await, u64::from(is_resumed));
        site.at_rest().await;
    }
    let rejecting = Scripted::start(|_| crate::common::proxy::answer("400 Bad Request", "{}")).await;
    let bad = failing().await;
    let site = Site::start(&[bad.url(), rejecting.url()], 1).await;
    let answer = site.reach(&bad, &chat(json!({}))).await;
    assert_eq!((answer.is_whole, answer.text()), (true, start.as_str()));
    assert_eq!(site.migrations("failed").await, 1);
    site.at_rest().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unsound_requests_and_output_are_cut_off_as_without_the_option() {
    let start = events("first", &["one"])[..2].concat();
    let reasoning = start.replace("\"content\":\"one\"", "\"content\":null,\"reasoning\":\"one\"");
    let cases = [
        (start.clone(), json!({ "seed": 1 }), 1, 100, "unsound"),
        (start.clone(), json!({ "tools": [{ "type": "function" }] }), 1, 100, "unsound"),
        (reasoning, json!({}), 1, 100, "unsound"),
        (start.replace("\"one\"", &format!("\"{}\"", "x".repeat(200))), json!({}), 1, 1, "too_long"),
        (start.clone(), json!({}), 0, 100, ""),
    ];
    for (start, more, migrations_max, tokens_max, result) in cases {
        let partial = format!("{start}data: {{\"cho");
        let bad = failing(partial.clone().into(), Act::Close, &[]).await;
        let good = completing(&["fine"]).await;
        let urls = [bad.url(), good.url()];
        let site =
            Site::with(&urls, migrations_max, |settings| settings.stream_migration_tokens_max = tokens_max).await;
        let answer = site.reach(&bad, &chat(more.clone())).await;
        assert!(!answer.is_whole && answer.status == 200, "{more}: {answer:?}");
        assert!(partial.starts_with(answer.text()) && answer.text().len() >= start.len(), "{more}: {answer:?}");
        if !result.is_empty() {
            assert_eq!(site.migrations(result).await, 1, "{more}");
        }
        assert_eq!(site.migrations("resumed").await, 0);
        site.at_rest().await;
    }
}

/// vLLM's template decides whether it continues the prompt: the tokens of the resume request must begin with those of the
/// prompt.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn vllm_resumes_chats_whose_tokens_continue_those_of_the_prompt() {
    let own = Directory::new();
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokens");
    let sound = std::fs::read_to_string(data.join("vision.jinja")).expect("a template");
    for (template, is_resumed) in [(sound.clone(), true), (format!("{{{{ messages | length }}}}{sound}"), false)] {
        let tokens = TokensSettings {
            source: TokenSourceChoice::Local,
            tokenizer_file: Some(data.join("tokenizer.json")),
            chat_template_file: Some(own.write("template.jinja", template)),
            parity_check: false,
            wait_ms: 60_000,
            ..TokensSettings::default()
        };
        let start = events("first", &["one"])[..2].concat();
        let bad = failing(start.into(), Act::Close, &["one"]).await;
        let good = completing(&[" two"]).await;
        let site = Site::serving(Engine::Vllm, tokens, &[bad.url(), good.url()], 1, |_| {}).await;
        let answer = site.reach(&bad, &chat(json!({}))).await;
        let expected = if is_resumed { "one two" } else { "one" };
        assert_eq!((answer.is_whole, text(&answer).as_str()), (is_resumed, expected), "{answer:?}");
        let count = if is_resumed { "resumed" } else { "unsound" };
        assert_eq!(site.migrations(count).await, 1);
        site.at_rest().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_number_of_resumptions_is_limited() {
    let start = events("first", &["one"])[..2].concat();
    let mut workers = Vec::new();
    for _ in 0..3 {
        let start = start.clone();
        workers.push(Scripted::start(move |_| stream(&[&start]).into_iter().chain([Act::Close]).collect()).await);
    }
    let urls: Vec<String> = workers.iter().map(Scripted::url).collect();
    let site = Site::start(&urls, 1).await;
    let answer = site.post(CHAT, &chat(json!({}))).await;
    assert!(!answer.is_whole, "{answer:?}");
    assert_eq!(text(&answer), "oneone");
    let reached = workers.iter().filter(|worker| !worker.requests().is_empty()).count();
    assert_eq!((reached, site.migrations("resumed").await, site.migrations("failed").await), (2, 1, 1));
    site.at_rest().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rejected_and_unreachable_resumptions_are_cut_off() {
    let start = events("first", &["one"])[..2].concat();
    let rejects = || crate::common::proxy::answer("400 Bad Request", "{\"error\":{\"message\":\"no\"}}");
    let bad = failing(start.clone().into(), Act::Close, &[]).await;
    let rejecting = Scripted::start(move |_| rejects()).await;
    let site = Site::start(&[bad.url(), rejecting.url()], 3).await;
    let answer = site.reach(&bad, &chat(json!({}))).await;
    assert!(!answer.is_whole, "{answer:?}");
    assert_eq!((text(&answer).as_str(), site.migrations("failed").await), ("one", 1));
    site.at_rest().await;

    let only = failing(start.into(), Act::Close, &[]).await;
    let site = Site::start(&[only.url()], 3).await;
    let answer = site.post(CHAT, &chat(json!({}))).await;
    assert!(!answer.is_whole, "the failed worker is excluded: {answer:?}");
    assert_eq!((only.requests().len(), site.migrations("failed").await), (1, 1));
    site.at_rest().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_during_a_resumption_leaves_no_booking() {
    let start = events("first", &["one"])[..2].concat();
    let bad = failing(start.into(), Act::Close, &["x"]).await;
    let silent = Scripted::start(|_| vec![Act::Hang]).await;
    let site = Site::start(&[bad.url(), silent.url()], 1).await;
    // Requests that are placed on the silent worker first wait there.
    let mut clients = Vec::new();
    while bad.requests().is_empty() {
        clients.push(site.send(CHAT, &chat(json!({}))).await);
        let (seen, sent) = (|| bad.requests().len() + silent.requests().len(), clients.len());
        until("the request is placed", || seen() >= sent).await;
    }
    let sent = clients.len();
    until("the resume request is placed", || silent.requests().len() >= sent).await;
    let mut client = clients.pop().expect("a client");
    let mut bytes = [0; 512];
    let read = client.read(&mut bytes).await.expect("the start of the response");
    assert!(read > 0);
    drop((client, clients));
    until("the resumption is cancelled", || silent.seen(|seen| seen.hung_up) == sent).await;
    site.at_rest().await;
}

async fn engine(seed: u64, time_scale: f64) -> MockEngine {
    let config = MockConfig { seed, time_scale, output_from_context: true, ..MockConfig::default() };
    MockEngine::start(config).await.expect("start succeeds")
}

/// Requests of each form with a sound resumption.
fn drill_request(n: usize) -> (&'static str, Value) {
    let limits = json!({ "max_tokens": 300, "stream_options": { "include_usage": true } });
    let (path, mut body) = match n % 3 {
        0 => (CHAT, json!({ "messages": [{ "role": "user", "content": format!("Question {n}?") }] })),
        1 => (COMPLETIONS, json!({ "prompt": format!("Text {n}:") })),
        _ => {
            let prompt: Vec<_> = (0..70).map(|i| n * 1_000 + i).collect();
            (COMPLETIONS, json!({ "prompt": prompt, "return_token_ids": true }))
        }
    };
    let fields = body.as_object_mut().expect("an object");
    fields.extend(limits.as_object().expect("an object").clone());
    fields.insert("stream".to_owned(), json!(true));
    (path, body)
}

fn usage(answer: &Answer) -> Value {
    let data = answer.text().split("\n\n").filter_map(|event| event.strip_prefix("data: "));
    let chunks = data.filter_map(|data| serde_json::from_str::<Value>(data).ok());
    let mut usage = chunks.map(|chunk| chunk["usage"].clone()).find(|usage| !usage.is_null()).unwrap_or_default();
    usage.as_object_mut().expect("a usage").remove("prompt_tokens_details");
    usage
}

/// One of four engines restarts while all streams run, with the default limit of resumptions. Every stream equals the one of an engine without failures.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_survive_the_failure_of_an_engine() {
    // A quarter breaks off, more than the budget of retries allows.
    let streams = 60;
    let reference = engine(7, 0.0).await;
    let single = Site::start(&[reference.url()], 0).await;
    let mut expected = BTreeMap::new();
    for n in 0..streams {
        let (path, body) = drill_request(n);
        let answer = single.post(path, &body).await;
        expected.insert(n, (text(&answer), usage(&answer)));
    }
    let mut engines = Vec::new();
    for _ in 0..4 {
        engines.push(engine(7, 0.5).await); // slower than real time: the streams outlast the start of all
    }
    let urls: Vec<String> = engines.iter().map(MockEngine::url).collect();
    // Without heartbeats the first byte of a response comes from an engine.
    let site = Arc::new(
        Site::with(&urls, GatewaySettings::default().stream_migrations_max, |gateway| {
            (gateway.heartbeat_after_ms, gateway.retry_share_max) = (0, 0.0);
        })
        .await,
    );
    let begun = Arc::<AtomicUsize>::default();
    let mut clients = JoinSet::new();
    for n in 0..streams {
        let (path, body) = drill_request(n);
        let (site, begun) = (Arc::clone(&site), Arc::clone(&begun));
        clients.spawn(async move {
            let connection = site.send(path, &body).await;
            connection.peek(&mut [0]).await.expect("a response");
            begun.fetch_add(1, Ordering::Relaxed);
            (n, site.answer(connection).await)
        });
    }
    // The last engine stops in the middle of the streams.
    until("all streams have begun", || begun.load(Ordering::Relaxed) == streams).await;
    engines[3].restart(engines[3].config().dialect).await.expect("the ports are free");
    while let Some(ended) = clients.join_next().await {
        let (n, answer) = ended.expect("no panic");
        let (expected_text, expected_usage) = &expected[&n];
        assert!(answer.is_whole, "{n}: {answer:?}");
        assert_eq!(&text(&answer), expected_text, "{n}");
        assert_eq!(&usage(&answer), expected_usage, "{n}");
        assert_eq!(answer.text().matches(DONE).count(), 1, "{n}");
    }
    assert!(site.migrations("resumed").await > 0, "the engine served some streams");
    site.at_rest().await;
    for engine in engines {
        engine.shutdown().await;
    }
}
