//! Tests of the load generator against loopback endpoints with configurable responses: correct, invalid, late or
//! missing.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use clap::Parser;
use http_body_util::BodyExt as _;
use hyper::body::{Body, Bytes, Frame, Incoming};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use pointsman_bench::load::Load;
use pointsman_bench::results::{ClientHealth, RequestRecord, Run};
use serde_json::{Value, json};
use tokio::net::TcpListener;

/// State of a response after its last event.
#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    Whole,
    Cut,
    Never,
}

/// One response.
#[derive(Clone, Debug)]
struct Reply {
    status: StatusCode,
    kind: &'static str,
    rank: &'static str,
    events: Vec<String>,
    end: End,
    /// Delay before the response head.
    delay: Duration,
}

/// Body of a [`Reply`] with one event per frame.
struct Events(VecDeque<String>, End);

impl Body for Events {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        match (self.0.pop_front(), self.1) {
            (Some(event), _) => Poll::Ready(Some(Ok(Frame::data(event.into())))),
            (None, End::Whole) => Poll::Ready(None),
            (None, End::Cut) => Poll::Ready(Some(Err(io::Error::other("cut")))),
            (None, End::Never) => Poll::Pending,
        }
    }
}

impl Reply {
    /// A completion of `tokens` tokens for a prompt with `cached` cached tokens.
    fn tokens(tokens: usize, cached: u64) -> Self {
        let token = |n| format!("data: {}\n\n", json!({"choices": [{"text": format!(" t{n}"), "index": 0}]}));
        let usage = json!({
            "prompt_tokens": 77,
            "completion_tokens": tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        });
        let mut events: Vec<String> = (0..tokens).map(token).collect();
        events.push(format!("data: {}\n\n", json!({"choices": [], "usage": usage})));
        events.push("data: [DONE]\n\n".to_owned());
        Self::of(events)
    }

    fn of(events: Vec<String>) -> Self {
        let (status, kind, rank) = (StatusCode::OK, "text/event-stream; charset=utf-8", "a");
        Self { status, kind, rank, events, end: End::Whole, delay: Duration::ZERO }
    }

    fn status(status: u16, body: &str) -> Self {
        let status = StatusCode::from_u16(status).expect("a status");
        Self { status, kind: "application/json", ..Self::of(vec![body.to_owned()]) }
    }
}

/// Received requests of a server: path, key and body.
type Seen = Arc<Mutex<Vec<(String, Option<String>, Value)>>>;

/// Serves the n-th request with the response of `reply`.
async fn serve(reply: impl Fn(usize) -> Reply + Send + Sync + 'static) -> (SocketAddr, Seen) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let (address, seen) = (listener.local_addr().expect("bound"), Seen::default());
    let (reply, log) = (Arc::new(reply), Arc::clone(&seen));
    drop(tokio::spawn(async move {
        loop {
            let (socket, _) = listener.accept().await.expect("accepted");
            let (reply, log) = (Arc::clone(&reply), Arc::clone(&log));
            let service = service_fn(move |request: Request<Incoming>| {
                let (reply, log) = (Arc::clone(&reply), Arc::clone(&log));
                async move { Ok::<_, Infallible>(answer(request, &*reply, &log).await) }
            });
            drop(tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(socket), service)));
        }
    }));
    (address, seen)
}

async fn answer(
    request: Request<Incoming>,
    reply: &(dyn Fn(usize) -> Reply + Send + Sync),
    log: &Seen,
) -> Response<Events> {
    let path = request.uri().path().to_owned();
    let key = request.headers().get(AUTHORIZATION).map(|key| key.to_str().expect("ASCII").to_owned());
    let body = request.into_body().collect().await.expect("a complete body").to_bytes();
    let number = {
        let mut log = log.lock().expect("alive");
        log.push((path, key, serde_json::from_slice(&body).expect("JSON")));
        log.len() - 1
    };
    let Reply { status, kind, rank, events, end, delay } = reply(number);
    tokio::time::sleep(delay).await;
    let response = Response::builder().status(status).header(CONTENT_TYPE, kind).header("x-rank", rank);
    response.body(Events(events.into(), end)).expect("a head")
}

#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    load: Load,
}

