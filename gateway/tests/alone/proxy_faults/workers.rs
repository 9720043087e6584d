//! Workers that fail: before a response, at every point of it, with every status, or all at the same time.

use pointsman::health::Outcome;
use tokio::net::TcpSocket;
use tokio::task::{JoinSet, LocalSet};
use tokio::time::Instant;

use crate::alone;
use crate::common::proxy::{Answer, EVENT, FINE, PATIENCE, gateway};
use crate::faults::{
    Client, Faulty, Step, blamed, blameless, chunk, chunked_head, counting_outcomes, metric, quiet, say, settings,
    whole,
};

/// The response to the client if every worker fails in the same way.
#[derive(Clone, Copy, Debug)]
enum Told {
    /// The gateway's own error.
    Own(u16, &'static str),
    /// The worker's response with its body unchanged.
    Theirs(u16, &'static str),
}

/// One failure before the first byte.
#[derive(Clone)]
struct Fault {
    name: &'static str,
    greets: Vec<Step>,
    answers: Vec<Step>,
    told: Told,
    /// Label value of the retries metric.
    reason: &'static str,
    /// Outcome counted by the router. `None`: it depends on the component that detects the failure first.
    outcome: Option<Outcome>,
}

fn fault(name: &'static str, answers: Vec<Step>) -> Fault {
    let told = Told::Own(502, "worker_failed");
    Fault { name, greets: Vec::new(), answers, told, reason: "broken", outcome: Some(Outcome::Reset) }
}

fn greeting(name: &'static str, greets: Vec<Step>) -> Fault {
    Fault { greets, ..fault(name, Vec::new()) }
}

fn status(name: &'static str, status: &str, body: &'static str, reason: &'static str) -> Fault {
    let told = Told::Theirs(name[..3].parse().expect("a status"), body);
    let refused = Outcome::Refused { retry_after: None };
    let outcome = Some(if reason == "server_error" { Outcome::ServerError } else { refused });
    Fault { told, reason, outcome, ..fault(name, vec![whole(status, body)]) }
}

const HEAD: &str = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 99\r\n\r\n";

/// Failures that end without a timeout.
fn broken() -> Vec<Fault> {
    let many_headers: String = (0..200).map(|n| format!("x-{n}: 1\r\n")).collect();
    let is_error = |fault: Fault| Fault { outcome: Some(Outcome::ServerError), ..fault };
    vec![
        Fault { reason: "", outcome: None, ..greeting("reset at once", vec![Step::Reset]) },
        greeting("closed at once", vec![Step::Close]),
        greeting("speaks first", vec![say("hello\r\n"), Step::Hang]),
        fault("reset when asked", vec![Step::Reset]),
        fault("closed when asked", vec![Step::Close]),
        fault("reset in the head", vec![say("HTTP/1.1 200 OK\r\ncont"), Step::Reset]),
        fault("closed in the head", vec![say("HTTP/1.1 200 OK\r\ncont"), Step::Close]),
        fault("closed after the head", vec![say(HEAD), Step::Close]),
        fault("reset after the head", vec![say(HEAD), Step::Reset]),
        fault("closed after the head of chunks", vec![chunked_head(), Step::Close]),
        fault("closed in the first chunk's length", vec![chunked_head(), say("5"), Step::Close]),
        fault("no HTTP", vec![say("220 mail ready\r\n\r\n"), Step::Hang]),
        fault("binary", vec![say([0x16, 3, 1, 0, 0xff, 0, 0, 0xfe]), say([0xff; 100]), Step::Hang]),
        fault("a status that is none", vec![say("HTTP/1.1 2x0 OK\r\n\r\n"), Step::Hang]),
        fault("chunks that are none", vec![chunked_head(), say("zz\r\nabcd\r\n"), Step::Hang]),
        fault("a chunk beyond all numbers", vec![chunked_head(), say("fffffffffffffffff\r\n"), Step::Hang]),
        fault(
            "two lengths",
            vec![say("HTTP/1.1 200 OK\r\ncontent-length: 4\r\ncontent-length: 5\r\n\r\nabcde"), Step::Hang],
        ),
        fault("a length that is none", vec![say("HTTP/1.1 200 OK\r\ncontent-length: -4\r\n\r\nabcd"), Step::Hang]),
        fault("too many headers", vec![say(format!("HTTP/1.1 200 OK\r\n{many_headers}\r\n")), Step::Hang]),
        fault("a huge header", vec![say(format!("HTTP/1.1 200 OK\r\nx: {}\r\n\r\n", "x".repeat(2 << 20))), Step::Hang]),
        fault("an endless head", vec![say("HTTP/1.1 200 OK\r\nx: "), Step::Flood(vec![b'x'; 4096])]),
        is_error(fault(
            "another protocol",
            vec![say("HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n"), Step::Hang],
        )),
        is_error(fault(
            "elsewhere",
            vec![say("HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:9/\r\ncontent-length: 0\r\n\r\n")],
        )),
        is_error(fault("not modified", vec![say("HTTP/1.1 304 Not Modified\r\ncontent-length: 4\r\n\r\nabcd")])),
        status("429", "429 Busy", "{\"busy\":1}", "busy"),
        status("429 without a body", "429 Busy", "", "busy"),
        status("500", "500 Oops", "{\"oops\":1}", "server_error"),
        status("500 without a body", "500 Oops", "", "server_error"),
        status("502", "502 Bad", "bad", "server_error"),
        status("503", "503 Later", "later", "busy"),
        status("503 without a body", "503 Later", "", "busy"),
        status("504", "504 Late", "late", "server_error"),
        Fault {
            told: Told::Own(502, "worker_failed"),
            answers: vec![say("HTTP/1.1 500 Oops\r\n\r\n"), Step::Flood(vec![b'x'; 4096])],
            ..status("500 without an end", "", "", "server_error")
        },
        Fault {
            told: Told::Own(502, "worker_failed"),
            answers: vec![say("HTTP/1.1 500 Oops\r\ncontent-length: 9\r\n\r\nabc"), Step::Reset],
            ..status("500 that breaks off", "", "", "server_error")
        },
    ]
}

/// Failures that end by a timeout only.
fn silent() -> Vec<Fault> {
    let late = |fault: Fault| Fault {
        told: Told::Own(504, "worker_timeout"),
        reason: "timeout",
        outcome: Some(Outcome::Timeout),
        ..fault
    };
    let go_on = Step::Flood(b"HTTP/1.1 100 Continue\r\n\r\n".repeat(64));
    vec![
        late(greeting("silent at once", vec![Step::Hang])),
        late(fault("silent when asked", vec![Step::Hang])),
        late(fault("silent in the head", vec![say("HTTP/1.1 200 OK\r\ncont"), Step::Hang])),
        late(fault("silent after the head", vec![say(HEAD), Step::Hang])),
        late(fault("silent after the head of chunks", vec![chunked_head(), Step::Hang])),
        late(fault("silent in the first chunk", vec![chunked_head(), say("5\r\n"), Step::Hang])),
        late(fault("silent in an error", vec![say("HTTP/1.1 500 Oops\r\ncontent-length: 9\r\n\r\nabc"), Step::Hang])),
        late(fault("always about to go on", vec![go_on])),
    ]
}

/// A worker with this fault.
async fn start(fault: &Fault) -> Faulty {
    let answers = fault.answers.clone();
    Faulty::start(fault.greets.clone(), move |_, _| answers.clone()).await
}

fn check(name: &str, answer: &Answer, told: Told) {
    match told {
        Told::Own(status, code) => {
            assert_eq!((answer.status, answer.code().as_str()), (status, code), "{name}: {answer:?}");
            assert_eq!(answer.header("retry-after"), Some("1"), "{name}");
        }
        Told::Theirs(status, body) => assert_eq!((answer.status, answer.text()), (status, body), "{name}: {answer:?}"),
    }
    assert!(answer.is_whole && answer.header("x-request-id").is_some(), "{name}: {answer:?}");
}

fn shown(step: &Step) -> String {
    match step {
        Step::Send(bytes) | Step::Flood(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        Step::Wait | Step::Close | Step::Reset | Step::Hang => format!("{step:?}"),
    }
}

const RETRIES: &str = "pointsman_gateway_retries_total";

/// With a healthy second worker the client receives a normal response.
async fn elsewhere(fault: Fault, first_byte_timeout_ms: u64) {
    let (bad, good) = (start(&fault).await, Faulty::answering(vec![whole("200 OK", FINE)]).await);
    let mut settings = counting_outcomes(settings(&[bad.url(), good.url()]));
    settings.gateway.first_byte_timeout_ms = first_byte_timeout_ms;
    let gateway = gateway(settings).await;
    let mut asked = 0;
    // Round-robin: the second request starts at the failing worker at the latest.
    while bad.see(|seen| seen.accepted) == 0 {
        let answer = Client::ask(&gateway).await.answer().await.expect("an answer");
        assert_eq!((answer.status, answer.text()), (200, FINE), "{}: {answer:?}", fault.name);
        asked += 1;
    }
    assert_eq!((bad.see(|seen| seen.accepted), good.asked()), (1, asked), "{}", fault.name);
    assert!(asked <= 2, "{}", fault.name);
    match fault.outcome {
        Some(Outcome::Ok) => blameless(&gateway).await,
        Some(outcome) => blamed(&gateway, fault.name, outcome).await,
        None => {}
    }
}

/// If all workers fail in this way, the client receives the error after one attempt at each.
async fn fleet_of(fault: Fault, first_byte_timeout_ms: u64) {
    let workers = [start(&fault).await, start(&fault).await];
    let mut settings = settings(&[workers[0].url(), workers[1].url()]);
    settings.gateway.first_byte_timeout_ms = first_byte_timeout_ms;
    let gateway = gateway(settings).await;
    let answer = Client::ask(&gateway).await.answer().await.expect("an answer");
    check(fault.name, &answer, fault.told);
    let accepted = workers.each_ref().map(|worker| worker.see(|seen| seen.accepted));
    assert_eq!(accepted, [1, 1], "{}", fault.name);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_fails_before_the_first_byte_is_tried_elsewhere_and_told_at_last() {
    let _alone = alone().await;
    let none = gateway(settings(&[])).await;
    let timeout_ms = u64::try_from(PATIENCE.as_millis()).expect("a minute");
    for fault in broken() {
        let label = format!("reason=\"{}", fault.reason);
        let before = metric(&none, RETRIES, &[&label]).await;
        elsewhere(fault.clone(), timeout_ms).await;
        fleet_of(fault.clone(), timeout_ms).await;
        assert_eq!(metric(&none, RETRIES, &[&label]).await - before, 2.0, "{}", fault.name);
    }
    quiet(&none).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silence_before_the_first_byte_is_tried_elsewhere_and_told_at_last() {
    let _alone = alone().await;
    let none = gateway(settings(&[])).await;
    let before = metric(&none, RETRIES, &["reason=\"timeout\""]).await;
    let all_at_once = async {
        let mut all = JoinSet::new();
        for fault in silent() {
            // Long enough for the healthy worker on a busy machine.
            all.spawn_local(elsewhere(fault.clone(), 3_000));
            all.spawn_local(fleet_of(fault, 1_000));
        }
        while let Some(ended) = all.join_next().await {
            ended.expect("it went as told");
        }
    };
    LocalSet::new().run_until(all_at_once).await;
    let retries = metric(&none, RETRIES, &["reason=\"timeout\""]).await - before;
    assert_eq!(retries, 2.0 * silent().len() as f64);
    quiet(&none).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_that_are_not_there_are_passed_over() {
    let _alone = alone().await;
    // Bound, which reserves the ports, but not listening.
    let absent = [TcpSocket::new_v4(), TcpSocket::new_v4()].map(|socket| socket.expect("a socket"));
    let url = |socket: &TcpSocket| {
        socket.bind("127.0.0.1:0".parse().expect("an address")).expect("a port");
        format!("http://{}", socket.local_addr().expect("bound"))
    };
    let absent_urls = absent.each_ref().map(url);
    let good = Faulty::answering(vec![whole("200 OK", FINE)]).await;
    let beside = gateway(counting_outcomes(settings(&[absent_urls[0].clone(), good.url()]))).await;
    for _ in 0..2 {
        assert_eq!(Client::ask(&beside).await.answer().await.expect("an answer").text(), FINE);
    }
    blamed(&beside, "absent", Outcome::ConnectFailed).await;
    quiet(&beside).await;
    let before = metric(&beside, RETRIES, &["reason=\"connect\""]).await;
    let alone = gateway(settings(&absent_urls)).await;
    let answer = Client::ask(&alone).await.answer().await.expect("an answer");
    check("absent", &answer, Told::Own(502, "worker_failed"));
    assert_eq!(metric(&alone, RETRIES, &["reason=\"connect\""]).await - before, 1.0);
    quiet(&alone).await;
}

/// Unusual responses and errors of the request itself: the response is final, and surplus bytes after it corrupt no
/// other response.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_answers_pass_and_spoil_nothing() {
    let _alone = alone().await;
    let head = "content-type: text/event-stream\r\n";
    let evil_body = FINE.replace("fine", "evil");
    let (length, chunk) = (FINE.len(), format!("{:x}", FINE.len()));
    let of = |body: &str| format!("HTTP/1.1 200 OK\r\n{head}content-length: {length}\r\n\r\n{body}");
    let (fine, evil) = (of(FINE), of(&evil_body));
    let bare = |text: String| vec![say(text)];
    let cases = [
        (vec![whole("400 Bad", "{\"no\":1}")], 400, "{\"no\":1}"),
        (vec![whole("400 Bad", "")], 400, ""),
        (vec![whole("404 None", "none")], 404, "none"),
        (vec![whole("422 Odd", "odd")], 422, "odd"),
        (vec![whole("422 Odd", "")], 422, ""),
        (bare(format!("{fine}{evil}")), 200, FINE),
        (vec![say(&fine), Step::Flood(b"evil".repeat(1024))], 200, FINE),
        (bare(format!("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nx: y\r\n\r\n{fine}")), 200, FINE),
        (vec![say(format!("HTTP/1.0 200 OK\r\n{head}\r\n{FINE}")), Step::Close], 200, FINE),
        (vec![say(format!("HTTP/1.1 200 OK\r\n{head}\r\n{FINE}")), Step::Close], 200, FINE),
        (
            vec![
                say(format!(
                    "HTTP/1.1 200 OK\r\n{head}content-length: 9\r\ntransfer-encoding: chunked\r\n\r\n{chunk}\r\n{FINE}\r\n0\r\n\r\n"
                )),
                say(&evil),
            ],
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
        let worker = Faulty::start(Vec::new(), move |n, _| {
            if n == 0 { steps.clone() } else { vec![whole("200 OK", &FINE.replace("fine", "next"))] }
        })
        .await;
        // With a single worker, a retry would show up as a second request at this worker.
        let gateway = gateway(counting_outcomes(settings(&[worker.url()]))).await;
        let answer = Client::ask(&gateway).await.answer().await.expect("an answer");
        assert!((answer.status, answer.text(), answer.is_whole) == (status, text, true), "{shown}: {answer:?}");
        let lengths = answer.head.to_ascii_lowercase().matches("content-length:").count();
        assert_eq!((worker.asked(), lengths <= 1), (1, true), "{shown}: {}", answer.head);
        for _ in 0..3 {
            let next = Client::ask(&gateway).await.answer().await.expect("an answer");
            let next_text = FINE.replace("fine", "next");
            assert_eq!((next.status, next.text()), (200, next_text.as_str()), "{shown}");
        }
        blameless(&gateway).await;
        quiet(&gateway).await;
    }
}

const BROKEN: &str = "pointsman_gateway_streams_broken_total";

/// A worker sends `begins`, fails with `ends`, and the client must have received exactly `told`.
async fn cut(begins: Vec<Step>, ends: Step, told: &str, outcome: Outcome) {
    let shown = format!("{} after {told:?}", shown(&ends));
    let steps = [begins, vec![Step::Wait, ends]].concat();
    let workers = [Faulty::answering(steps.clone()).await, Faulty::answering(steps).await];
    let mut settings = counting_outcomes(settings(&[workers[0].url(), workers[1].url()]));
    let is_silence = outcome == Outcome::Timeout;
    if is_silence {
        settings.gateway.idle_timeout_ms = 100;
    }
    let gateway = gateway(settings).await;
    let reason = if is_silence { "reason=\"idle\"" } else { "reason=\"broken\"" };
    let before = metric(&gateway, BROKEN, &[reason]).await;
    let mut client = Client::ask(&gateway).await;
    client.has(told.as_bytes()).await;
    workers.iter().for_each(|worker| worker.release(1));
    let answer = client.answer().await.expect("it has begun");
    assert!(answer.status == 200 && !answer.is_whole && answer.text() == told, "{shown}: {answer:?}");
    assert_eq!(workers.iter().map(|worker| worker.see(|seen| seen.accepted)).sum::<usize>(), 1, "{shown}");
    workers[0].left_alone().await;
    workers[1].left_alone().await;
    blamed(&gateway, &shown, outcome).await;
    quiet(&gateway).await;
    assert_eq!(metric(&gateway, BROKEN, &[reason]).await - before, 1.0, "{shown}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_fails_after_any_chunk_is_cut_there() {
    let _alone = alone().await;
    for chunks in 1..=4 {
        let frames: Vec<_> = (0..chunks).map(|n| format!("data: {{\"n\":{n}}}\n\n")).collect();
        let begins = || std::iter::once(chunked_head()).chain(frames.iter().map(chunk)).collect::<Vec<_>>();
        let told = frames.concat();
        cut(begins(), Step::Reset, &told, Outcome::Reset).await;
        cut(begins(), Step::Close, &told, Outcome::Reset).await;
        cut(begins(), say("zz\r\n"), &told, Outcome::Reset).await;
        cut(begins(), Step::Hang, &told, Outcome::Timeout).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_of_known_length_that_fails_after_any_byte_is_cut_there() {
    let _alone = alone().await;
    for more in ["", "d", "data: [DONE"] {
        let told = &*[EVENT, more].concat();
        for (ends, outcome) in
            [(Step::Reset, Outcome::Reset), (Step::Close, Outcome::Reset), (Step::Hang, Outcome::Timeout)]
        {
            cut(vec![say(HEAD), say(told)], ends, told, outcome).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_an_outage_of_all_workers_retries_stay_within_their_budget() {
    const REQUESTS: usize = 200;
    let _alone = alone().await;
    let dead = || Faulty::start(vec![Step::Reset], |_, _| Vec::new());
    let workers = [dead().await, dead().await, dead().await];
    let gateway = gateway(settings(&workers.each_ref().map(Faulty::url))).await;
    let denied = metric(&gateway, "pointsman_gateway_retries_denied_total", &[]).await;
    let begun = Instant::now();
    for _ in 0..REQUESTS / 10 {
        let mut clients = Vec::new();
        for _ in 0..10 {
            clients.push(Client::ask(&gateway).await);
        }
        for client in clients {
            check("outage", &client.answer().await.expect("an answer"), Told::Own(502, "worker_failed"));
        }
    }
    let tries: usize = workers.iter().map(|worker| worker.see(|seen| seen.accepted)).sum();
    // Ten retries in any ten seconds, or a fifth of the requests.
    let windows = usize::try_from(begun.elapsed().as_secs() / 10).expect("seconds") + 1;
    assert!(tries >= REQUESTS + 10, "{tries}: a few are always allowed");
    assert!(tries <= REQUESTS + REQUESTS / 5 + 10 * windows, "{tries} in {windows} windows");
    let denied = metric(&gateway, "pointsman_gateway_retries_denied_total", &[]).await - denied;
    assert!(denied > 0.0);
    quiet(&gateway).await;
}
