//! Workers that fail: before a response, at every point of it, with every status, or all at the same time.

use std::time::Duration;

use pointsman::Outcome;
use tokio::task::{JoinSet, LocalSet};
use tokio::time::Instant;

use crate::common::proxy::{
    Act, Answer, EVENT, FINE, PATIENCE, Scripted, chunk, chunked_head, full_response, gateway, until, write,
};
use crate::faults::{
    Client, counting_outcomes, expect_idle, expect_no_failure, expect_outcome, kept_request, metric, settings,
};

/// The response to the client if every worker fails in the same way.
#[derive(Clone, Copy, Debug)]
enum ExpectedError {
    /// The gateway's own error.
    Gateway(u16, &'static str),
    /// The worker's response with its body unchanged.
    Worker(u16, &'static str),
}

/// One failure before the first byte.
#[derive(Clone)]
struct Fault {
    name: &'static str,
    greets: Vec<Act>,
    answers: Vec<Act>,
    expected: ExpectedError,
    /// Label value of the retries metric.
    reason: &'static str,
    /// Outcome counted by the router. `None`: it depends on the component that detects the failure first.
    outcome: Option<Outcome>,
}

fn fault(name: &'static str, answers: Vec<Act>) -> Fault {
    let expected = ExpectedError::Gateway(502, "worker_failed");
    Fault { name, greets: Vec::new(), answers, expected, reason: "broken", outcome: Some(Outcome::Reset) }
}

fn greeting(name: &'static str, greets: Vec<Act>) -> Fault {
    Fault { greets, ..fault(name, Vec::new()) }
}

fn status(name: &'static str, status: &str, body: &'static str, reason: &'static str) -> Fault {
    let expected = ExpectedError::Worker(name[..3].parse().expect("a status"), body);
    let refused = Outcome::Refused { retry_after: None };
    let outcome = Some(if reason == "server_error" { Outcome::ServerError } else { refused });
    Fault { expected, reason, outcome, ..fault(name, vec![full_response(status, body)]) }
}

const HEAD: &str = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 99\r\n\r\n";

/// Failures that end without a timeout.
fn broken() -> Vec<Fault> {
    let many_headers: String = (0..1_100).map(|n| format!("x-{n}: 1\r\n")).collect();
    let is_error = |fault: Fault| Fault { outcome: Some(Outcome::ServerError), ..fault };
    vec![
        Fault { reason: "", outcome: None, ..greeting("reset after accept", vec![Act::Reset]) },
        greeting("closed after accept", vec![Act::Close]),
        greeting("sends before the request", vec![write("hello\r\n"), Act::Hang]),
        fault("reset after the request", vec![Act::Reset]),
        fault("closed after the request", vec![Act::Close]),
        fault("reset in the head", vec![write("HTTP/1.1 200 OK\r\ncont"), Act::Reset]),
        fault("closed in the head", vec![write("HTTP/1.1 200 OK\r\ncont"), Act::Close]),
        fault("closed after the head", vec![write(HEAD), Act::Close]),
        fault("reset after the head", vec![write(HEAD), Act::Reset]),
        fault("closed after the head of chunks", vec![chunked_head(), Act::Close]),
        fault("closed in the first chunk's length", vec![chunked_head(), write("5"), Act::Close]),
        fault("no HTTP", vec![write("220 mail ready\r\n\r\n"), Act::Hang]),
        fault("binary", vec![write([0x16, 3, 1, 0, 0xff, 0, 0, 0xfe]), write([0xff; 100]), Act::Hang]),
        fault("an invalid status", vec![write("HTTP/1.1 2x0 OK\r\n\r\n"), Act::Hang]),
        fault("invalid chunks", vec![chunked_head(), write("zz\r\nabcd\r\n"), Act::Hang]),
        fault("a chunk beyond all numbers", vec![chunked_head(), write("fffffffffffffffff\r\n"), Act::Hang]),
        fault(
            "two lengths",
            vec![write("HTTP/1.1 200 OK\r\ncontent-length: 4\r\ncontent-length: 5\r\n\r\nabcde"), Act::Hang],
        ),
        fault("an invalid length", vec![write("HTTP/1.1 200 OK\r\ncontent-length: -4\r\n\r\nabcd"), Act::Hang]),
        fault("too many headers", vec![write(format!("HTTP/1.1 200 OK\r\n{many_headers}\r\n")), Act::Hang]),
        fault(
            "a huge header",
            vec![write(format!("HTTP/1.1 200 OK\r\nx: {}\r\n\r\n", "x".repeat(2 << 20))), Act::Hang],
        ),
        fault("an endless head", vec![write("HTTP/1.1 200 OK\r\nx: "), Act::Flood(vec![b'x'; 4096])]),
        is_error(fault(
            "another protocol",
            vec![write("HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n"), Act::Hang],
        )),
        is_error(fault(
            "elsewhere",
            vec![write("HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:9/\r\ncontent-length: 0\r\n\r\n")],
        )),
        is_error(fault("not modified", vec![write("HTTP/1.1 304 Not Modified\r\ncontent-length: 4\r\n\r\nabcd")])),
        status("429", "429 Busy", "{\"busy\":1}", "busy"),
        status("429 without a body", "429 Busy", "", "busy"),
        status("500", "500 Oops", "{\"oops\":1}", "server_error"),
        status("500 without a body", "500 Oops", "", "server_error"),
        status("502", "502 Bad", "bad", "server_error"),
        status("503", "503 Later", "later", "busy"),
        status("503 without a body", "503 Later", "", "busy"),
        status("504", "504 Late", "late", "server_error"),
        Fault {
            expected: ExpectedError::Gateway(502, "worker_failed"),
            answers: vec![write("HTTP/1.1 500 Oops\r\n\r\n"), Act::Flood(vec![b'x'; 4096])],
            ..status("500 without an end", "", "", "server_error")
        },
        Fault {
            expected: ExpectedError::Gateway(502, "worker_failed"),
            answers: vec![write("HTTP/1.1 500 Oops\r\ncontent-length: 9\r\n\r\nabc"), Act::Reset],
            ..status("500 that breaks off", "", "", "server_error")
        },
    ]
}

/// Failures that end by a timeout only.
fn silent() -> Vec<Fault> {
    let late = |fault: Fault| Fault {
        expected: ExpectedError::Gateway(504, "worker_timeout"),
        reason: "timeout",
        outcome: Some(Outcome::Timeout),
        ..fault
    };
    let go_on = Act::Flood(b"HTTP/1.1 100 Continue\r\n\r\n".repeat(64));
    vec![
        late(greeting("silent after accept", vec![Act::Hang])),
        late(fault("silent after the request", vec![Act::Hang])),
        late(fault("silent in the head", vec![write("HTTP/1.1 200 OK\r\ncont"), Act::Hang])),
        late(fault("silent after the head", vec![write(HEAD), Act::Hang])),
        late(fault("silent after the head of chunks", vec![chunked_head(), Act::Hang])),
        late(fault("silent in the first chunk", vec![chunked_head(), write("5\r\n"), Act::Hang])),
        late(fault("silent in an error", vec![write("HTTP/1.1 500 Oops\r\ncontent-length: 9\r\n\r\nabc"), Act::Hang])),
        late(fault("endless 100 Continue", vec![go_on])),
    ]
}

/// A worker with this fault.
async fn start(fault: &Fault) -> Scripted {
    let answers = fault.answers.clone();
    Scripted::with(fault.greets.clone(), move |_, _| answers.clone()).await
}

fn check(name: &str, answer: &Answer, expected: ExpectedError) {
    match expected {
        ExpectedError::Gateway(status, code) => {
            assert_eq!((answer.status, answer.code().as_str()), (status, code), "{name}: {answer:?}");
            assert_eq!(answer.header("retry-after"), Some("1"), "{name}");
        }
        ExpectedError::Worker(status, body) => {
            assert_eq!((answer.status, answer.text()), (status, body), "{name}: {answer:?}")
        }
    }
    assert!(answer.is_whole && answer.header("x-request-id").is_some(), "{name}: {answer:?}");
}

fn shown(step: &Act) -> String {
    match step {
        Act::Send(bytes) | Act::Flood(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        Act::Wait | Act::Close | Act::Reset | Act::Hang => format!("{step:?}"),
    }
}

const RETRIES: &str = "pointsman_gateway_retries_total";

/// With a healthy second worker the client receives a normal response.
async fn expect_retry_on_healthy_worker(fault: Fault, first_byte_timeout_ms: u64) {
    let (bad, good) = (start(&fault).await, Scripted::responding_with(vec![full_response("200 OK", FINE)]).await);
    let mut settings = counting_outcomes(settings(&[bad.url(), good.url()]));
    settings.gateway.first_byte_timeout_ms = first_byte_timeout_ms;
    let gateway = gateway(settings).await;
    let mut request_count = 0;
    // Round-robin: the second request starts at the failing worker at the latest.
    while bad.seen(|seen| seen.accepted) == 0 {
        let answer = Client::ask(&gateway).await.answer().await.expect("response received");
        assert_eq!((answer.status, answer.text()), (200, FINE), "{}: {answer:?}", fault.name);
        request_count += 1;
    }
    assert_eq!((bad.seen(|seen| seen.accepted), good.request_count()), (1, request_count), "{}", fault.name);
    assert!(request_count <= 2, "{}", fault.name);
    match fault.outcome {
        Some(Outcome::Ok) => expect_no_failure(&gateway).await,
        Some(outcome) => expect_outcome(&gateway, fault.name, outcome).await,
        None => {}
    }
}

/// If all workers fail in this way, the client receives the error after one attempt at each.
async fn expect_error_from_all_workers(fault: Fault, first_byte_timeout_ms: u64) {
    let workers = [start(&fault).await, start(&fault).await];
    let mut settings = settings(&[workers[0].url(), workers[1].url()]);
    settings.gateway.first_byte_timeout_ms = first_byte_timeout_ms;
    let gateway = gateway(settings).await;
    let answer = Client::ask(&gateway).await.answer().await.expect("response received");
    check(fault.name, &answer, fault.expected);
    let accepted = workers.each_ref().map(|worker| worker.seen(|seen| seen.accepted));
    assert_eq!(accepted, [1, 1], "{}", fault.name);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failures_before_the_first_byte_are_retried_then_reported() {
    alone!();
    let none = gateway(settings(&[])).await;
    let timeout_ms = u64::try_from(PATIENCE.as_millis()).expect("a minute");
    for fault in broken() {
        let label = format!("reason=\"{}", fault.reason);
        let before = metric(&none, RETRIES, &[&label]).await;
        expect_retry_on_healthy_worker(fault.clone(), timeout_ms).await;
        expect_error_from_all_workers(fault.clone(), timeout_ms).await;
        assert_eq!(metric(&none, RETRIES, &[&label]).await - before, 2.0, "{}", fault.name);
    }
    expect_idle(&none).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn timeouts_before_the_first_byte_are_retried_then_reported() {
    alone!();
    let none = gateway(settings(&[])).await;
    let before = metric(&none, RETRIES, &["reason=\"timeout\""]).await;
    let all_at_once = async {
        let mut all = JoinSet::new();
        for fault in silent() {
            // Long enough for the healthy worker on a busy machine.
            all.spawn_local(expect_retry_on_healthy_worker(fault.clone(), 3_000));
            all.spawn_local(expect_error_from_all_workers(fault, 1_000));
        }
        while let Some(ended) = all.join_next().await {
            ended.expect("no panic");
        }
    };
    LocalSet::new().run_until(all_at_once).await;
    let retries = metric(&none, RETRIES, &["reason=\"timeout\""]).await - before;
    assert_eq!(retries, 2.0 * silent().len() as f64);
    expect_idle(&none).await;
}

/// Unusual responses and errors of the request itself: the response is final, and surplus bytes after it corrupt no
/// other response.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_responses_are_forwarded_without_outcome() {
    alone!();
    let head = "content-type: text/event-stream\r\n";
    let evil_body = FINE.replace("fine", "evil");
    let (length, chunk) = (FINE.len(), format!("{:x}", FINE.len()));
    let of = |body: &str| format!("HTTP/1.1 200 OK\r\n{head}content-length: {length}\r\n\r\n{body}");
    let (fine, evil) = (of(FINE), of(&evil_body));
    let bare = |text: String| vec![write(text)];
    let cases = [
        (vec![full_response("400 Bad", "{\"no\":1}")], 400, "{\"no\":1}"),
        (vec![full_response("400 Bad", "")], 400, ""),
        (vec![full_response("404 None", "none")], 404, "none"),
        (vec![full_response("422 Odd", "odd")], 422, "odd"),
        (vec![full_response("422 Odd", "")], 422, ""),
        (bare(format!("{fine}{evil}")), 200, FINE),
        (vec![write(&fine), Act::Flood(b"evil".repeat(1024))], 200, FINE),
        (bare(format!("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nx: y\r\n\r\n{fine}")), 200, FINE),
        (vec![write(format!("HTTP/1.0 200 OK\r\n{head}\r\n{FINE}")), Act::Close], 200, FINE),
        (vec![write(format!("HTTP/1.1 200 OK\r\n{head}\r\n{FINE}")), Act::Close], 200, FINE),
        (
            bare(format!(
                "HTTP/1.1 200 OK\r\n{head}content-length: 9\r\ntransfer-encoding: chunked\r\n\r\n{chunk}\r\n{FINE}\r\n0\r\n\r\n{evil}"
            )),
            200,
            FINE,
        ),
        (bare(fine.replace(head, &format!("{head}content-length: {length}\r\n"))), 200, FINE),
        (
            bare(format!(
                "HTTP/1.1 200 OK\r\n{head}transfer-encoding: chunked\r\n\r\n{chunk};x=y\r\n{FINE}\r\n0\r\nx-trailer: 1\r\n\r\n"
            )),
            200,
            FINE,
        ),
    ];
    for (steps, status, text) in cases {
        let shown = shown(&steps[0]);
        let worker = Scripted::with(Vec::new(), move |n, _| {
            if n == 0 { steps.clone() } else { vec![full_response("200 OK", &FINE.replace("fine", "next"))] }
        })
        .await;
        // With a single worker, a retry would show up as a second request at this worker.
        let gateway = gateway(counting_outcomes(settings(&[worker.url()]))).await;
        let answer = Client::ask(&gateway).await.answer().await.expect("response received");
        assert!((answer.status, answer.text(), answer.is_whole) == (status, text, true), "{shown}: {answer:?}");
        let lengths = answer.head.to_ascii_lowercase().matches("content-length:").count();
        assert_eq!((worker.request_count(), lengths <= 1), (1, true), "{shown}: {}", answer.head);
        for _ in 0..3 {
            let next = Client::ask(&gateway).await.answer().await.expect("response received");
            let next_text = FINE.replace("fine", "next");
            assert_eq!((next.status, next.text()), (200, next_text.as_str()), "{shown}");
        }
        expect_no_failure(&gateway).await;
        expect_idle(&gateway).await;
    }
}

const BROKEN: &str = "pointsman_gateway_streams_broken_total";

/// A worker sends `begins`, fails with `ends`, and the client must have received exactly `expected`.
async fn cut(begins: Vec<Act>, ends: Act, expected: &str, outcome: Outcome) {
    let shown = format!("{} after {expected:?}", shown(&ends));
    let steps = [begins, vec![Act::Wait, ends]].concat();
    let workers = [Scripted::responding_with(steps.clone()).await, Scripted::responding_with(steps).await];
    let mut settings = counting_outcomes(settings(&[workers[0].url(), workers[1].url()]));
    let is_silence = outcome == Outcome::Timeout;
    if is_silence {
        settings.gateway.idle_timeout_ms = 100;
    }
    let gateway = gateway(settings).await;
    let reason = if is_silence { "reason=\"idle\"" } else { "reason=\"broken\"" };
    let before = metric(&gateway, BROKEN, &[reason]).await;
    let mut client = Client::ask(&gateway).await;
    client.expect_body(expected.as_bytes()).await;
    workers.iter().for_each(|worker| worker.release(1));
    let answer = client.answer().await.expect("response started");
    assert!(answer.status == 200 && !answer.is_whole && answer.text() == expected, "{shown}: {answer:?}");
    assert_eq!(workers.iter().map(|worker| worker.seen(|seen| seen.accepted)).sum::<usize>(), 1, "{shown}");
    workers[0].wait_until_closed().await;
    workers[1].wait_until_closed().await;
    expect_outcome(&gateway, &shown, outcome).await;
    expect_idle(&gateway).await;
    assert_eq!(metric(&gateway, BROKEN, &[reason]).await - before, 1.0, "{shown}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_are_cut_off_at_the_failing_chunk() {
    alone!();
    for chunks in 1..=2 {
        let frames: Vec<_> = (0..chunks).map(|n| format!("data: {{\"n\":{n}}}\n\n")).collect();
        let begins = || std::iter::once(chunked_head()).chain(frames.iter().map(chunk)).collect::<Vec<_>>();
        let expected = frames.concat();
        cut(begins(), Act::Reset, &expected, Outcome::Reset).await;
        cut(begins(), Act::Close, &expected, Outcome::Reset).await;
        cut(begins(), write("zz\r\n"), &expected, Outcome::Reset).await;
        cut(begins(), Act::Hang, &expected, Outcome::Timeout).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn responses_of_known_length_are_cut_off_at_the_failing_byte() {
    alone!();
    for more in ["", "d", "data: [DONE"] {
        let expected = &*[EVENT, more].concat();
        for (ends, outcome) in
            [(Act::Reset, Outcome::Reset), (Act::Close, Outcome::Reset), (Act::Hang, Outcome::Timeout)]
        {
            cut(vec![write(HEAD), write(expected)], ends, expected, outcome).await;
        }
    }
}

/// As engines do with idle connections, but in the moment of each second request.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn closed_kept_connections_take_no_retry() {
    const REQUESTS: usize = 30;
    alone!();
    for ends in [Act::Reset, Act::Close] {
        let closing = || {
            let ends = ends.clone();
            let served = full_response("200 OK", FINE);
            Scripted::with(Vec::new(), move |n, _| if n % 2 == 0 { vec![served.clone()] } else { vec![ends.clone()] })
        };
        let workers = [closing().await, closing().await];
        let mut settings = counting_outcomes(settings(&workers.each_ref().map(Scripted::url)));
        (settings.gateway.attempts_max, settings.gateway.retry_share_max) = (1, 0.0);
        let gateway = gateway(settings).await;
        // One core, which keeps the connections.
        let mut client = Client::connect(gateway.address()).await;
        for n in 0..REQUESTS {
            let answer = client.ask_again().await;
            assert_eq!((answer.status, answer.text()), (200, FINE), "{n}: {answer:?}");
        }
        drop(client);
        let ended: usize = workers.iter().map(|worker| worker.request_count() / 2).sum();
        assert!(ended + 2 >= REQUESTS, "{ended}: nearly every request after the first ones finds a kept connection");
        expect_no_failure(&gateway).await;
        expect_idle(&gateway).await;
    }
}

/// All connections are kept, and each ends with its next request.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_outlasts_several_closed_connections() {
    const PER_CORE: usize = 4;
    alone!();
    let count = PER_CORE * std::thread::available_parallelism().map_or(1, usize::from);
    let worker = Scripted::with(Vec::new(), move |n, _| {
        let served = full_response("200 OK", FINE);
        if n < count {
            vec![Act::Wait, served]
        } else if n < count + PER_CORE {
            vec![Act::Reset]
        } else {
            vec![served]
        }
    })
    .await;
    let mut settings = counting_outcomes(settings(&[worker.url()]));
    settings.gateway.attempts_max = 1;
    let gateway = gateway(settings).await;
    let mut clients = Vec::new();
    for _ in 0..count {
        let mut client = Client::connect(gateway.address()).await;
        assert!(client.write(kept_request()).await);
        clients.push(client);
    }
    until("each client has a connection", || worker.request_count() == count).await;
    worker.release(count);
    for client in &mut clients {
        client.expect_body(FINE.as_bytes()).await;
    }
    let answer = clients[0].ask_again().await;
    assert_eq!((answer.status, answer.text()), (200, FINE), "{answer:?}");
    assert!(worker.request_count() > count + 1, "kept connections of the core were used");
    drop(clients);
    expect_no_failure(&gateway).await;
    expect_idle(&gateway).await;
}

/// An engine that has worked on the request has failed, although its connection was kept.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kept_connection_that_ends_late_counts_as_a_failure() {
    alone!();
    let worker = Scripted::with(Vec::new(), |n, _| match n {
        0 => vec![full_response("200 OK", FINE)],
        _ => vec![Act::Wait, Act::Reset],
    })
    .await;
    let mut settings = counting_outcomes(settings(&[worker.url()]));
    settings.gateway.attempts_max = 1;
    let gateway = gateway(settings).await;
    let mut client = Client::connect(gateway.address()).await;
    assert_eq!(client.ask_again().await.text(), FINE);
    let late = async {
        until("the worker has it", || worker.request_count() == 2).await;
        tokio::time::sleep(Duration::from_secs(3)).await;
        worker.release(1);
    };
    let (answer, ()) = tokio::join!(client.ask_again(), late);
    assert_eq!(answer.status, 502);
    drop(client);
    assert_eq!(
        (worker.request_count(), worker.seen(|seen| seen.accepted)),
        (2, 1),
        "one attempt, on the kept connection"
    );
    expect_outcome(&gateway, "after work", Outcome::Reset).await;
    expect_idle(&gateway).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn retries_stay_within_budget_in_an_outage() {
    const REQUESTS: usize = 200;
    alone!();
    let dead = || Scripted::with(vec![Act::Reset], |_, _| Vec::new());
    let workers = [dead().await, dead().await, dead().await];
    let gateway = gateway(settings(&workers.each_ref().map(Scripted::url))).await;
    let denied = metric(&gateway, "pointsman_gateway_retries_denied_total", &[]).await;
    let begun = Instant::now();
    for _ in 0..REQUESTS / 10 {
        let mut clients = Vec::new();
        for _ in 0..10 {
            clients.push(Client::ask(&gateway).await);
        }
        for client in clients {
            check(
                "outage",
                &client.answer().await.expect("response received"),
                ExpectedError::Gateway(502, "worker_failed"),
            );
        }
    }
    let tries: usize = workers.iter().map(|worker| worker.seen(|seen| seen.accepted)).sum();
    // Ten retries in any ten seconds, or a fifth of the requests.
    let windows = usize::try_from(begun.elapsed().as_secs() / 10).expect("seconds") + 1;
    assert!(tries >= REQUESTS + 10, "{tries}: a minimum of retries is allowed");
    assert!(tries <= REQUESTS + REQUESTS / 5 + 10 * windows, "{tries} in {windows} windows");
    let denied = metric(&gateway, "pointsman_gateway_retries_denied_total", &[]).await - denied;
    assert!(denied > 0.0);
    expect_idle(&gateway).await;
}
