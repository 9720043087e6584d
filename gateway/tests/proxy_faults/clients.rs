//! Clients that disconnect: before a response, at every frame of it, and while other requests wait.

use pointsman_gateway::settings::TokenSourceChoice;
use tokio::io::AsyncWriteExt as _;

use crate::common::proxy::{
    Act, EVENT, FINE, Scripted, chunk, chunked_head, eventually, full_response, gateway, request, send, stream_end,
    until,
};
use crate::faults::{self, Client, PATH, body, expect_idle, kept_request, metric, settings};

/// Frames of a streamed response.
const FRAMES: usize = 5;

fn frame(n: usize) -> String {
    let finish_reason = if n + 1 == FRAMES { "\"stop\"" } else { "null" };
    format!("data: {{\"choices\":[{{\"text\":\"{n}\",\"finish_reason\":{finish_reason}}}]}}\n\n")
}

fn frames(n: usize) -> String {
    (0..n).map(frame).collect()
}

/// A stream that waits before its head, before each frame, and before its end.
fn gated() -> Vec<Act> {
    let frames = (0..FRAMES).flat_map(|n| [Act::Wait, chunk(frame(n))]);
    [Act::Wait, chunked_head()].into_iter().chain(frames).chain([Act::Wait, stream_end()]).collect()
}

/// Chunks without an end.
fn endless() -> Act {
    Act::Flood([b"1000\r\n".as_slice(), &[b'x'; 0x1000], b"\r\n"].concat())
}

const CLIENT_GONE: &str = "pointsman_gateway_client_gone_total";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_may_disconnect_at_every_frame() {
    alone!();
    let worker = Scripted::responding_with(gated()).await;
    let gateway = gateway(settings(&[worker.url()])).await;
    let gone = metric(&gateway, CLIENT_GONE, &[]).await;
    // Disconnects before the head, after it, and after each frame. After the last frame only the end of the stream is
    // missing, and the client has its whole response.
    for steps in 0..=FRAMES + 1 {
        let mut client = Client::ask(&gateway).await;
        until("the worker received a request", || worker.request_count() == 2 * steps + 1).await;
        worker.release(steps);
        worker.wait_until_resumed().await;
        if let Some(frames_sent @ 1..) = steps.checked_sub(1) {
            client.expect_body(frames(frames_sent).as_bytes()).await;
        }
        drop(client);
        // Each core keeps idle connections of its own.
        until("the worker's connection is closed", || worker.seen(|seen| seen.hung_up) == steps + 1).await;
        expect_idle(&gateway).await;
        // The next request is served normally.
        worker.release(FRAMES + 2);
        let next = Client::ask(&gateway).await.answer().await.expect("response received");
        assert!(next.status == 200 && next.is_whole && next.text() == frames(FRAMES), "{next:?}");
        expect_idle(&gateway).await;
        // The worker connection was kept in the pool: the next client's disconnect is detected on it as well.
    }
    let gone = metric(&gateway, CLIENT_GONE, &[]).await - gone;
    assert_eq!(gone, (FRAMES + 1) as f64, "each disconnect is counted once");
}

