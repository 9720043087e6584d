//! Streams whose first token is late: heartbeats of the gateway and of engines, retries and errors after the head.

use std::time::Duration;

use pointsman::Outcome;
use pointsman_gateway::app::Gateway;
use pointsman_gateway::settings::{MessagesMode, Settings};
use serde_json::Value as Json;

use crate::common::proxy::{
    Act, Answer, EVENT, FINE, Scripted, chunk, chunked_head, full_response, gateway, send, stream_end, until, write,
};
use crate::faults::{Client, DONE, PATH, body, counting_outcomes, expect_idle, expect_outcome, metric, settings};

const BEAT: &str = ": keep-alive\n\n";
const PING: &str = "event: ping\ndata: {\"type\": \"ping\"}\n\n";
const ENGINE_BEAT: &str = ": of the engine\n\n";
const ROLE: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n";

/// A gateway with heartbeats after a few milliseconds.
fn soon(workers: &[&Scripted]) -> Settings {
    let urls: Vec<_> = workers.iter().map(|worker| worker.url()).collect();
    let mut settings = counting_outcomes(settings(&urls));
    settings.gateway.heartbeat_after_ms = 20;
    settings
}

/// The response after its heartbeats, of which there is at least one.
fn after_heartbeats<'a>(answer: &'a Answer, beat: &str) -> &'a str {
    assert_eq!((answer.status, answer.is_whole), (200, true), "{answer:?}");
    assert_eq!(answer.header("content-type"), Some("text/event-stream; charset=utf-8"));
    let text = answer.text();
    assert!(text.starts_with(beat), "{text}");
    text.trim_start_matches(beat)
}

async fn served(gateway: &Gateway, status: &str) -> f64 {
    metric(gateway, "pointsman_gateway_requests_total", &[status]).await
}

