//! Attribution of failed requests to workers, and the number of attempts.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use pointsman::Outcome;
use pointsman_gateway::app::Gateway;
use tokio::net::TcpSocket;

use crate::common::proxy::{
    Act, Answer, EVENT, FINE, FINE_JSON, Scripted, chunk, chunked_head, eventually, full_response, gateway, receive,
    request, send, stream, stream_end, until, write,
};
use crate::faults::{
    Client, DONE, PATH, body, counting_outcomes, expect_idle, expect_no_failure, expect_outcome, metric, router,
    settings,
};

const ROLE: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n";

/// Error events of engines without a numeric status.
const ERROR_EVENTS: [&str; 6] = [
    "data: {\"error\":{\"message\":\"dead\",\"type\":\"server_error\",\"code\":\"internal_error\"}}\n\n",
    "data: {\"error\":\"dead\"}\n\n",
    "data: {\"object\":\"error\",\"message\":\"dead\"}\n\n",
    "event: error\ndata: dead\n\n",
    "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"api_error\",\"message\":\"dead\"}}\n\n",
    "data: {\"type\":\"response.failed\",\"response\":{\"error\":{\"code\":\"server_error\",\"message\":\"dead\"}}}\n\n",
];

/// One worker per script, behind a gateway that counts a single failure.
async fn fleet(answers: &[Vec<Act>]) -> (Vec<Scripted>, Gateway) {
    let mut workers = Vec::new();
    for steps in answers {
        workers.push(Scripted::responding_with(steps.clone()).await);
    }
    let urls: Vec<_> = workers.iter().map(Scripted::url).collect();
    let gateway = gateway(counting_outcomes(settings(&urls))).await;
    (workers, gateway)
}

async fn ask(gateway: &Gateway) -> Answer {
    Client::ask(gateway).await.answer().await.expect("response received")
}

fn request_count(workers: &[Scripted]) -> usize {
    workers.iter().map(Scripted::request_count).sum()
}

/// Round-robin: one of two requests starts at the failing worker.
async fn counts(fails: Vec<Act>, outcome: Outcome) {
    let (workers, gateway) = fleet(&[fails, vec![write(served())]]).await;
    while workers[0].request_count() == 0 {
        let answer = ask(&gateway).await;
        assert_eq!((answer.status, answer.text()), (200, FINE), "{outcome:?}: {answer:?}");
    }
    expect_outcome(&gateway, "another worker serves it", outcome).await;
    expect_idle(&gateway).await;
}

