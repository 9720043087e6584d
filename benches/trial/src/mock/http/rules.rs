//! Rules of the legs, per protocol.
//!
//! Classifies a request as prefill leg, decode leg or plain request by its fields and the role of the engine. A
//! violation is rejected with a message that names the field. Pure: the caller sends, waits and counts.

use std::net::SocketAddr;

use serde_json::{Map, Value};

use super::answer::Api;
use super::completions::{Incoming, has_rank_header, request_id};
use crate::mock::engine::BOOTSTRAP_PORT;
use crate::mock::handover::{
    DecodeLeg, EngineFacts, EngineRole, HandoverProtocol, Leg, PrefillLeg, Source, nixl_claim, number, tensorrt_claim,
    text,
};

/// Classifies a request.
///
/// # Errors
/// The violated rule.
pub(super) fn classify(engine: &EngineFacts, request: &Incoming) -> Result<Leg, String> {
    let leg = match engine.protocol {
        HandoverProtocol::VllmNixl => nixl(request)?,
        HandoverProtocol::VllmMooncake => mooncake(engine, request)?,
        HandoverProtocol::VllmP2pNccl => p2p(engine, request)?,
        HandoverProtocol::Sglang => sglang(engine, request)?,
        HandoverProtocol::TensorrtLlm => tensorrt(request)?,
    };
    match leg {
        Leg::Prefill(_) if !engine.role.has_prefill() => Err("a decode engine serves no prefill leg".to_owned()),
        Leg::Decode(_) if !engine.role.has_decode() => Err("a prefill engine serves no decode leg".to_owned()),
        leg @ (Leg::Plain | Leg::Prefill(_) | Leg::Decode(_)) => Ok(leg),
    }
}

fn nixl(request: &Incoming) -> Result<Leg, String> {
    let Some((direction, params)) = direction(request)? else { return Ok(Leg::Plain) };
    match direction {
        Direction::Prefill => {
            check_one_token(request)?;
            Ok(Leg::Prefill(PrefillLeg::default()))
        }
        Direction::Decode => nixl_claim(params).map(Leg::Decode),
    }
}

fn mooncake(engine: &EngineFacts, request: &Incoming) -> Result<Leg, String> {
    let Some((direction, params)) = direction(request)? else { return Ok(Leg::Plain) };
    let key = text(params, "transfer_id")?;
    match direction {
        Direction::Prefill => {
            check_one_token(request)?;
            if engine.ranks > 1 && !has_rank_header(&request.headers) {
                return Err("X-data-parallel-rank is required: the engine has several ranks".to_owned());
            }
            Ok(Leg::Prefill(PrefillLeg { key: Some(key), ..PrefillLeg::default() }))
        }
        Direction::Decode => {
            let address = text(params, "remote_bootstrap_addr")?;
            let Some(address) = address.strip_prefix("http://").filter(|address| !address.is_empty()) else {
                return Err(format!("remote_bootstrap_addr {address:?} is not http://host:port"));
            };
            let engine_id = Some(text(params, "remote_engine_id")?);
            let source = Source::Claim(address.trim_end_matches('/').to_owned());
            Ok(Leg::Decode(DecodeLeg { key, source, engine_id, ..DecodeLeg::default() }))
        }
    }
}

fn p2p(engine: &EngineFacts, request: &Incoming) -> Result<Leg, String> {
    let Some((request_id, prefill, decode)) = request_id(request).and_then(p2p_addresses) else {
        return Ok(Leg::Plain);
    };
    let key = request_id.to_owned();
    if request.common.handover("kv_transfer_params").is_some() {
        return Err("kv_transfer_params is not supported by this connector".to_owned());
    }
    let (is_prefill, is_decode) = (is_own(engine, prefill), is_own(engine, decode));
    match (is_prefill, is_decode) {
        (true, false) => {
            check_one_token(request)?;
            Ok(Leg::Prefill(PrefillLeg { key: Some(key), push_to: Some(decode.to_owned()), rank: None }))
        }
        (false, true) => Ok(Leg::Decode(DecodeLeg { key, ..DecodeLeg::default() })),
        (true, true) => Err(format!("X-Request-Id {request_id:?} names one engine for both legs")),
        (false, false) => Err(format!("X-Request-Id {request_id:?} does not name this engine, {}", engine.address)),
    }
}

/// Parses `___prefill_addr_{host:port}___decode_addr_{host:port}_{uuid}`.
fn p2p_addresses(id: &str) -> Option<(&str, &str, &str)> {
    let rest = id.strip_prefix("___prefill_addr_")?;
    let (prefill, rest) = rest.split_once("___decode_addr_")?;
    let (decode, unique) = rest.rsplit_once('_')?;
    (!unique.is_empty()).then_some((id, prefill, decode))
}

fn is_own(engine: &EngineFacts, address: &str) -> bool {
    let own = engine.address;
    match address.parse::<SocketAddr>() {
        Ok(address) => address.port() == own.port() && (own.ip().is_unspecified() || address.ip() == own.ip()),
        Err(_) => address.strip_prefix("localhost:").is_some_and(|port| port == own.port().to_string()),
    }
}

