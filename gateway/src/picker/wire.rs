//! Messages of Envoy's external processing protocol and of gRPC health checks: the fields that the picker uses.
//!
//! Source of names and numbers: `envoy/service/ext_proc/v3/external_processor.proto`, `envoy/config/core/v3/base.proto`
//! and `grpc/health/v1/health.proto`. Unknown fields are skipped.

use std::collections::BTreeMap;

use axum::http;
use bytes::Bytes;
use prost::{Message, Oneof};
pub(super) use prost_types::Struct;
use prost_types::{ListValue, Value, value::Kind};

/// Longest piece of a body. Envoy-based gateways limit messages to 64 KiB.
pub(super) const PIECE_BYTES_MAX: usize = 62_000;

/// A message of the proxy.
#[derive(Clone, PartialEq, Message)]
pub(super) struct ProcessingRequest {
    #[prost(oneof = "FromProxy", tags = "2, 3, 4, 5, 6, 7")]
    pub(super) request: Option<FromProxy>,
    #[prost(message, optional, tag = "8")]
    pub(super) metadata_context: Option<Metadata>,
}

/// Part of a request or a response.
#[derive(Clone, PartialEq, Oneof)]
pub(super) enum FromProxy {
    #[prost(message, tag = "2")]
    RequestHeaders(HttpHeaders),
    #[prost(message, tag = "3")]
    ResponseHeaders(HttpHeaders),
    #[prost(message, tag = "4")]
    RequestBody(HttpBody),
    #[prost(message, tag = "5")]
    ResponseBody(HttpBody),
    #[prost(message, tag = "6")]
    RequestTrailers(Trailers),
    #[prost(message, tag = "7")]
    ResponseTrailers(Trailers),
}

/// A head, with the pseudo-headers of HTTP/2.
#[derive(Clone, PartialEq, Message)]
pub(super) struct HttpHeaders {
    #[prost(message, optional, tag = "1")]
    pub(super) headers: Option<HeaderMap>,
    #[prost(bool, tag = "3")]
    pub(super) end_of_stream: bool,
}

/// A piece of a body.
#[derive(Clone, PartialEq, Message)]
pub(super) struct HttpBody {
    #[prost(bytes = "bytes", tag = "1")]
    pub(super) body: Bytes,
    #[prost(bool, tag = "2")]
    pub(super) end_of_stream: bool,
}

/// Trailers, which the picker neither reads nor changes.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Trailers {}

#[derive(Clone, PartialEq, Message)]
pub(super) struct HeaderMap {
    #[prost(message, repeated, tag = "1")]
    pub(super) headers: Vec<HeaderValue>,
}

/// A header. Proxies set `raw_value`; older ones `value`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct HeaderValue {
    #[prost(string, tag = "1")]
    pub(super) key: String,
    #[prost(string, tag = "2")]
    pub(super) value: String,
    #[prost(bytes = "bytes", tag = "3")]
    pub(super) raw_value: Bytes,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Metadata {
    #[prost(btree_map = "string, message", tag = "1")]
    pub(super) filter_metadata: BTreeMap<String, Struct>,
}

/// A message to the proxy.
#[derive(Clone, PartialEq, Message)]
pub(super) struct ProcessingResponse {
    #[prost(oneof = "ToProxy", tags = "1, 2, 3, 4, 5, 6, 7")]
    pub(super) response: Option<ToProxy>,
    #[prost(message, optional, tag = "8")]
    pub(super) dynamic_metadata: Option<Struct>,
}

/// Answer to one message of the proxy.
#[derive(Clone, PartialEq, Oneof)]
pub(super) enum ToProxy {
    #[prost(message, tag = "1")]
    RequestHeaders(PartResponse),
    #[prost(message, tag = "2")]
    ResponseHeaders(PartResponse),
    #[prost(message, tag = "3")]
    RequestBody(PartResponse),
    #[prost(message, tag = "4")]
    ResponseBody(PartResponse),
    #[prost(message, tag = "5")]
    RequestTrailers(Trailers),
    #[prost(message, tag = "6")]
    ResponseTrailers(Trailers),
    #[prost(message, tag = "7")]
    Immediate(ImmediateResponse),
}