fn load(address: SocketAddr, arguments: &str) -> Load {
    let url = format!("http://{address}");
    let fixed = ["load", "--model", "m", "--url", &url];
    Arguments::try_parse_from(fixed.into_iter().chain(arguments.split_whitespace())).expect("arguments").load
}

async fn run(address: SocketAddr, arguments: &str) -> (Run, ClientHealth) {
    let load = load(address, arguments);
    load.send(load.workload().expect("a workload")).await.expect("sent")
}

/// A small workload: prompts of 16 tokens, answers of 5.
const SMALL: &str = "--workload shared-prefix:prefix_tokens=8,own_tokens=8,output_tokens=5";

fn failures(run: &Run) -> Vec<Option<&str>> {
    run.requests.iter().map(|request| request.failure.as_deref()).collect()
}

#[tokio::test]
async fn complete_answers_are_recorded_with_times_usage_and_rank() {
    let reply = |n| Reply { rank: ["a", "b", "a"][n % 3], ..Reply::tokens(5, 16 * u64::from(n > 0)) };
    let (address, seen) = serve(reply).await;
    let key = std::env::temp_dir().join(format!("pointsman-load-key-{}", std::process::id()));
    std::fs::write(&key, "secret\n").expect("written");
    let flags = "--limit 3 --concurrency 1 --warmup 1 --rank-header x-rank --api-key-file";
    let (run, health) = run(address, &format!("{SMALL} {flags} {}", key.display())).await;
    std::fs::remove_file(&key).expect("removed");

    assert_eq!(failures(&run), [None, None, None]);
    assert_eq!(
        run.requests.iter().map(|request| request.cached_tokens).collect::<Vec<_>>(),
        [Some(0), Some(16), Some(16)]
    );
    assert_eq!(run.requests.iter().map(|request| request.rank).collect::<Vec<_>>(), [Some(0), Some(1), Some(0)]);
    for RequestRecord { due_us, sent_us, first_token_us, ended_us, prompt_tokens, output_tokens, .. } in &run.requests {
        let times = [Some(*due_us), Some(*sent_us), *first_token_us, *ended_us, Some(run.ended_us)];
        assert!(times.is_sorted() && !times.contains(&None), "{times:?}");
        assert_eq!((*prompt_tokens, *output_tokens), (77, 5));
    }
    // Two requests after the warm-up, four gaps each.
    assert_eq!((run.itl_us.len(), run.ranks, run.warmup_requests), (8, 2, 1));
    assert!(health.cpu_share > 0.0, "{health:?}");

    let seen = seen.lock().expect("alive");
    let expected = load(address, SMALL).workload().expect("a workload");
    for ((path, key, body), request) in seen.iter().zip(&expected.requests) {
        assert_eq!((path.as_str(), key.as_deref()), ("/v1/completions", Some("Bearer secret")));
        assert_eq!((&body["prompt"], &body["min_tokens"]), (&json!(request.tokens()), &json!(5)));
        assert!(body["max_tokens"].as_u64() >= Some(1_024), "a ceiling: {body}");
        assert_eq!((&body["stream"], &body["stream_options"]), (&json!(true), &json!({"include_usage": true})));
    }
}