fn has_beats(count: usize) -> impl Fn(&Answer) -> bool {
    move |answer| answer.text().matches(BEAT).count() >= count
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_prefill_is_bridged_by_heartbeats() {
    alone!();
    for begins in [vec![], vec![chunked_head()], vec![chunked_head(), chunk(ROLE)]] {
        let role = if begins.len() == 2 { ROLE } else { "" };
        let head = if begins.is_empty() { vec![chunked_head()] } else { vec![] };
        let steps = [begins, vec![Act::Wait], head, vec![chunk(FINE), stream_end()]].concat();
        let worker = Scripted::responding_with(steps).await;
        let gateway = gateway(soon(&[&worker])).await;
        let (before, body) = (served(&gateway, "status=\"200\"").await, role.to_owned() + FINE);
        let mut client = Client::ask(&gateway).await;
        client.expect(has_beats(30)).await;
        worker.release(1);
        let answer = client.answer().await.expect("response started");
        assert_eq!(after_heartbeats(&answer, BEAT), body);
        let headers = ["cache-control", "x-accel-buffering"].map(|name| answer.header(name));
        assert_eq!(headers, [Some("no-cache"), Some("no")]);
        assert!(answer.header("x-request-id").is_some());
        assert_eq!((worker.request_count(), served(&gateway, "status=\"200\"").await - before), (1, 1.0));
        expect_idle(&gateway).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_is_retried_after_heartbeats() {
    alone!();
    let died = "data: {\"error\":{\"message\":\"dead\"}}\n\n";
    let failures: [(Vec<Act>, Outcome); 3] = [
        (vec![full_response("500 Oops", "{}")], Outcome::ServerError),
        (vec![Act::Reset], Outcome::Reset),
        (vec![chunked_head(), chunk(ENGINE_BEAT), chunk(ROLE), chunk(died), stream_end()], Outcome::ServerError),
    ];
    for (fails, outcome) in failures {
        let bad = Scripted::responding_with([vec![Act::Wait], fails].concat()).await;
        let good = Scripted::responding_with(vec![Act::Wait, full_response("200 OK", FINE)]).await;
        let gateway = gateway(soon(&[&bad, &good])).await;
        let mut client = Client::ask(&gateway).await; // round robin: the first worker
        client.expect(has_beats(2)).await;
        bad.release(1);
        until("the other worker has it", || good.request_count() == 1).await;
        client.expect(has_beats(4)).await;
        good.release(1);
        let answer = client.answer().await.expect("response started");
        let text = answer.text().replace(ENGINE_BEAT, "");
        assert_eq!(text.trim_start_matches(BEAT), FINE, "{answer:?}");
        expect_outcome(&gateway, "another worker serves it", outcome).await;
        expect_idle(&gateway).await;
    }
}

/// Data of the event with this name, or of the first one without a name.
fn data_of(events: &str, name: &str) -> Json {
    let event = events.split("\n\n").find(|event| event.starts_with(name)).unwrap_or_else(|| panic!("{events}"));
    let data = event.lines().find_map(|line| line.strip_prefix("data: ")).expect("data");
    serde_json::from_str(data).expect("JSON")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_error_after_the_head_is_the_last_event_of_the_dialect() {
    alone!();
    let worker = Scripted::responding_with(vec![Act::Wait, full_response("500 Oops", "{\"error\":\"dead\"}")]).await;
    for (path, mode, beat) in [
        ("/v1/completions", MessagesMode::Pass, BEAT),
        ("/v1/chat/completions", MessagesMode::Pass, BEAT),
        ("/v1/responses", MessagesMode::Pass, BEAT),
        ("/v1/messages", MessagesMode::Pass, PING),
        ("/v1/messages", MessagesMode::Translate, PING),
    ] {
        let mut settings = soon(&[&worker]);
        settings.models[0].messages = mode;
        let gateway = gateway(settings).await;
        let (before, requests) = (served(&gateway, "status=\"200\"").await, worker.request_count());
        let fields = "\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"input\":\"a\",\"prompt\":\"a\"";
        let body = format!("{{\"model\":\"mock\",\"stream\":true,\"max_tokens\":9,{fields}}}");
        let mut client = Client::of(send(gateway.address(), "POST", path, "", body.as_bytes()).await);
        client.expect(|answer| answer.text().starts_with(&beat.repeat(2))).await;
        worker.release(1);
        let answer = client.answer().await.expect("response started");
        let end = after_heartbeats(&answer, beat);
        match path {
            "/v1/messages" => {
                let error = data_of(end, "event: error");
                assert_eq!((&error["type"], &error["error"]["type"]), (&"error".into(), &"api_error".into()), "{end}");
                assert_eq!(error["error"]["message"], "dead");
            }
            "/v1/responses" => {
                let failed = data_of(end, "event: response.failed");
                assert_eq!(failed["response"]["error"]["message"], "dead");
                assert_eq!(data_of(end, "event: error")["message"], "dead");
            }
            _ => {
                assert_eq!(data_of(end, "data: ")["error"]["message"], "dead");
                assert!(end.ends_with(DONE), "{end}");
            }
        }
        assert_eq!(worker.request_count() - requests, 1);
        assert_eq!(served(&gateway, "status=\"200\"").await - before, 1.0, "{path}");
        expect_idle(&gateway).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_queued_request_has_heartbeats() {
    alone!();
    let worker = Scripted::responding_with(vec![Act::Wait, full_response("200 OK", FINE)]).await;
    for times_out in [false, true] {
        let mut settings = soon(&[&worker]);
        settings.models[0].router.queue.threshold = Some(0.0);
        if times_out {
            settings.gateway.queue_timeout_ms = 300;
        }
        let gateway = gateway(settings).await;
        let requests = worker.request_count();
        let first = Client::ask(&gateway).await;
        until("the worker is busy", || worker.request_count() == requests + 1).await;
        let mut queued = Client::ask(&gateway).await;
        queued.expect(has_beats(3)).await;
        if times_out {
            let answer = queued.answer().await.expect("response started");
            let end = after_heartbeats(&answer, BEAT);
            assert_eq!(data_of(end, "data: ")["error"]["code"], "queue_timeout");
            worker.release(1);
        } else {
            worker.release(2);
            let answer = queued.answer().await.expect("response started");
            assert_eq!(after_heartbeats(&answer, BEAT), FINE);
        }
        assert_eq!(after_heartbeats(&first.answer().await.expect("response started"), BEAT), FINE);
        expect_idle(&gateway).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_during_heartbeats_ends_the_attempt() {
    alone!();
    let worker = Scripted::responding_with(vec![Act::Hang]).await;
    let gateway = gateway(soon(&[&worker])).await;
    let gone = metric(&gateway, "pointsman_gateway_client_gone_total", &[]).await;
    let before = served(&gateway, "status=\"200\"").await;
    let mut client = Client::ask(&gateway).await;
    client.expect(has_beats(2)).await;
    drop(client);
    worker.wait_until_closed().await;
    expect_idle(&gateway).await;
    assert_eq!(metric(&gateway, "pointsman_gateway_client_gone_total", &[]).await - gone, 1.0);
    assert_eq!(served(&gateway, "status=\"200\"").await - before, 1.0, "as sent");
}

/// With the default of five seconds, the gateway sends no heartbeat of its own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn heartbeats_of_an_engine_pass_at_once() {
    alone!();
    let ping = PING.replace('\n', "\r\n");
    for (first, second) in [(ENGINE_BEAT, ENGINE_BEAT), (ping.as_str(), ":\n"), (PING, "data: {\"type\":\"ping\"}\n\n")]
    {
        let (part, rest) = first.split_at(first.len() / 2);
        let fails = vec![chunked_head(), chunk(part), chunk(rest), Act::Wait, chunk(ROLE), chunk(second), Act::Reset];
        let serves = vec![
            chunked_head(),
            chunk(second),
            Act::Wait,
            chunk(ROLE),
            chunk(second),
            Act::Wait,
            chunk(FINE),
            stream_end(),
        ];
        let workers = [Scripted::responding_with(fails).await, Scripted::responding_with(serves).await];
        let mut settings = soon(&[&workers[0], &workers[1]]);
        settings.gateway.heartbeat_after_ms = 60_000;
        let gateway = gateway(settings).await;
        let mut client = Client::ask(&gateway).await;
        client.expect_body(first.as_bytes()).await;
        workers[0].release(1);
        let failed = first.to_owned() + second;
        client.expect_body((failed.clone() + second).as_bytes()).await;
        workers[1].release(1);
        client.expect_body((failed.clone() + second + second).as_bytes()).await;
        workers[1].release(1);
        let answer = client.answer().await.expect("response started");
        assert_eq!(answer.text(), failed + second + second + ROLE + FINE);
        expect_outcome(&gateway, "after the role", Outcome::Reset).await;
        expect_idle(&gateway).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn heartbeats_of_an_engine_extend_the_time_up_to_a_limit() {
    const FIRST_BYTE_MAX: Duration = Duration::from_secs(3);
    alone!();
    let beats = (0..5).flat_map(|_| [Act::Wait, chunk(ENGINE_BEAT)]).collect();
    let steps = [vec![chunked_head()], beats, vec![chunk(FINE), stream_end()]].concat();
    let endless = chunked_head();
    let flood = Act::Flood(format!("{:x}\r\n{ENGINE_BEAT}\r\n", ENGINE_BEAT.len()).into());
    let workers = [Scripted::responding_with(steps).await, Scripted::responding_with(vec![endless, flood]).await];
    for (worker, heartbeat_after_ms) in [(&workers[0], 0), (&workers[0], 60_000), (&workers[1], 60_000)] {
        let mut settings = soon(&[worker]);
        settings.gateway.heartbeat_after_ms = heartbeat_after_ms;
        settings.gateway.first_byte_timeout_ms = FIRST_BYTE_MAX.as_millis() as u64;
        settings.gateway.answer_timeout_ms = 10 * settings.gateway.first_byte_timeout_ms;
        let is_endless = worker.url() == workers[1].url();
        if is_endless {
            (settings.gateway.first_byte_timeout_ms, settings.gateway.answer_timeout_ms) = (100, 300);
        }
        let gateway = gateway(settings).await;
        let client = Client::ask(&gateway).await;
        if is_endless {
            let answer = client.answer().await.expect("response started");
            let end = after_heartbeats(&answer, ENGINE_BEAT);
            assert_eq!(data_of(end, "data: ")["error"]["code"], "worker_timeout");
        } else {
            for _ in 0..5 {
                tokio::time::sleep(FIRST_BYTE_MAX / 4).await;
                worker.release(1);
            }
            let answer = client.answer().await.expect("response started");
            assert_eq!((answer.status, answer.text()), (200, (ENGINE_BEAT.repeat(5) + FINE).as_str()));
        }
        expect_idle(&gateway).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_begins_in_time_passes_unchanged() {
    alone!();
    let text = [ENGINE_BEAT, ROLE, ENGINE_BEAT, PING, EVENT, ENGINE_BEAT, DONE].concat();
    let known = full_response("200 OK", &text.replace(": of", "data:\n: of"));
    let own = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-store\r\n\
               x-accel-buffering: yes\r\ntransfer-encoding: chunked\r\n\r\n";
    for (steps, text, headers) in [
        (vec![known], text.replace(": of", "data:\n: of"), ["no-cache", "no"]),
        (vec![chunked_head(), chunk(&text), stream_end()], text.clone(), ["no-cache", "no"]),
        (vec![write(own), chunk(&text), stream_end()], text.clone(), ["no-store", "yes"]),
    ] {
        for heartbeat_after_ms in [0, 60_000] {
            let worker = Scripted::responding_with(steps.clone()).await;
            let mut settings = soon(&[&worker]);
            settings.gateway.heartbeat_after_ms = heartbeat_after_ms;
            let gateway = gateway(settings).await;
            let answer = Client::ask(&gateway).await.answer().await.expect("response received");
            assert_eq!((answer.status, answer.text(), answer.is_whole), (200, text.as_str(), true));
            assert_eq!(["cache-control", "x-accel-buffering"].map(|name| answer.header(name)), headers.map(Some));
            expect_idle(&gateway).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_requests_have_no_heartbeats() {
    alone!();
    let worker = Scripted::responding_with(vec![Act::Wait, full_response("500 Oops", "{}")]).await;
    let gateway = gateway(soon(&[&worker])).await;
    let whole = body().replace("true", "false");
    let client = Client::of(send(gateway.address(), "POST", PATH, "", whole.as_bytes()).await);
    until("the worker has it", || worker.request_count() == 1).await;
    tokio::time::sleep(Duration::from_millis(100)).await; // several intervals
    worker.release(1);
    let answer = client.answer().await.expect("response received");
    assert_eq!((answer.status, answer.header("x-accel-buffering")), (500, None), "{answer:?}");
    expect_idle(&gateway).await;
}