fn sglang(engine: &EngineFacts, request: &Incoming) -> Result<Leg, String> {
    let field = |name: &str| request.common.handover(name);
    let Some(room) = field("bootstrap_room") else {
        return Err("disaggregated request received without bootstrap room id".to_owned());
    };
    let host = field("bootstrap_host").ok_or("bootstrap_host is missing")?;
    let host = single(host, "bootstrap_host", room)?;
    let port = field("bootstrap_port").map_or(Ok(&Value::Null), |port| single(port, "bootstrap_port", room))?;
    let room = single(room, "bootstrap_room", room)?;
    let room = room
        .as_u64()
        .filter(|room| i64::try_from(*room).is_ok())
        .ok_or_else(|| format!("bootstrap_room {room} is not an integer of 63 bits"))?;
    let host = host.as_str().filter(|host| !host.is_empty()).ok_or_else(|| format!("bootstrap_host is {host}"))?;
    let port = match port {
        Value::Null => BOOTSTRAP_PORT,
        port => number(port).ok_or_else(|| format!("bootstrap_port {port} is not a port"))?,
    };
    let key = room.to_string();
    match engine.role {
        EngineRole::Prefill => {
            let by_room = u16::try_from(room % u64::from(engine.ranks)).unwrap_or_default();
            Ok(Leg::Prefill(PrefillLeg { key: Some(key), push_to: None, rank: Some(by_room) }))
        }
        EngineRole::Decode | EngineRole::Both => {
            let prefill_rank = match field("disagg_prefill_dp_rank") {
                Some(rank) => Some(number(rank).ok_or_else(|| format!("disagg_prefill_dp_rank {rank} is not a rank"))?),
                None => None,
            };
            let host = if host.contains(':') && !host.starts_with('[') { format!("[{host}]") } else { host.to_owned() };
            let source = Source::Claim(format!("{host}:{port}"));
            Ok(Leg::Decode(DecodeLeg { key, source, prefill_rank, ..DecodeLeg::default() }))
        }
    }
}

/// The value of a field for the one prompt of the request. Arrays have one element per prompt, and if the room is an
/// array, so is the field.
fn single<'a>(value: &'a Value, name: &str, room: &Value) -> Result<&'a Value, String> {
    match value {
        Value::Array(values) if !room.is_array() => {
            Err(format!("{name} has {} elements, but bootstrap_room is no array", values.len()))
        }
        Value::Array(values) if values.len() == 1 => Ok(&values[0]),
        Value::Array(values) => Err(format!("{name} has {} elements: only one prompt is supported", values.len())),
        Value::Null => Ok(value),
        value if room.is_array() => Err(format!("{name} is {value}, but bootstrap_room is an array")),
        value => Ok(value),
    }
}

fn tensorrt(request: &Incoming) -> Result<Leg, String> {
    let Some(params) = request.common.handover("disaggregated_params") else { return Ok(Leg::Plain) };
    let params = params.as_object().ok_or("disaggregated_params is not an object")?;
    match params.get("request_type").and_then(Value::as_str) {
        Some("context_only") => {
            if request.common.is_stream() {
                return Err("stream is true: a context leg is not streamed".to_owned());
            }
            Ok(Leg::Prefill(PrefillLeg::default()))
        }
        Some("generation_only") => {
            let mut leg = tensorrt_claim(params)?;
            if request.api == Api::Chat {
                let ids = request.common.handover("prompt_token_ids").ok_or("prompt_token_ids is missing")?;
                leg.prompt =
                    Some(serde_json::from_value(ids.clone()).map_err(|_| "prompt_token_ids are not token ids")?);
            } else if !request.has_token_prompt {
                return Err("prompt is text: a generation leg has the token ids of its context leg".to_owned());
            }
            Ok(Leg::Decode(leg))
        }
        Some("context_and_generation") => Ok(Leg::Plain),
        Some(other) => Err(format!("request_type {other:?} is unknown")),
        None => Err("request_type is missing".to_owned()),
    }
}

/// vLLM's transfer parameters with their direction.
type Directed<'a> = (Direction, &'a Map<String, Value>);

enum Direction {
    Prefill,
    Decode,
}

/// Direction of vLLM's transfer parameters; none for a plain request.
fn direction<'a>(request: &'a Incoming) -> Result<Option<Directed<'a>>, String> {
    let Some(params) = request.common.handover("kv_transfer_params") else { return Ok(None) };
    let params = params.as_object().ok_or("kv_transfer_params is not an object")?;
    let flag = |name: &str| match params.get(name) {
        None | Some(Value::Null) => Ok(false),
        Some(Value::Bool(flag)) => Ok(*flag),
        Some(other) => Err(format!("{name} is {other}, not a boolean")),
    };
    match (flag("do_remote_decode")?, flag("do_remote_prefill")?) {
        (true, true) => Err("do_remote_decode and do_remote_prefill are both true".to_owned()),
        (true, false) => Ok(Some((Direction::Prefill, params))),
        (false, true) => Ok(Some((Direction::Decode, params))),
        (false, false) => Ok(None),
    }
}

/// Checks that a prefill leg generates exactly one token and is not streamed.
fn check_one_token(request: &Incoming) -> Result<(), String> {
    if request.common.is_stream() {
        return Err("stream is true: a prefill leg is not streamed".to_owned());
    }
    if request.common.stream_options.is_some() {
        return Err("stream_options are only allowed with stream".to_owned());
    }
    let limits =
        [("max_tokens", request.common.max_tokens), ("max_completion_tokens", request.common.max_completion_tokens)];
    if request.api == Api::Chat && limits.iter().all(|(_, limit)| limit.is_some()) {
        return Err("max_tokens and max_completion_tokens are both present".to_owned());
    }
    if limits.iter().all(|(_, limit)| limit.is_none()) {
        return Err("max_tokens is missing: a prefill leg generates one token".to_owned());
    }
    if let Some((name, limit)) = limits.iter().find_map(|(name, limit)| limit.filter(|n| *n != 1).map(|n| (name, n))) {
        return Err(format!("{name} is {limit}: a prefill leg generates one token"));
    }
    match request.common.min_tokens {
        Some(least @ 2..) => Err(format!("min_tokens is {least}: a prefill leg generates one token")),
        Some(0 | 1) | None => Ok(()),
    }
}
