//! Byte-exact bodies of each protocol, properties, and splits of responses into frames.

mod legs;
mod properties;
mod response;
mod usage;

use axum::body::Bytes;

use super::{LegBodies, NotSplit, PrefillResponse, Protocol, Transfer};
use crate::formats::openai::{Edits, Endpoint, RequestBody};

/// Identifiers of the fixtures.
fn transfer() -> Transfer {
    Transfer {
        prefill_host: "10.0.0.1".to_owned(),
        prefill_rank: None,
        prefill_dp_size: 1,
        decode_rank: None,
        bootstrap_port: Some(8998),
        room: 77,
        transfer_id: "xfer-5f0c".to_owned(),
        bootstrap_address: "http://10.0.0.1:8998".to_owned(),
        engine_id: "engine-3".to_owned(),
    }
}

/// Leg bodies of a client's body, after the gateway's edits.
fn parse(endpoint: Endpoint, protocol: Protocol, body: &str) -> Result<LegBodies, NotSplit> {
    let body = RequestBody::parse(endpoint, Bytes::copy_from_slice(body.as_bytes())).unwrap();
    LegBodies::parse(endpoint, protocol, body.body(Edits::default()))
}

fn prefill(endpoint: Endpoint, protocol: Protocol, body: &str) -> String {
    text(&parse(endpoint, protocol, body).unwrap().prefill(&transfer()))
}

fn decode(endpoint: Endpoint, protocol: Protocol, body: &str, prefill: Option<&str>) -> String {
    let response = prefill.map(|body| response(protocol, body));
    text(&parse(endpoint, protocol, body).unwrap().decode(&transfer(), response.as_ref()))
}

fn response(protocol: Protocol, body: &str) -> PrefillResponse {
    PrefillResponse::parse(protocol, Bytes::copy_from_slice(body.as_bytes())).unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}
