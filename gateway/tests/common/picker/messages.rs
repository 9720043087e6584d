//! Messages of Envoy's external processing protocol and of gRPC health checks, from the side of the proxy.
//!
//! Source of names and numbers: `envoy/service/ext_proc/v3/external_processor.proto`, `envoy/config/core/v3/base.proto`,
//! `envoy/type/v3/http_status.proto` and `grpc/health/v1/health.proto`. The definitions share nothing with the gateway,
//! so that a wrong number on either side fails the tests.

use std::collections::BTreeMap;

use bytes::Bytes;
use prost::{Message, Oneof};
use prost_types::{ListValue, Struct, Value, value::Kind};

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ProcessingRequest {
    #[prost(oneof = "Part", tags = "2, 3, 4, 5, 6, 7")]
    pub(crate) request: Option<Part>,
    #[prost(message, optional, tag = "8")]
    pub(crate) metadata_context: Option<Metadata>,
    /// The gateway does not read it.
    #[prost(message, optional, tag = "11")]
    pub(crate) protocol_config: Option<ProtocolConfiguration>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(crate) enum Part {
    #[prost(message, tag = "2")]
    RequestHeaders(HttpHeaders),
    #[prost(message, tag = "3")]
    ResponseHeaders(HttpHeaders),
    #[prost(message, tag = "4")]
    RequestBody(HttpBody),
    #[prost(message, tag = "5")]
    ResponseBody(HttpBody),
    #[prost(message, tag = "6")]
    RequestTrailers(HttpTrailers),
    #[prost(message, tag = "7")]
    ResponseTrailers(HttpTrailers),
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ProtocolConfiguration {
    #[prost(int32, tag = "1")]
    pub(crate) request_body_mode: i32,
    #[prost(int32, tag = "2")]
    pub(crate) response_body_mode: i32,
}

impl ProtocolConfiguration {
    /// `FULL_DUPLEX_STREAMED` for both bodies.
    pub(crate) const FULL_DUPLEX: Self = Self { request_body_mode: 4, response_body_mode: 4 };
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct HttpHeaders {
    #[prost(message, optional, tag = "1")]
    pub(crate) headers: Option<HeaderMap>,
    #[prost(bool, tag = "3")]
    pub(crate) end_of_stream: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct HttpBody {
    #[prost(bytes = "bytes", tag = "1")]
    pub(crate) body: Bytes,
    #[prost(bool, tag = "2")]
    pub(crate) end_of_stream: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct HttpTrailers {
    #[prost(message, optional, tag = "1")]
    pub(crate) trailers: Option<HeaderMap>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct HeaderMap {
    #[prost(message, repeated, tag = "1")]
    pub(crate) headers: Vec<HeaderValue>,
}

impl HeaderMap {
    /// Headers as Envoy encodes them.
    pub(crate) fn of<'a>(headers: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let raw = |text: &str| Bytes::copy_from_slice(text.as_bytes());
        let header = |(key, value): (&str, &str)| HeaderValue { key: key.to_owned(), raw_value: raw(value) };
        Self { headers: headers.into_iter().map(header).collect() }
    }
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct HeaderValue {
    #[prost(string, tag = "1")]
    pub(crate) key: String,
    #[prost(bytes = "bytes", tag = "3")]
    pub(crate) raw_value: Bytes,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Metadata {
    #[prost(btree_map = "string, message", tag = "1")]
    pub(crate) filter_metadata: BTreeMap<String, Struct>,
}

impl Metadata {
    pub(crate) fn text(namespace: &str, key: &str, text: &str) -> Self {
        Self::of(namespace, key, Kind::StringValue(text.to_owned()))
    }

    pub(crate) fn list(namespace: &str, key: &str, texts: &[&str]) -> Self {
        let value = |text: &&str| Value { kind: Some(Kind::StringValue((*text).to_owned())) };
        Self::of(namespace, key, Kind::ListValue(ListValue { values: texts.iter().map(value).collect() }))
    }

    fn of(namespace: &str, key: &str, kind: Kind) -> Self {
        let fields = Struct { fields: [(key.to_owned(), Value { kind: Some(kind) })].into() };
        Self { filter_metadata: [(namespace.to_owned(), fields)].into() }
    }
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ProcessingResponse {
    #[prost(oneof = "Answer", tags = "1, 2, 3, 4, 5, 6, 7")]
    pub(crate) response: Option<Answer>,
    #[prost(message, optional, tag = "8")]
    pub(crate) dynamic_metadata: Option<Struct>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(crate) enum Answer {
    #[prost(message, tag = "1")]
    RequestHeaders(CommonAnswer),
    #[prost(message, tag = "2")]
    ResponseHeaders(CommonAnswer),
    #[prost(message, tag = "3")]
    RequestBody(CommonAnswer),
    #[prost(message, tag = "4")]
    ResponseBody(CommonAnswer),
    #[prost(message, tag = "5")]
    RequestTrailers(TrailersResponse),
    #[prost(message, tag = "6")]
    ResponseTrailers(TrailersResponse),
    #[prost(message, tag = "7")]
    Immediate(ImmediateResponse),
}

/// `HeadersResponse` and `BodyResponse`, which have the same field.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct CommonAnswer {
    #[prost(message, optional, tag = "1")]
    pub(crate) response: Option<CommonResponse>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct TrailersResponse {
    #[prost(message, optional, tag = "1")]
    pub(crate) header_mutation: Option<HeaderMutation>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct CommonResponse {
    #[prost(int32, tag = "1")]
    pub(crate) status: i32,
    #[prost(message, optional, tag = "2")]
    pub(crate) header_mutation: Option<HeaderMutation>,
    #[prost(message, optional, tag = "3")]
    pub(crate) body_mutation: Option<BodyMutation>,
    #[prost(bool, tag = "5")]
    pub(crate) clear_route_cache: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct HeaderMutation {
    #[prost(message, repeated, tag = "1")]
    pub(crate) set_headers: Vec<HeaderValueOption>,
    #[prost(string, repeated, tag = "2")]
    pub(crate) remove_headers: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct HeaderValueOption {
    #[prost(message, optional, tag = "1")]
    pub(crate) header: Option<HeaderValue>,
    #[prost(int32, tag = "3")]
    pub(crate) append_action: i32,
}

/// `OVERWRITE_IF_EXISTS_OR_ADD` of `append_action`.
const OVERWRITE: i32 = 2;

impl HeaderMutation {
    /// The headers that are set, each in place of earlier values.
    pub(crate) fn set(&self) -> BTreeMap<String, String> {
        let text = |value: &Bytes| String::from_utf8(value.to_vec()).expect("headers are text");
        let set = self.set_headers.iter().map(|option| {
            assert_eq!(option.append_action, OVERWRITE, "{option:?}");
            let header = option.header.as_ref().expect("a header");
            (header.key.clone(), text(&header.raw_value))
        });
        let headers: BTreeMap<_, _> = set.collect();
        assert_eq!(headers.len(), self.set_headers.len(), "a header is set twice: {self:?}");
        headers
    }
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct BodyMutation {
    #[prost(oneof = "Mutation", tags = "1, 2, 3")]
    pub(crate) mutation: Option<Mutation>,
}

/// Only [`Mutation::Streamed`] is allowed in full-duplex mode.
#[derive(Clone, PartialEq, Oneof)]
pub(crate) enum Mutation {
    #[prost(bytes = "bytes", tag = "1")]
    Body(Bytes),
    #[prost(bool, tag = "2")]
    Clear(bool),
    #[prost(message, tag = "3")]
    Streamed(StreamedBodyResponse),
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct StreamedBodyResponse {
    #[prost(bytes = "bytes", tag = "1")]
    pub(crate) body: Bytes,
    #[prost(bool, tag = "2")]
    pub(crate) end_of_stream: bool,
}

impl CommonAnswer {
    /// The piece of a body.
    pub(crate) fn piece(self) -> StreamedBodyResponse {
        let common = self.response.expect("a response");
        assert_eq!((common.status, common.header_mutation), (0, None), "CONTINUE without changes to headers");
        match common.body_mutation.and_then(|body| body.mutation) {
            Some(Mutation::Streamed(piece)) => piece,
            other => panic!("not a piece of full-duplex mode: {other:?}"),
        }
    }
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ImmediateResponse {
    #[prost(message, optional, tag = "1")]
    pub(crate) status: Option<HttpStatus>,
    #[prost(message, optional, tag = "2")]
    pub(crate) headers: Option<HeaderMutation>,
    #[prost(bytes = "bytes", tag = "3")]
    pub(crate) body: Bytes,
    #[prost(string, tag = "5")]
    pub(crate) details: String,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct HttpStatus {
    #[prost(int32, tag = "1")]
    pub(crate) code: i32,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct HealthCheckRequest {
    #[prost(string, tag = "1")]
    pub(crate) service: String,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct HealthCheckResponse {
    #[prost(enumeration = "ServingStatus", tag = "1")]
    pub(crate) status: i32,
}

/// `ServingStatus` of a health check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, prost::Enumeration)]
#[repr(i32)]
pub(crate) enum ServingStatus {
    Unknown = 0,
    Serving = 1,
    NotServing = 2,
    ServiceUnknown = 3,
}
