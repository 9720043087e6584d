//! Spans of requests that pass the picker.

use tokio::time::Duration;

use super::collector::{Collector, PARENT, TRACE, TRACEPARENT, attribute, text};
use crate::common::picker::{COMPLETIONS, ENDPOINTS, Pool, workers};
use crate::common::proxy::until;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_moved_request_is_one_span_tree() {
    let collector = Collector::start().await;
    let endpoint = format!("http://{}", collector.address);
    let pool = Pool::start_with("picker-traces", workers(2), |settings| {
        settings.gateway.otlp_endpoint = Some(endpoint);
    });
    let pool = pool.await;
    let mut connection = pool.connect().await;
    let mut exchange = connection.process().await;
    let headers = [("content-type", "application/json"), ("traceparent", TRACEPARENT), ("x-request-id", "picked")];
    exchange.begin(("POST", COMPLETIONS), &headers, false, None).await;
    exchange.body(&pool.request(), true).await;
    let pick = exchange.pick().await;
    let other = ENDPOINTS[..2].iter().find(|endpoint| **endpoint != pick.endpoint()).expect("another worker");
    exchange.respond("200", "text/event-stream", false, Some(other)).await;
    exchange.response_headers().await;
    for (part, ends) in [("data: {\"choices\":[{\"text\":\"a\"}]}\n\n", false), ("data: [DONE]\n\n", true)] {
        exchange.response_body(part.as_bytes(), ends).await;
        exchange.response_piece().await;
    }
    assert_eq!(exchange.finish().await, (0, String::new()));
    pool.at_rest().await;
    drop(connection);
    pool.gateway.shutdown(Duration::from_secs(60)).await;
    until("all spans", || collector.trace(TRACE).len() == 15).await;

    let spans = collector.trace(TRACE);
    let root = &spans[0];
    assert_eq!((root.name.as_str(), root.parent_span_id.clone()), (COMPLETIONS, PARENT.to_be_bytes().to_vec()));
    assert_eq!(attribute(&root.attributes, "pointsman.request_id"), text("picked").as_ref());
    assert_eq!(attribute(&root.attributes, "pointsman.outcome"), text("ok").as_ref());
    let children = spans.iter().filter(|span| span.parent_span_id == root.span_id);
    let mut names: Vec<&str> = children.clone().map(|span| span.name.as_str()).collect();
    names.sort_unstable();
    assert_eq!(names, ["route", "route", "upstream", "upstream"]);
    let upstream: Vec<_> = children.filter(|span| span.name == "upstream").collect();
    assert_eq!(upstream[0].status.clone().map(|status| status.message), Some("moved".to_owned()));
    assert_eq!(upstream[1].events[0].name, "first token");
    let hex: String = upstream[0].span_id.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(pick.headers["traceparent"], format!("00-{TRACE:032x}-{hex}-01"), "the parent of the worker's spans");
}
