//! Spans of requests at a collector, decoded from OTLP over gRPC.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use axum::body::Bytes;
use axum::http::{HeaderMap, HeaderValue, Request, Response};
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use prost::Message as _;
use serde_json::json;
use tokio::net::TcpListener;
use tokio::time::Duration;

use crate::common::proxy::{
    FINE_JSON, Scripted, answer, gateway, request, settings, stream, stream_end, until, worker,
};

const EXPORT: &str = "/opentelemetry.proto.collector.trace.v1.TraceService/Export";

/// The client's trace and span.
pub(crate) const TRACEPARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
pub(crate) const TRACE: u128 = 0x0af7_6519_16cd_43dd_8448_eb21_1c80_319c;
pub(crate) const PARENT: u64 = 0xb7ad_6b71_6920_3331;

/// The messages of opentelemetry-proto 1.x, with the fields that the tests read.
pub(crate) mod proto {
    use prost::{Message, Oneof};

    #[derive(Clone, PartialEq, Message)]
    pub(crate) struct ExportRequest {
        #[prost(message, repeated, tag = "1")]
        pub(crate) resource_spans: Vec<ResourceSpans>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub(crate) struct ResourceSpans {
        #[prost(message, optional, tag = "1")]
        pub(crate) resource: Option<Resource>,
        #[prost(message, repeated, tag = "2")]
        pub(crate) scope_spans: Vec<ScopeSpans>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub(crate) struct Resource {
        #[prost(message, repeated, tag = "1")]
        pub(crate) attributes: Vec<KeyValue>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub(crate) struct ScopeSpans {
        #[prost(message, repeated, tag = "2")]
        pub(crate) spans: Vec<Span>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub(crate) struct Span {
        #[prost(bytes = "vec", tag = "1")]
        pub(crate) trace_id: Vec<u8>,
        #[prost(bytes = "vec", tag = "2")]
        pub(crate) span_id: Vec<u8>,
        #[prost(bytes = "vec", tag = "4")]
        pub(crate) parent_span_id: Vec<u8>,
        #[prost(string, tag = "5")]
        pub(crate) name: String,
        #[prost(int32, tag = "6")]
        pub(crate) kind: i32,
        #[prost(fixed64, tag = "7")]
        pub(crate) start_time_unix_nano: u64,
        #[prost(fixed64, tag = "8")]
        pub(crate) end_time_unix_nano: u64,
        #[prost(message, repeated, tag = "9")]
        pub(crate) attributes: Vec<KeyValue>,
        #[prost(message, repeated, tag = "11")]
        pub(crate) events: Vec<Event>,
        #[prost(message, optional, tag = "15")]
        pub(crate) status: Option<Status>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub(crate) struct Event {
        #[prost(fixed64, tag = "1")]
        pub(crate) time_unix_nano: u64,
        #[prost(string, tag = "2")]
        pub(crate) name: String,
    }

    #[derive(Clone, PartialEq, Message)]
    pub(crate) struct Status {
        #[prost(string, tag = "2")]
        pub(crate) message: String,
        #[prost(int32, tag = "3")]
        pub(crate) code: i32,
    }

    #[derive(Clone, PartialEq, Message)]
    pub(crate) struct KeyValue {
        #[prost(string, tag = "1")]
        pub(crate) key: String,
        #[prost(message, optional, tag = "2")]
        pub(crate) value: Option<AnyValue>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub(crate) struct AnyValue {
        #[prost(oneof = "Value", tags = "1, 3")]
        pub(crate) value: Option<Value>,
    }

    #[derive(Clone, PartialEq, Oneof)]
    pub(crate) enum Value {
        #[prost(string, tag = "1")]
        Text(String),
        #[prost(int64, tag = "3")]
        Number(i64),
    }
}

use proto::{ExportRequest, KeyValue, Span, Value};

/// A collector that keeps all spans.
pub(crate) struct Collector {
    pub(crate) address: SocketAddr,
    received: Arc<Mutex<Vec<ExportRequest>>>,
}

impl Collector {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("local address");
        let received: Arc<Mutex<Vec<ExportRequest>>> = Arc::default();
        let all = Arc::clone(&received);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let all = Arc::clone(&all);
                let service = hyper::service::service_fn(move |request| export(request, Arc::clone(&all)));
                let serve = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
                tokio::spawn(serve.serve_connection(TokioIo::new(stream), service));
            }
        });
        Self { address, received }
    }

    fn spans(&self) -> Vec<Span> {
        let received = self.received.lock().expect("lock not poisoned");
        let scopes = received.iter().flat_map(|request| &request.resource_spans).flat_map(|spans| &spans.scope_spans);
        scopes.flat_map(|scope| scope.spans.clone()).collect()
    }

    /// The spans of a trace, in order of their start.
    pub(crate) fn trace(&self, trace: u128) -> Vec<Span> {
        let mut spans: Vec<_> = self.spans().into_iter().filter(|span| span.trace_id == trace.to_be_bytes()).collect();
        spans.sort_by_key(|span| (span.start_time_unix_nano, std::cmp::Reverse(span.end_time_unix_nano)));
        spans
    }
}

/// `TraceService.Export`: one message with a prefix of five bytes, and an empty reply.
async fn export(
    request: Request<Incoming>,
    received: Arc<Mutex<Vec<ExportRequest>>>,
) -> Result<Response<impl http_body::Body<Data = Bytes, Error = std::convert::Infallible>>, hyper::Error> {
    assert_eq!(request.uri().path(), EXPORT);
    let body = request.into_body().collect().await?.to_bytes();
    let message = ExportRequest::decode(&body[5..]).expect("a valid message");
    received.lock().expect("lock not poisoned").push(message);
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", HeaderValue::from_static("0"));
    let frames = [Ok(Frame::data(Bytes::from_static(&[0; 5]))), Ok(Frame::trailers(trailers))];
    let mut response = Response::new(StreamBody::new(tokio_stream::iter(frames)));
    response.headers_mut().insert("content-type", HeaderValue::from_static("application/grpc"));
    Ok(response)
}

pub(crate) fn attribute<'a>(attributes: &'a [KeyValue], key: &str) -> Option<&'a Value> {
    attributes.iter().find(|attribute| attribute.key == key)?.value.as_ref()?.value.as_ref()
}

pub(crate) fn text(value: &str) -> Option<Value> {
    Some(Value::Text(value.to_owned()))
}

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
    assert_eq!(attribute(&root.attributes, "gen_ai.usage.output_tokens"), Some(&Value::Number(2)));
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
