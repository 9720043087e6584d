//! Checks of the messages of a proxy that hold for any bytes.

use bytes::Bytes;
use prost::Message as _;

use super::exchange::{Event, Exchange};
use super::wire::{HeaderMutation, PIECE_BYTES_MAX, ProcessingRequest, Struct};
use super::{SUBSET, SUBSET_NAMESPACE};

/// Messages of one exchange, each behind its length as in a stream of gRPC messages, with a length of one byte.
///
/// Decoded messages encode to the same meaning. Each side has at most one head and one end, nothing follows its end,
/// and the pieces of the answers are short.
pub(crate) fn picker_messages(bytes: &[u8]) {
    let (mut exchange, mut rest) = (Exchange::default(), Bytes::copy_from_slice(bytes));
    let (mut heads, mut ends) = ([0; 2], [0; 2]);
    while !rest.is_empty() {
        let length = usize::from(rest.split_to(1)[0]);
        let message = rest.split_to(length.min(rest.len()));
        let Ok(message) = ProcessingRequest::decode(message) else { return };
        let encoded = message.encode_to_vec();
        let again = ProcessingRequest::decode(encoded.as_slice()).expect("an encoded message decodes");
        // Numbers in metadata are floats, and NaN differs from itself.
        assert_eq!(again.encode_to_vec(), encoded, "the encoded message differs");
        let _ = message.metadata_context.as_ref().map(|context| context.texts(SUBSET_NAMESPACE, SUBSET));
        let answers = exchange.passed(&message);
        assert!(answers.iter().all(|answer| answer.encoded_len() <= PIECE_BYTES_MAX + 2_048), "a long answer");
        let Ok(events) = exchange.received(message) else { return };
        assert!(events.len() <= 2, "{events:?}");
        for event in events {
            let side = match &event {
                Event::RequestHead(_) | Event::RequestPart(_) | Event::RequestEnd => 0,
                Event::ResponseHead(_) | Event::ResponsePart(_) | Event::ResponseEnd => 1,
            };
            assert_eq!(ends[side], 0, "{event:?} after the end");
            heads[side] += u32::from(matches!(event, Event::RequestHead(_) | Event::ResponseHead(_)));
            ends[side] += u32::from(matches!(event, Event::RequestEnd | Event::ResponseEnd));
            assert_eq!(heads[side], 1, "{event:?} without its head");
        }
    }
    let mut decide =
        || exchange.decided(HeaderMutation::default(), Struct::default(), Bytes::from_static(b"x")).count();
    let first = decide();
    assert!(first <= 3, "{first} answers to one decision");
    assert_eq!(decide(), 0, "a second answer");
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    use super::wire::{FromProxy, HeaderMap, HeaderValue, HttpBody, HttpHeaders, Metadata, Trailers};
    use prost_types::{Value, value::Kind};

    let header = |key: &str, value: &'static str| HeaderValue {
        key: key.to_owned(),
        value: String::new(),
        raw_value: Bytes::from_static(value.as_bytes()),
    };
    let headers = Some(HeaderMap { headers: vec![header(":path", "/v1/completions"), header("x-request-id", "r")] });
    let head = |end_of_stream| HttpHeaders { headers: headers.clone(), end_of_stream };
    let body = |end_of_stream| HttpBody { body: Bytes::from_static(b"{\"prompt\":\"x\"}"), end_of_stream };
    let endpoints = Value { kind: Some(Kind::StringValue("10.0.0.1:80, 10.0.0.2:80".to_owned())) };
    let subset = Struct { fields: [(SUBSET.to_owned(), endpoints)].into() };
    let context = Metadata { filter_metadata: [(SUBSET_NAMESPACE.to_owned(), subset)].into() };
    let stream = |parts: Vec<FromProxy>| {
        let mut bytes = Vec::new();
        for request in parts {
            let message = ProcessingRequest { request: Some(request), metadata_context: Some(context.clone()) };
            let encoded = message.encode_to_vec();
            bytes.push(u8::try_from(encoded.len()).expect("a short message"));
            bytes.extend(encoded);
        }
        bytes
    };
    use FromProxy::{RequestBody, RequestHeaders, RequestTrailers, ResponseBody, ResponseHeaders, ResponseTrailers};
    vec![
        stream(vec![RequestHeaders(head(true)), ResponseHeaders(head(false)), ResponseBody(body(true))]),
        stream(vec![
            RequestHeaders(head(false)),
            RequestBody(body(false)),
            RequestTrailers(Trailers {}),
            ResponseHeaders(head(false)),
            ResponseBody(body(false)),
            ResponseTrailers(Trailers {}),
        ]),
    ]
}