#[tokio::test]
async fn every_failure_is_recorded_with_its_reason() {
    let first = |reply: Reply, end| Reply { events: reply.events[..2].to_vec(), end, ..reply };
    let replies = [
        Reply::tokens(5, 0),
        Reply::status(503, "{\"error\": {\"code\": \"queue_full\", \"type\": \"rate_limit_error\"}}"),
        Reply::status(500, "<html>"),
        Reply::status(200, "{\"choices\": []}"),
        first(Reply::tokens(5, 0), End::Whole),
        first(Reply::tokens(5, 0), End::Cut),
        first(Reply::tokens(5, 0), End::Never),
        Reply { end: End::Never, delay: Duration::from_secs(600), ..Reply::tokens(5, 0) },
        Reply::of(vec!["data: {\"error\": {\"code\": \"worker_failed\"}}\n\n".to_owned()]),
        Reply::of(vec!["data: hello\n\n".to_owned()]),
        Reply::of(vec!["data: [DONE]\n\n".to_owned()]),
        Reply::tokens(5, 0),
    ];
    let (address, _) = serve(move |n| replies[n].clone()).await;
    let (run, _) = run(address, &format!("{SMALL} --limit 12 --concurrency 1 --timeout 1")).await;
    let expected = [
        None,
        Some("status 503 (queue_full)"),
        Some("status 500"),
        Some("the response is not an event stream"),
        Some("the stream ended without [DONE]"),
        Some("connection closed early: "),
        Some("no response within 1 s"),
        Some("no response within 1 s"),
        Some("error in the stream (worker_failed)"),
        Some("an event is not a valid chunk"),
        Some("the stream contained no token"),
        None,
    ];
    for (n, (found, expected)) in failures(&run).into_iter().zip(expected).enumerate() {
        let alike = match (found, expected) {
            (Some(found), Some(expected)) => found.starts_with(expected),
            (found, expected) => found == expected,
        };
        assert!(alike, "request {n}: {found:?} instead of {expected:?}");
    }
    // The part received before the failure is kept.
    let cut = &run.requests[6];
    assert!(cut.first_token_us.is_some() && cut.ended_us > Some(cut.sent_us + 999_000), "{cut:?}");
    assert_eq!((cut.output_tokens, run.requests[7].first_token_us), (2, None));
}

#[tokio::test]
async fn refused_connections_are_failures_of_each_request() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("bound");
    drop(listener);
    let (run, _) = run(address, &format!("{SMALL} --limit 3 --rate 1000")).await;
    assert!(failures(&run).iter().all(|failure| failure.expect("failed").starts_with("cannot connect: ")), "{run:?}");
}

#[test]
fn a_client_without_free_connections_reports_late_arrivals() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("runtime");
    let slow = |_| Reply { delay: Duration::from_millis(60), ..Reply::tokens(5, 4) };
    let (address, _) = runtime.block_on(serve(slow));
    let (mut out, mut warnings) = (Vec::new(), Vec::new());
    let short =
        load(address, &format!("{SMALL} --limit 6 --warmup 0 --rate 1000 --connections-max 1 --json --label slow"));
    short.run(&mut out, &mut warnings).expect("figures");
    let warnings = String::from_utf8(warnings).expect("text");
    assert!(warnings.contains("arrivals were late"), "{warnings}");
    let figures: Value = serde_json::from_slice(&out).expect("JSON");
    assert_eq!((&figures["requests"], &figures["answered"]), (&json!(6), &json!(6)));
    assert!(figures["ttft_seconds"]["p90"].as_f64() > Some(0.24), "{figures}");
    assert_eq!(figures["policy"], json!("slow"));

    let strict = load(address, &format!("{SMALL} --limit 6 --rate 1000 --connections-max 1 --strict"));
    let error = strict.run(io::sink(), io::sink()).expect_err("refused").to_string();
    assert!(error.contains("arrivals were late"), "{error}");
}

#[test]
fn invalid_arguments_are_rejected_by_name() {
    let load = |arguments: &str| {
        let line = ["load", "--model", "m", "--limit", "3"].into_iter().chain(arguments.split_whitespace());
        match Arguments::try_parse_from(line) {
            Ok(Arguments { load }) => load.run(io::sink(), io::sink()).map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        }
    };
    for (arguments, expected) in [
        ("--url ftp://host", "\"ftp://host\" is not a URL such as http://127.0.0.1:8000"),
        ("--url localhost:80", "is not a URL"),
        ("--url http://h --rate 0", "\"0\" is not a rate"),
        ("--url http://h --rate 1 --concurrency 2", "cannot be used with"),
        ("--url http://h --rate 1 --speedup 2", "cannot be used with"),
        ("--url http://h --warmup 100%", "warmup covers all 3 requests"),
        ("--url http://h --api-key-file /nowhere", "cannot read the key in /nowhere"),
        ("--url http://h --rank-header a:b", "\"a:b\" is not a valid header name"),
        ("--url http://h --extra-body {\"model\":1}", "model is set by another flag"),
        ("--url http://h --vocabulary 1", "--vocabulary"),
    ] {
        let error = load(arguments).expect_err(arguments);
        assert!(error.contains(expected), "{arguments}: {error}");
    }
}
