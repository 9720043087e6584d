//! Attribution of failed requests to workers, and the number of attempts.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use pointsman::health::Outcome;
use pointsman_gateway::serve::Gateway;

use crate::alone;
use crate::common::proxy::{self, Answer, EVENT, FINE, FINE_JSON, gateway, receive, request, send, until};
use crate::faults::{
    Client, DONE, Faulty, PATH, Step, blamed, blameless, body, chunk, chunked_head, chunks_end, counting_outcomes,
    metric, quiet, say, settings, whole,
};

const ROLE: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n";

/// One worker per script, behind a gateway that counts a single failure.
async fn fleet(answers: &[Vec<Step>]) -> (Vec<Faulty>, Gateway) {
    let mut workers = Vec::new();
    for steps in answers {
        workers.push(Faulty::answering(steps.clone()).await);
    }
    let urls: Vec<_> = workers.iter().map(Faulty::url).collect();
    let gateway = gateway(counting_outcomes(settings(&urls))).await;
    (workers, gateway)
}

async fn ask(gateway: &Gateway) -> Answer {
    Client::ask(gateway).await.answer().await.expect("an answer")
}

fn asked(workers: &[Faulty]) -> usize {
    workers.iter().map(Faulty::asked).sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_fails_alike_at_two_workers_counts_against_none() {
    let _alone = alone().await;
    let html = say("HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 2\r\n\r\nhi");
    for steps in [vec![whole("500 Oops", "")], vec![whole("503 Busy", "")], vec![Step::Reset], vec![html]] {
        let (workers, gateway) = fleet(&[steps.clone(), steps]).await;
        for n in 1..=4 {
            assert!(ask(&gateway).await.status >= 500);
            assert_eq!(asked(&workers), 2 * n);
        }
        blameless(&gateway).await;
        quiet(&gateway).await;
    }
}

/// Round-robin: one of two requests starts at the failing worker.
async fn counts(fails: Vec<Step>, outcome: Outcome) {
    let (workers, gateway) = fleet(&[fails, vec![say(served())]]).await;
    while workers[0].asked() == 0 {
        let answer = ask(&gateway).await;
        assert_eq!((answer.status, answer.text()), (200, FINE), "{outcome:?}: {answer:?}");
    }
    blamed(&gateway, "another worker serves it", outcome).await;
    quiet(&gateway).await;
}

fn served() -> String {
    let length = FINE.len();
    format!("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: {length}\r\n\r\n{FINE}")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_counts_that_fails_where_another_serves() {
    let _alone = alone().await;
    for status in ["401 Who", "403 No", "404 None"] {
        counts(vec![whole(status, "{}")], Outcome::Misconfigured).await;
    }
    counts(vec![whole("200 OK", FINE_JSON)], Outcome::InvalidAnswer).await;
    counts(vec![chunked_head(), chunk(DONE), chunks_end()], Outcome::InvalidAnswer).await;
    counts(vec![chunked_head(), chunk(ROLE), chunks_end()], Outcome::InvalidAnswer).await;
    // After the role no token has been generated and nothing has been sent to the client.
    counts(vec![chunked_head(), chunk(ROLE), Step::Reset], Outcome::Reset).await;
    let error = "data: {\"error\":{\"message\":\"EngineCore died\",\"code\":500}}\n\n";
    counts(vec![chunked_head(), chunk(error), chunk(DONE), chunks_end()], Outcome::ServerError).await;
    let busy = "HTTP/1.1 503 Busy\r\nretry-after: 7\r\ncontent-length: 0\r\n\r\n";
    counts(vec![say(busy)], Outcome::Refused { retry_after: Some(std::time::Duration::from_secs(7)) }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_two_workers_do_not_know_is_the_client_s_error() {
    let _alone = alone().await;
    let (order, mut workers) = (Arc::new(AtomicUsize::new(0)), Vec::new());
    for _ in 0..3 {
        let order = Arc::clone(&order);
        let answer = move || whole("404 None", &order.fetch_add(1, Ordering::Relaxed).to_string());
        workers.push(Faulty::start(Vec::new(), move |_, _| vec![answer()]).await);
    }
    let urls: Vec<_> = workers.iter().map(Faulty::url).collect();
    let gateway = gateway(counting_outcomes(settings(&urls))).await;
    let answer = ask(&gateway).await;
    assert_eq!((answer.status, answer.text()), (404, "0"), "the first answer");
    assert_eq!(asked(&workers), 2, "it is tried at one other worker");
    blameless(&gateway).await;
    quiet(&gateway).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_first_token_is_retried_once() {
    let _alone = alone().await;
    let mut workers = Vec::new();
    for _ in 0..3 {
        workers.push(Faulty::answering(vec![chunked_head(), chunk(ROLE), Step::Hang]).await);
    }
    let urls: Vec<_> = workers.iter().map(Faulty::url).collect();
    let mut settings = counting_outcomes(settings(&urls));
    settings.gateway.first_byte_timeout_ms = 200;
    let gateway = gateway(settings).await;
    let answer = ask(&gateway).await;
    assert_eq!((answer.status, answer.code().as_str()), (504, "worker_timeout"));
    assert_eq!(asked(&workers), 2);
    blameless(&gateway).await;
    quiet(&gateway).await;
}

/// The first request hangs and the same rank serves the second, so the rank works.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_whole_answer_does_not_count_where_the_rank_serves_others() {
    let _alone = alone().await;
    let worker =
        Faulty::start(Vec::new(), |n, _| if n == 0 { vec![Step::Hang] } else { vec![whole("200 OK", FINE_JSON)] })
            .await;
    let mut settings = counting_outcomes(settings(&[worker.url()]));
    settings.gateway.answer_timeout_ms = 3_000;
    let gateway = gateway(settings).await;
    let whole_body = body().replace("true", "false");
    let late = send(gateway.address(), "POST", PATH, "", whole_body.as_bytes()).await;
    until("the worker has it", || worker.asked() == 1).await;
    let other = request(gateway.address(), "POST", PATH, "", whole_body.as_bytes()).await;
    assert_eq!(other.status, 200, "{other:?}");
    assert_eq!(receive(late).await.expect("an answer").status, 504);
    blameless(&gateway).await;
    quiet(&gateway).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_ends_in_order_without_its_end_mark_is_cut_off() {
    let _alone = alone().await;
    let more = "data: {\"choices\":[{\"text\":\"b\"}]}\n\n";
    let length = EVENT.len() + more.len();
    let known =
        format!("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: {length}\r\n\r\n{EVENT}");
    let chunked = vec![chunked_head(), chunk(EVENT), Step::Wait, chunk(more), chunks_end()];
    for steps in [chunked, vec![say(known), Step::Wait, say(more)]] {
        let (workers, gateway) = fleet(&[steps]).await;
        let labels = ["reason=\"incomplete\""];
        let before = metric(&gateway, "pointsman_gateway_streams_broken_total", &labels).await;
        let mut client = Client::ask(&gateway).await;
        client.has(EVENT.as_bytes()).await;
        workers[0].release(1);
        let answer = client.answer().await.expect("it has begun");
        assert!(answer.status == 200 && !answer.is_whole, "{answer:?}");
        blamed(&gateway, "no end mark", Outcome::InvalidAnswer).await;
        quiet(&gateway).await;
        assert_eq!(metric(&gateway, "pointsman_gateway_streams_broken_total", &labels).await - before, 1.0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_series_of_a_worker_leave_the_page_with_it() {
    let _alone = alone().await;
    let (workers, gateway) = fleet(&[vec![say(served())]]).await;
    assert_eq!(ask(&gateway).await.status, 200);
    let label = format!("worker_endpoint=\"{}\"", workers[0].url());
    let name = "pointsman_gateway_worker_requests_total";
    let ok = [label.as_str(), "status=\"200\"", "outcome=\"ok\""];
    assert_eq!(metric(&gateway, name, &ok).await, 1.0);
    assert_eq!(metric(&gateway, "pointsman_gateway_worker_time_to_first_token_seconds_count", &ok[..1]).await, 1.0);
    assert_eq!(metric(&gateway, "pointsman_gateway_worker_request_seconds_count", &ok[..1]).await, 1.0);
    let router = gateway.router("mock").expect("it is served");
    router.remove_worker(pointsman::protocol::WorkerId(1)).await.expect("it is there");
    let page = proxy::get(&gateway, "/metrics").await;
    assert!(!page.text().contains(&label), "{}", page.text());
}
