//! Spans of requests that pass the gateway.

use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use serde_json::json;
use tokio::time::Duration;

use super::collector::{Collector, PARENT, TRACE, TRACEPARENT, attribute, text};
use crate::common::proxy::{
    FINE_JSON, Scripted, answer, gateway, request, settings, stream, stream_end, until, worker,
};

const FIRST: &str = "data: {\"choices\":[{\"text\":\"a\"}]}\n\n";
const LAST: &str = "data: {\"choices\":[{\"text\":\"b\",\"finish_reason\":\"length\"}],\"usage\":{\"prompt_tokens\":40,\
                    \"completion_tokens\":2}}\n\ndata: [DONE]\n\n";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_is_one_span_tree_in_the_trace_of_the_client() {
    let collector = Collector::start().await;
    let engine = Scripted::start(|n| match n {
        0 => answer("503 Service Unavailable", "{}"),
        1 => stream(&[FIRST, LAST]).into_iter().chain([stream_end()]).collect(),
        _ => answer("200 OK", FINE_JSON),
    })
    .await;
    let mut settings = settings(vec![worker(1, &engine.url(), 2)]);
    settings.gateway.otlp_endpoint = Some(format!("http://{}", collector.address));
    let gateway = gateway(settings).await;
    let body = json!({ "model": "mock", "prompt": [1, 2, 3], "stream": true }).to_string();
    let headers = format!("traceparent: {TRACEPARENT}\r\ntracestate: vendor=1\r\nx-request-id: traced\r\n");
    let streamed = request(gateway.address(), "POST", "/v1/completions", &headers, body.as_bytes()).await;
    assert_eq!(streamed.status, 200);
    // Not sampled by the client: no span, and the worker receives that decision.
    let unsampled = TRACEPARENT.replace("0af7", "1af7").replace("-01", "-00");
    let body = json!({ "model": "mock", "prompt": [1, 2, 3] }).to_string();
    let headers = format!("traceparent: {unsampled}\r\n");
    assert_eq!(request(gateway.address(), "POST", "/v1/completions", &headers, body.as_bytes()).await.status, 200);
    // Without a context the gateway begins a trace.
    assert_eq!(request(gateway.address(), "POST", "/v1/completions", "", body.as_bytes()).await.status, 200);
    gateway.shutdown(Duration::from_secs(60)).await;
    until("all spans", || collector.trace(TRACE).len() == 15).await;

    let spans = collector.trace(TRACE);
    let names: Vec<&str> = spans.iter().map(|span| span.name.as_str()).collect();
    let route = ["route", "hash", "overlap", "queue", "decide", "book"];
    let root = &spans[0];
    assert_eq!((root.name.as_str(), root.kind), ("/v1/completions", 2), "{names:?}");
    assert_eq!(root.parent_span_id, PARENT.to_be_bytes());
    assert_eq!(attribute(&root.attributes, "pointsman.request_id"), text("traced").as_ref());
    assert_eq!(attribute(&root.attributes, "pointsman.outcome"), text("ok").as_ref());
    assert_eq!(attribute(&root.attributes, "gen_ai.request.model"), text("mock").as_ref());
    assert_eq!(attribute(&root.attributes, "gen_ai.usage.output_tokens"), Some(&Value::IntValue(2)));
    let children =
        |of: &Span| -> Vec<&Span> { spans.iter().filter(|span| span.parent_span_id == of.span_id).collect() };
    let of_root = children(root);
    let mut of_root_names: Vec<&str> = of_root.iter().map(|span| span.name.as_str()).collect();
    of_root_names.sort_unstable();
    assert_eq!(of_root_names, ["route", "route", "upstream", "upstream"], "a retry is routed again");
    for span in of_root.iter().filter(|span| span.name == "route") {
        let mut phases = children(span);
        phases.sort_by_key(|phase| route.iter().position(|name| *name == phase.name));
        let phase_names: Vec<&str> = phases.iter().map(|phase| phase.name.as_str()).collect();
        assert_eq!(phase_names, route[1..]);
        assert_eq!(phases[0].start_time_unix_nano, span.start_time_unix_nano);
        assert_eq!(phases[4].end_time_unix_nano, span.end_time_unix_nano);
        assert!(phases.windows(2).all(|pair| pair[0].end_time_unix_nano == pair[1].start_time_unix_nano));
    }
    let upstream: Vec<&&Span> = of_root.iter().filter(|span| span.name == "upstream").collect();
    let status = |span: &Span| span.status.clone().map(|status| (status.code, status.message)).unwrap_or_default();
    assert_eq!((status(upstream[0]), upstream[0].kind), ((2, "busy".to_owned()), 3));
    assert_eq!(status(upstream[1]), (0, String::new()));
    let [event] = &upstream[1].events[..] else { panic!("{upstream:?}") };
    assert_eq!(event.name, "first token");
    assert!(event.time_unix_nano >= upstream[1].start_time_unix_nano);
    for span in &spans {
        assert!(span.start_time_unix_nano <= span.end_time_unix_nano, "{span:?}");
        assert!(span.end_time_unix_nano <= root.end_time_unix_nano, "{span:?}");
    }

    // Each attempt is the parent of the spans of its worker.
    let sent: Vec<String> =
        engine.requests().iter().map(|got| got.header("traceparent").expect("set").to_owned()).collect();
    let hex = |id: &[u8]| id.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let parent_of = |span: &Span| format!("00-{TRACE:032x}-{}-01", hex(&span.span_id));
    assert_eq!(sent[..2], [parent_of(upstream[0]), parent_of(upstream[1])]);
    assert_eq!(engine.requests()[1].header("tracestate"), Some("vendor=1"));
    assert!(sent[2].starts_with(&unsampled[..36]) && sent[2].ends_with("-00"), "{}", sent[2]);
    let own = u128::from_str_radix(&sent[3][3..35], 16).expect("hexadecimal");
    assert_eq!(collector.trace(own)[0].parent_span_id, Vec::<u8>::new());
    assert_eq!(collector.spans().len(), 15 + collector.trace(own).len(), "no span of the unsampled trace");
    let received = collector.received.lock().expect("lock not poisoned");
    let resource = received[0].resource_spans[0].resource.as_ref().expect("a resource");
    assert_eq!(attribute(&resource.attributes, "service.name"), text("pointsman").as_ref());
}