fn served() -> String {
    let length = FINE.len();
    format!("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: {length}\r\n\r\n{FINE}")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failures_count_if_another_worker_serves_the_request() {
    alone!();
    for status in ["401 Who", "403 No", "404 None"] {
        counts(vec![full_response(status, "{}")], Outcome::Misconfigured).await;
    }
    counts(vec![full_response("200 OK", FINE_JSON)], Outcome::InvalidAnswer).await;
    counts(vec![chunked_head(), chunk(DONE), stream_end()], Outcome::InvalidAnswer).await;
    counts(vec![chunked_head(), chunk(ROLE), stream_end()], Outcome::InvalidAnswer).await;
    // After the role no token has been generated and nothing has been sent to the client.
    counts(vec![chunked_head(), chunk(ROLE), Act::Reset], Outcome::Reset).await;
    let error = "data: {\"error\":{\"message\":\"EngineCore died\",\"code\":500}}\n\n";
    counts(vec![chunked_head(), chunk(error), chunk(DONE), stream_end()], Outcome::ServerError).await;
    for event in ERROR_EVENTS {
        for role in ["", ROLE] {
            let steps = vec![chunked_head(), chunk(role.to_owned() + event), chunk(DONE), stream_end()];
            counts(steps, Outcome::ServerError).await;
        }
    }
    let busy = "data: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\",\"message\":\"busy\"}}\n\n";
    counts(vec![chunked_head(), chunk(busy), stream_end()], Outcome::Refused { retry_after: None }).await;
    let busy = "HTTP/1.1 503 Busy\r\nretry-after: 7\r\ncontent-length: 0\r\n\r\n";
    counts(vec![write(busy)], Outcome::Refused { retry_after: Some(Duration::from_secs(7)) }).await;
}

/// A repetition would repeat all attempts; a rate limit ends, and an absent worker has done no work.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_are_kept_from_repeating_work() {
    alone!();
    let html = write("HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 2\r\n\r\nhi");
    let own = "HTTP/1.1 503 Busy\r\nretry-after: 7\r\ncontent-length: 0\r\n\r\n";
    for (steps, status, should_retry, retry_after) in [
        (vec![full_response("500 Oops", "{}")], 500, Some("false"), None),
        (vec![chunked_head(), chunk(ERROR_EVENTS[1]), stream_end()], 500, Some("false"), None),
        (vec![Act::Reset], 502, Some("false"), Some("1")),
        (vec![html], 502, Some("false"), Some("1")),
        (vec![full_response("429 Many", "{}")], 429, None, Some("1")),
        (vec![full_response("503 Busy", "")], 503, Some("false"), Some("1")),
        (vec![write(own)], 503, Some("false"), Some("7")),
        (vec![full_response("400 Bad", "{}")], 400, None, None),
    ] {
        let (_workers, gateway) = fleet(&[steps.clone(), steps]).await;
        let answer = ask(&gateway).await;
        let headers = ["x-should-retry", "retry-after"].map(|name| answer.header(name));
        assert_eq!((answer.status, headers), (status, [should_retry, retry_after]), "{answer:?}");
        expect_idle(&gateway).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_error_event_that_no_worker_avoids_is_a_response() {
    alone!();
    let busy = "data: {\"error\":{\"message\":\"dead\",\"type\":\"overloaded_error\"}}\n\n";
    for (event, status) in ERROR_EVENTS.map(|event| (event, 500)).into_iter().chain([(busy, 503)]) {
        let (workers, gateway) = fleet(&[stream(&[ROLE, event]), stream(&[event])]).await;
        let answer = ask(&gateway).await;
        assert_eq!((answer.status, &answer.json()["error"]["message"]), (status, &"dead".into()), "{answer:?}");
        assert_eq!(answer.header("content-type"), Some("application/json"));
        assert_eq!(request_count(&workers), 2, "{event}");
        expect_no_failure(&gateway).await;
        expect_idle(&gateway).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_error_event_of_the_request_itself_is_forwarded() {
    alone!();
    for event in [
        "data: {\"error\":{\"message\":\"long\",\"type\":\"BadRequestError\",\"code\":400}}\n\n",
        "data: {\"error\":{\"message\":\"long\",\"code\":\"context_length_exceeded\"}}\n\n",
        "data: {\"error\":\"maximum context length is 9 tokens\"}\n\n",
        "data: {\"type\":\"error\",\"error\":{\"type\":\"invalid_request_error\",\"message\":\"schema\"}}\n\n",
    ] {
        let steps = vec![chunked_head(), chunk(event), chunk(DONE), stream_end()];
        let (workers, gateway) = fleet(&[steps.clone(), steps]).await;
        let broken = metric(&gateway, "pointsman_gateway_streams_broken_total", &[]).await;
        let answer = ask(&gateway).await;
        let expected = event.to_owned() + DONE;
        assert_eq!((answer.status, answer.text(), answer.is_whole), (200, expected.as_str(), true));
        assert_eq!(request_count(&workers), 1, "{event}");
        let counted = metric(&gateway, "pointsman_gateway_worker_requests_total", &["outcome=\"client_error\""]).await;
        assert_eq!(counted, 1.0, "{event}");
        assert_eq!(metric(&gateway, "pointsman_gateway_streams_broken_total", &[]).await, broken);
        expect_no_failure(&gateway).await;
        expect_idle(&gateway).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_error_event_after_the_first_token_has_an_outcome() {
    alone!();
    for event in ERROR_EVENTS {
        let steps = vec![chunked_head(), chunk(EVENT), Act::Wait, chunk(event), chunk(DONE), stream_end()];
        let (workers, gateway) = fleet(&[steps]).await;
        let labels = ["reason=\"error\""];
        let broken = metric(&gateway, "pointsman_gateway_streams_broken_total", &labels).await;
        let mut client = Client::ask(&gateway).await;
        client.expect_body(EVENT.as_bytes()).await;
        workers[0].release(1);
        let answer = client.answer().await.expect("response started");
        let expected = [EVENT, event, DONE].concat();
        assert_eq!((answer.status, answer.text(), answer.is_whole), (200, expected.as_str(), true));
        expect_outcome(&gateway, event, Outcome::ServerError).await;
        expect_idle(&gateway).await;
        assert_eq!(metric(&gateway, "pointsman_gateway_streams_broken_total", &labels).await - broken, 1.0);
        let labels = ["outcome=\"server_error\""];
        assert_eq!(metric(&gateway, "pointsman_gateway_worker_requests_total", &labels).await, 1.0, "{event}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn not_found_at_two_workers_is_a_client_error() {
    alone!();
    let (order, mut workers) = (Arc::new(AtomicUsize::new(0)), Vec::new());
    for _ in 0..3 {
        let order = Arc::clone(&order);
        let answer = move || full_response("404 None", &order.fetch_add(1, Ordering::Relaxed).to_string());
        workers.push(Scripted::with(Vec::new(), move |_, _| vec![answer()]).await);
    }
    let urls: Vec<_> = workers.iter().map(Scripted::url).collect();
    let gateway = gateway(counting_outcomes(settings(&urls))).await;
    let answer = ask(&gateway).await;
    assert_eq!((answer.status, answer.text()), (404, "0"), "the first answer");
    assert_eq!(request_count(&workers), 2, "one retry at another worker");
    expect_no_failure(&gateway).await;
    expect_idle(&gateway).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_first_token_is_retried_once() {
    alone!();
    let mut workers = Vec::new();
    for _ in 0..3 {
        workers.push(Scripted::responding_with(vec![chunked_head(), chunk(ROLE), Act::Hang]).await);
    }
    let urls: Vec<_> = workers.iter().map(Scripted::url).collect();
    let mut settings = counting_outcomes(settings(&urls));
    settings.gateway.first_byte_timeout_ms = 200;
    let gateway = gateway(settings).await;
    let answer = ask(&gateway).await;
    assert_eq!((answer.status, answer.code().as_str()), (504, "worker_timeout"));
    assert_eq!(request_count(&workers), 2);
    expect_no_failure(&gateway).await;
    expect_idle(&gateway).await;
}

/// A retry that finds no other rank counts for no request.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_retry_without_another_worker_returns_to_the_budget() {
    alone!();
    let worker = Scripted::responding_with(vec![full_response("500 Oops", "{}")]).await;
    let mut settings = settings(&[worker.url()]);
    settings.gateway.retry_share_max = 0.0; // ten retries in any ten seconds
    let gateway = gateway(settings).await;
    let denied = metric(&gateway, "pointsman_gateway_retries_denied_total", &[]).await;
    for _ in 0..12 {
        assert_eq!(ask(&gateway).await.status, 500);
    }
    assert_eq!(worker.request_count(), 12);
    assert_eq!(metric(&gateway, "pointsman_gateway_retries_denied_total", &[]).await, denied);
    expect_idle(&gateway).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_retry_that_times_out_in_the_queue_is_not_queued_again() {
    alone!();
    let busy = Scripted::responding_with(vec![Act::Wait, full_response("200 OK", FINE)]).await;
    let fails = Scripted::responding_with(vec![Act::Reset]).await;
    let mut settings = settings(&[busy.url(), fails.url()]);
    settings.models[0].router.queue.threshold = Some(0.0);
    settings.gateway.queue_timeout_ms = 2_000;
    let gateway = gateway(settings).await;
    let served = Client::ask(&gateway).await; // round robin: the first worker
    until("the first worker is busy", || busy.request_count() == 1).await;
    let answer = ask(&gateway).await;
    assert_eq!((answer.status, answer.code().as_str()), (502, "worker_failed"));
    assert_eq!(fails.request_count(), 1, "the retry waited for the other worker only");
    busy.release(1);
    assert_eq!(served.answer().await.expect("an answer").status, 200);
    expect_idle(&gateway).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_retry_has_the_rest_of_the_deadline() {
    const DEADLINE: Duration = Duration::from_secs(3);
    alone!();
    let fails = Scripted::responding_with(vec![Act::Wait, Act::Reset]).await;
    let idle = Scripted::responding_with(vec![full_response("200 OK", FINE)]).await;
    let gateway = gateway(settings(&[fails.url(), idle.url()])).await;
    let deadline = format!("x-pointsman-deadline-ms: {}\r\n", DEADLINE.as_millis());
    let client = send(gateway.address(), "POST", PATH, &deadline, body().as_bytes()).await;
    until("the first worker has it", || fails.request_count() == 1).await; // round robin
    tokio::time::sleep(DEADLINE).await;
    fails.release(1);
    let answer = receive(client).await.expect("an answer");
    assert_eq!((answer.status, answer.code().as_str()), (502, "worker_failed"));
    assert_eq!(idle.request_count(), 0, "the deadline has passed");
    expect_idle(&gateway).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_connection_counts_against_every_rank_of_its_worker() {
    alone!();
    let absent = TcpSocket::new_v4().expect("a socket"); // bound, which reserves the port, but not listening
    absent.bind("127.0.0.1:0".parse().expect("an address")).expect("a port");
    let good = Scripted::responding_with(vec![full_response("200 OK", FINE)]).await;
    let url = format!("http://{}", absent.local_addr().expect("bound"));
    let mut settings = counting_outcomes(settings(&[url, good.url()]));
    settings.models[0].workers[0].config.data_parallel_size = 2;
    settings.gateway.attempts_max = 1; // an unreachable worker is not an attempt
    let gateway = gateway(settings).await;
    assert_eq!(ask(&gateway).await.text(), FINE); // round robin: the absent worker first
    let why = format!("the last: {}", Outcome::ConnectFailed.name());
    eventually("both ranks of the absent worker count", async || {
        let ranks = router(&gateway).rank_health().await.expect("it is up");
        ranks.iter().map(|rank| rank.reason.ends_with(&why)).eq([true, true, false])
    })
    .await;
    expect_idle(&gateway).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_retry_after_silence_avoids_every_rank_of_the_worker() {
    alone!();
    let fails = Scripted::responding_with(vec![Act::Reset]).await;
    let good = Scripted::responding_with(vec![full_response("200 OK", FINE)]).await;
    let mut settings = settings(&[fails.url(), good.url()]);
    settings.models[0].workers[0].config.data_parallel_size = 3; // round robin would choose the third rank
    let gateway = gateway(settings).await;
    assert_eq!(ask(&gateway).await.text(), FINE);
    assert_eq!((fails.request_count(), good.request_count()), (1, 1));
    expect_idle(&gateway).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_event_restarts_the_idle_timeout() {
    const IDLE_MAX: Duration = Duration::from_secs(3);
    alone!();
    let paused = (0..5).flat_map(|_| [Act::Wait, chunk(EVENT)]).collect();
    let steps = [vec![chunked_head(), chunk(EVENT)], paused, vec![Act::Wait, chunk(DONE), stream_end()]];
    let worker = Scripted::responding_with(steps.concat()).await;
    let mut settings = settings(&[worker.url()]);
    settings.gateway.idle_timeout_ms = IDLE_MAX.as_millis() as u64;
    let gateway = gateway(settings).await;
    let mut client = Client::ask(&gateway).await;
    client.expect_body(EVENT.as_bytes()).await;
    for events in 2..=6 {
        tokio::time::sleep(IDLE_MAX / 4).await;
        worker.release(1);
        client.expect_body(EVENT.repeat(events).as_bytes()).await;
    }
    worker.release(1);
    let answer = client.answer().await.expect("it has begun");
    assert!(answer.is_whole, "{answer:?}");
    expect_idle(&gateway).await;
}

/// The first request hangs and the same rank serves the second, so the rank works.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_unstreamed_responses_do_not_count_if_the_rank_serves_others() {
    alone!();
    let worker =
        Scripted::with(
            Vec::new(),
            |n, _| {
                if n == 0 { vec![Act::Hang] } else { vec![full_response("200 OK", FINE_JSON)] }
            },
        )
        .await;
    let mut settings = counting_outcomes(settings(&[worker.url()]));
    settings.gateway.answer_timeout_ms = 3_000;
    let gateway = gateway(settings).await;
    let whole_body = body().replace("true", "false");
    let late = send(gateway.address(), "POST", PATH, "", whole_body.as_bytes()).await;
    until("the worker has it", || worker.request_count() == 1).await;
    let other = request(gateway.address(), "POST", PATH, "", whole_body.as_bytes()).await;
    assert_eq!(other.status, 200, "{other:?}");
    assert_eq!(receive(late).await.expect("response received").status, 504);
    expect_no_failure(&gateway).await;
    expect_idle(&gateway).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_without_its_end_mark_is_cut_off() {
    alone!();
    let more = "data: {\"choices\":[{\"text\":\"b\"}]}\n\n";
    let length = EVENT.len() + more.len();
    let known =
        format!("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: {length}\r\n\r\n{EVENT}");
    let chunked = vec![chunked_head(), chunk(EVENT), Act::Wait, chunk(more), stream_end()];
    for steps in [chunked, vec![write(known), Act::Wait, write(more)]] {
        let (workers, gateway) = fleet(&[steps]).await;
        let labels = ["reason=\"incomplete\""];
        let before = metric(&gateway, "pointsman_gateway_streams_broken_total", &labels).await;
        let mut client = Client::ask(&gateway).await;
        client.expect_body(EVENT.as_bytes()).await;
        workers[0].release(1);
        let answer = client.answer().await.expect("response started");
        assert!(answer.status == 200 && !answer.is_whole, "{answer:?}");
        expect_outcome(&gateway, "no end mark", Outcome::InvalidAnswer).await;
        expect_idle(&gateway).await;
        assert_eq!(metric(&gateway, "pointsman_gateway_streams_broken_total", &labels).await - before, 1.0);
    }
}
