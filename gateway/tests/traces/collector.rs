//! Collector of spans over OTLP/gRPC.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use axum::body::Bytes;
use axum::http::{HeaderMap, HeaderValue, Request, Response};
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value::Value};
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message as _;
use tokio::net::TcpListener;

const EXPORT: &str = "/opentelemetry.proto.collector.trace.v1.TraceService/Export";

/// The client's trace and span.
pub(crate) const TRACEPARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
pub(crate) const TRACE: u128 = 0x0af7_6519_16cd_43dd_8448_eb21_1c80_319c;
pub(crate) const PARENT: u64 = 0xb7ad_6b71_6920_3331;

/// A collector that keeps all spans.
pub(crate) struct Collector {
    pub(crate) address: SocketAddr,
    pub(crate) received: Arc<Mutex<Vec<ExportTraceServiceRequest>>>,
}

impl Collector {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("local address");
        let received: Arc<Mutex<Vec<ExportTraceServiceRequest>>> = Arc::default();
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

    pub(crate) fn spans(&self) -> Vec<Span> {
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
    received: Arc<Mutex<Vec<ExportTraceServiceRequest>>>,
) -> Result<Response<impl http_body::Body<Data = Bytes, Error = std::convert::Infallible>>, hyper::Error> {
    assert_eq!(request.uri().path(), EXPORT);
    let body = request.into_body().collect().await?.to_bytes();
    let message = ExportTraceServiceRequest::decode(&body[5..]).expect("a valid message");
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
    Some(Value::StringValue(value.to_owned()))
}