/// Answer to a head or to a piece of a body, which differ only in their tags.
#[derive(Clone, PartialEq, Message)]
pub(super) struct PartResponse {
    #[prost(message, optional, tag = "1")]
    pub(super) response: Option<CommonResponse>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct CommonResponse {
    #[prost(message, optional, tag = "2")]
    pub(super) header_mutation: Option<HeaderMutation>,
    #[prost(message, optional, tag = "3")]
    pub(super) body_mutation: Option<BodyMutation>,
    #[prost(bool, tag = "5")]
    pub(super) clear_route_cache: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct HeaderMutation {
    #[prost(message, repeated, tag = "1")]
    pub(super) set_headers: Vec<HeaderValueOption>,
    #[prost(string, repeated, tag = "2")]
    pub(super) remove_headers: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct HeaderValueOption {
    #[prost(message, optional, tag = "1")]
    pub(super) header: Option<HeaderValue>,
    #[prost(int32, tag = "3")]
    pub(super) append_action: i32,
}

/// `OVERWRITE_IF_EXISTS_OR_ADD`.
const OVERWRITE: i32 = 2;

#[derive(Clone, PartialEq, Message)]
pub(super) struct BodyMutation {
    #[prost(message, optional, tag = "3")]
    pub(super) streamed_response: Option<StreamedBodyResponse>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct StreamedBodyResponse {
    #[prost(bytes = "bytes", tag = "1")]
    pub(super) body: Bytes,
    #[prost(bool, tag = "2")]
    pub(super) end_of_stream: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ImmediateResponse {
    #[prost(message, optional, tag = "1")]
    pub(super) status: Option<HttpStatus>,
    #[prost(message, optional, tag = "2")]
    pub(super) headers: Option<HeaderMutation>,
    #[prost(bytes = "bytes", tag = "3")]
    pub(super) body: Bytes,
    #[prost(string, tag = "5")]
    pub(super) details: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct HttpStatus {
    #[prost(int32, tag = "1")]
    pub(super) code: i32,
}

/// Query of `grpc.health.v1.Health`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct HealthCheckRequest {
    #[prost(string, tag = "1")]
    pub(super) service: String,
}

/// Reply of `grpc.health.v1.Health`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct HealthCheckResponse {
    #[prost(int32, tag = "1")]
    pub(super) status: i32,
}

impl From<ToProxy> for ProcessingResponse {
    fn from(response: ToProxy) -> Self {
        Self { response: Some(response), dynamic_metadata: None }
    }
}

impl HeaderValue {
    pub(super) fn bytes(&self) -> &[u8] {
        if self.raw_value.is_empty() { self.value.as_bytes() } else { &self.raw_value }
    }
}

impl HeaderMutation {
    /// Sets a header, in place of all values that the proxy has.
    pub(super) fn set(&mut self, key: &str, value: impl Into<Bytes>) {
        let header = HeaderValue { key: key.to_owned(), value: String::new(), raw_value: value.into() };
        self.set_headers.push(HeaderValueOption { header: Some(header), append_action: OVERWRITE });
    }

    pub(super) fn set_value(&mut self, name: &http::HeaderName, value: &http::HeaderValue) {
        self.set(name.as_str(), Bytes::copy_from_slice(value.as_bytes()));
    }
}

impl Metadata {
    /// Texts at `key` of a namespace: a list, or one text with commas. `None` without the key.
    pub(super) fn texts(&self, namespace: &str, key: &str) -> Option<Vec<String>> {
        let of_text = |text: &str| -> Vec<String> {
            text.split(',').map(str::trim).filter(|part| !part.is_empty()).map(str::to_owned).collect()
        };
        match self.filter_metadata.get(namespace)?.fields.get(key)?.kind.as_ref()? {
            Kind::StringValue(text) => Some(of_text(text)),
            Kind::ListValue(ListValue { values }) => {
                let texts = values.iter().filter_map(|value| match &value.kind {
                    Some(Kind::StringValue(text)) => Some(of_text(text)),
                    _ => None,
                });
                Some(texts.flatten().collect())
            }
            _ => Some(Vec::new()),
        }
    }
}

/// The metadata `namespace.key = text`.
pub(super) fn metadata(namespace: &str, key: &str, text: &str) -> Struct {
    let value = |kind| Value { kind: Some(kind) };
    let inner = Struct { fields: [(key.to_owned(), value(Kind::StringValue(text.to_owned())))].into() };
    Struct { fields: [(namespace.to_owned(), value(Kind::StructValue(inner)))].into() }
}

/// A body in pieces of permitted length, at least one. The last one has the end mark if `ends`.
pub(super) fn pieces(mut body: Bytes, ends: bool) -> impl Iterator<Item = PartResponse> {
    let mut is_over = false;
    std::iter::from_fn(move || {
        if is_over {
            return None;
        }
        let piece = body.split_to(body.len().min(PIECE_BYTES_MAX));
        is_over = body.is_empty();
        let streamed = StreamedBodyResponse { body: piece, end_of_stream: ends && is_over };
        let body_mutation = Some(BodyMutation { streamed_response: Some(streamed) });
        Some(PartResponse { response: Some(CommonResponse { body_mutation, ..CommonResponse::default() }) })
    })
}