/// A half-closed connection cannot be distinguished from a disconnect. An engine that computes an unwanted response is
/// the worse error.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_half_closed_client_counts_as_disconnected() {
    alone!();
    let worker = Scripted::responding_with(gated()).await;
    let gateway = gateway(settings(&[worker.url()])).await;
    for steps in [0, 3] {
        let mut client = Client::ask(&gateway).await;
        until("the worker received a request", || worker.request_count() == if steps == 0 { 1 } else { 2 }).await;
        worker.release(steps);
        worker.wait_until_resumed().await;
        if steps > 0 {
            client.expect_body(frames(steps - 1).as_bytes()).await;
        }
        client.stream.shutdown().await.expect("write side closed");
        worker.wait_until_closed().await;
        assert!(client.answer().await.is_none_or(|answer| !answer.is_whole));
        expect_idle(&gateway).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_reads_nothing_times_out() {
    alone!();
    let worker = Scripted::responding_with(vec![chunked_head(), chunk(EVENT), endless()]).await;
    let mut settings = settings(&[worker.url()]);
    settings.gateway.idle_timeout_ms = 300;
    let gateway = gateway(settings).await;
    let client = Client::ask(&gateway).await;
    until("much was sent", || worker.seen(|seen| seen.flooded) > 256 << 10).await;
    worker.wait_until_closed().await;
    expect_idle(&gateway).await;
    assert!(!client.answer().await.expect("response started").is_whole);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_may_disconnect_while_queued() {
    alone!();
    let worker = Scripted::responding_with(vec![Act::Wait, full_response("200 OK", FINE)]).await;
    let mut settings = settings(&[worker.url()]);
    settings.models[0].router.queue.threshold = Some(0.0);
    settings.models[0].workers[0].config.max_num_batched_tokens = Some(64);
    let gateway = gateway(settings).await;
    let router = faults::router(&gateway);
    let first = Client::ask(&gateway).await;
    until("the first is being served", || worker.request_count() == 1).await;
    let second = Client::ask(&gateway).await;
    let third = Client::ask(&gateway).await;
    until("the others wait", || router.health().leases == 3).await;
    drop(second);
    until("the request left the queue", || router.health().leases == 2).await;
    worker.release(2);
    for client in [first, third] {
        assert_eq!(client.answer().await.expect("response received").text(), FINE);
    }
    assert_eq!(worker.request_count(), 2, "the abandoned request was not sent");
    expect_idle(&gateway).await;
}

/// Prompts of 10,000 tokens for engines without a configured capacity. At `queue.threshold` 2 a rank is busy with two
/// of them, above 2 * 8,192 tokens. Two engines receive four of twelve requests; the others wait until a rank has
/// capacity.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_queue_for_engines_without_stated_capacity() {
    const CLIENTS: usize = 12;
    alone!();
    // Streams report their first token. The load of a prefill without a report falls with time.
    let answer = || Scripted::responding_with(vec![Act::Wait, full_response("200 OK", FINE)]);
    let workers = [answer().await, answer().await];
    let mut settings = settings(&workers.each_ref().map(Scripted::url));
    settings.models[0].router.queue.threshold = Some(2.0);
    assert!(settings.models[0].workers.iter().all(|worker| worker.config.max_num_batched_tokens.is_none()));
    let gateway = gateway(settings).await;
    let router = faults::router(&gateway);
    let prompt = |n: u32| (0..10_000).map(|token| token * 16 + n).collect::<Vec<u32>>();
    let bodies: Vec<_> = (0..CLIENTS as u32)
        .map(|n| {
            serde_json::json!({ "model": "mock", "prompt": prompt(n), "max_tokens": 8, "stream": true }).to_string()
        })
        .collect();
    let address = gateway.address();
    let clients: Vec<_> = bodies
        .into_iter()
        .map(|body| tokio::spawn(async move { request(address, "POST", PATH, "", body.as_bytes()).await }))
        .collect();
    let request_count = || workers.iter().map(Scripted::request_count).sum::<usize>();
    until("every request is placed or waits", || router.health().leases == CLIENTS).await;
    let waiting = async || router.pending().await.expect("up").iter().map(|class| class.depth.requests).sum::<u64>();
    eventually("two on each rank, eight wait", async || (request_count(), waiting().await) == (4, 8)).await;
    workers.iter().for_each(|worker| worker.release(CLIENTS));
    for client in clients {
        let answer = client.await.expect("no panic");
        assert_eq!((answer.status, answer.text()), (200, FINE));
    }
    assert_eq!(request_count(), CLIENTS);
    expect_idle(&gateway).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_may_disconnect_during_tokenization() {
    alone!();
    let worker = Scripted::with(Vec::new(), |_, got| {
        if got.head.starts_with("POST /tokenize ") { vec![Act::Hang] } else { vec![full_response("200 OK", FINE)] }
    })
    .await;
    let mut settings = settings(&[worker.url()]);
    settings.models[0].tokens.source = TokenSourceChoice::Engine;
    settings.models[0].tokens.engine_timeout_ms = 600_000;
    let gateway = gateway(settings).await;
    let request_count = worker.request_count();
    let text = br#"{"model":"mock","prompt":"some text"}"#;
    let client = send(gateway.address(), "POST", PATH, "", text).await;
    until("a tokenize query was sent", || worker.request_count() > request_count).await;
    drop(client);
    expect_idle(&gateway).await;
    // A request with token ids is served immediately, and the abandoned request is never sent.
    let next = request(gateway.address(), "POST", PATH, "", body().as_bytes()).await;
    assert_eq!((next.status, next.text()), (200, FINE));
    let completions = worker.seen(|seen| seen.requests.iter().filter(|got| got.head.contains(PATH)).count());
    assert_eq!(completions, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_may_disconnect_within_their_request() {
    alone!();
    let worker = Scripted::responding_with(vec![full_response("200 OK", FINE)]).await;
    let gateway = gateway(settings(&[worker.url()])).await;
    let whole = kept_request();
    for bytes in (0..whole.len()).step_by(7) {
        let mut client = Client::connect(gateway.address()).await;
        assert!(client.write(&whole[..bytes]).await);
    }
    expect_idle(&gateway).await;
    assert_eq!(worker.request_count(), 0);
    assert_eq!(Client::ask(&gateway).await.answer().await.expect("response received").text(), FINE);
}
