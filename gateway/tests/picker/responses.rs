//! Responses that pass the picker, and the bookings that end or move with them.

use super::client::Exchange;
use super::messages::{Answer, HttpTrailers, Part};
use super::{COMPLETIONS, ENDPOINTS, Pool, workers};

const JSON: &str = "application/json";
const EVENTS: &str = "text/event-stream";
const DONE: &[u8] = b"data: [DONE]\n\n";

const MOVED: &str = "pointsman_gateway_picks_total{result=\"moved\"}";

fn event(n: usize) -> Vec<u8> {
    format!("data: {{\"choices\":[{{\"text\":\"{n}\"}}]}}\n\n").into_bytes()
}

/// Sends a request for a stream. Returns the position of the chosen endpoint.
async fn stream(pool: &Pool, exchange: &mut Exchange) -> usize {
    exchange.post(COMPLETIONS, &pool.request(), None).await;
    let pick = exchange.pick().await;
    ENDPOINTS.iter().position(|endpoint| *endpoint == pick.endpoint()).expect("a worker")
}

/// Passes a part of the response.
async fn pass(exchange: &mut Exchange, part: &[u8], ends: bool) {
    exchange.response_body(part, ends).await;
    let piece = exchange.response_piece().await;
    assert_eq!((&piece.body[..], piece.end_of_stream), (part, ends));
}

/// The end mark or trailers end a response. Nothing is answered afterwards, and the booking is free while the stream
/// stays open.
#[tokio::test]
async fn bookings_end_with_the_response() {
    let pool = Pool::start("picker-ends", workers(2)).await;
    let mut connection = pool.connect().await;
    for has_trailers in [false, true] {
        let mut exchange = connection.process().await;
        stream(&pool, &mut exchange).await;
        exchange.respond("200", EVENTS, false, None).await;
        exchange.response_headers().await;
        for n in 0..20 {
            pass(&mut exchange, &event(n), false).await;
        }
        assert_eq!(pool.router.health().leases, 1);
        pass(&mut exchange, DONE, !has_trailers).await;
        if has_trailers {
            exchange.send(Part::ResponseTrailers(HttpTrailers::default())).await;
            let (answer, _) = exchange.answer().await;
            let Answer::ResponseTrailers(trailers) = answer else { panic!("not the trailers: {answer:?}") };
            assert_eq!(trailers.header_mutation, None);
        }
        pool.at_rest().await;
        exchange.response_body(b"late", true).await;
        assert_eq!(exchange.finish().await, (0, String::new()), "no answer after the end");
    }
    // A response that is only a head.
    let mut exchange = connection.process().await;
    stream(&pool, &mut exchange).await;
    exchange.respond("503", JSON, true, None).await;
    exchange.response_headers().await;
    pool.at_rest().await;
    assert_eq!(exchange.finish().await, (0, String::new()));
    assert_eq!(pool.metric(&pool.requests(200)).await, 2);
    assert_eq!(pool.metric(&pool.requests(503)).await, 1);
    assert_eq!(pool.metric(&pool.requests(499)).await, 0);
}

/// The proxy itself responds before the request is complete, for example after a timeout.
#[tokio::test]
async fn a_response_before_the_pick_ends_the_request() {
    let pool = Pool::start("picker-early", workers(1)).await;
    let mut connection = pool.connect().await;
    let mut exchange = connection.process().await;
    exchange.begin(("POST", COMPLETIONS), &[("content-type", JSON)], false, None).await;
    exchange.body(b"{", false).await;
    exchange.respond("408", "text/plain", false, None).await;
    assert!(exchange.response_headers().await.is_empty());
    pass(&mut exchange, b"too slow", true).await;
    assert_eq!(exchange.finish().await, (0, String::new()));
    pool.at_rest().await;
}

/// The only test in this process that moves bookings, because their counter has no label of the model.
#[tokio::test]
async fn bookings_follow_the_endpoint_that_served() {
    let pool = Pool::start("picker-moved", workers(3)).await;
    let mut connection = pool.connect().await;
    let moved_before = pool.metric(MOVED).await;
    let at = |n: usize| [0, 1, 2].map(|other| u32::from(other == n));
    // The chosen endpoint or none: the booking stays.
    for reports in [true, false] {
        let mut exchange = connection.process().await;
        let chosen = stream(&pool, &mut exchange).await;
        exchange.respond("200", EVENTS, false, reports.then_some(ENDPOINTS[chosen])).await;
        exchange.response_headers().await;
        // The answer to a part follows the processing of the head.
        pass(&mut exchange, &event(0), false).await;
        assert_eq!((pool.booked().await, pool.router.health().leases), (at(chosen).to_vec(), 1));
        pass(&mut exchange, DONE, true).await;
        pool.at_rest().await;
        exchange.finish().await;
    }
    assert_eq!(pool.metric(MOVED).await, moved_before);

    let mut exchange = connection.process().await;
    let chosen = stream(&pool, &mut exchange).await;
    pool.until_booked(&at(chosen)).await;
    let served = (chosen + 1) % 3;
    exchange.respond("200", EVENTS, false, Some(ENDPOINTS[served])).await;
    exchange.response_headers().await;
    pass(&mut exchange, &event(0), false).await;
    pool.until_booked(&at(served)).await;
    assert_eq!(pool.router.health().leases, 1);
    assert_eq!(pool.metric(MOVED).await, moved_before + 1);
    let ended = |n: usize, outcome: &str| {
        let endpoint = ENDPOINTS[n];
        format!(
            "pointsman_gateway_worker_requests_total{{model=\"picker-moved\",worker=\"{}\",\
             worker_endpoint=\"http://{endpoint}\",status=\"none\",outcome=\"{outcome}\"}}",
            n + 1
        )
    };
    assert_eq!(pool.metric(&ended(chosen, "moved")).await, 1);
    pass(&mut exchange, DONE, true).await;
    pool.at_rest().await;
    exchange.finish().await;

    // No worker is at that endpoint: the booking ends, and the response passes.
    let mut exchange = connection.process().await;
    stream(&pool, &mut exchange).await;
    exchange.respond("200", EVENTS, false, Some("10.9.9.9:8000")).await;
    exchange.response_headers().await;
    pass(&mut exchange, &event(0), false).await;
    pool.at_rest().await;
    pass(&mut exchange, DONE, true).await;
    assert_eq!(exchange.finish().await, (0, String::new()));
    assert_eq!(pool.metric(&pool.requests(200)).await, 3);
}
