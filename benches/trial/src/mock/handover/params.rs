//! Parameters that a router copies from the answer of the prefill leg to the decode leg.
//!
//! A seal over all fields detects a router that drops or changes one, also of those that no rule reads. Fields that a
//! router adds are ignored. Numbers are integers or have at most three decimals, so that every JSON parser preserves
//! them.

use std::net::SocketAddr;

use serde_json::{Map, Value, json};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::ledger::Grant;
use super::leg::{DecodeLeg, Source, number, text};

/// Start of the expiry times in seconds since 1970. It is fixed, because a mock engine reads no date.
const EPOCH_SECONDS: f64 = 1_700_000_000.0;

/// Seeds of the seals.
const NIXL_SEED: u64 = 1;
const TENSORRT_SEED: u64 = 2;

/// Sealed fields of the NIXL connector.
const NIXL_FIELDS: [&str; 11] = [
    "do_remote_prefill",
    "do_remote_decode",
    "remote_block_ids",
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "tp_size",
    "remote_num_tokens",
    "remote_blocks_expiry_time",
    "transfer_mode",
];

/// Field with the seal, which no real engine has.
const NIXL_SEAL: &str = "x_opaque";

/// Sealed fields of TensorRT-LLM.
const TENSORRT_FIELDS: [&str; 3] = ["first_gen_tokens", "ctx_request_id", "ctx_dp_rank"];

/// `kv_transfer_params` of the answer to a prefill leg of the NIXL connector. `expiry_ms` counts from the start of the
/// engine.
pub(crate) fn nixl_params(key: &str, engine_id: &str, address: SocketAddr, grant: &Grant, expiry_ms: u64) -> Value {
    #[expect(clippy::cast_precision_loss, reason = "milliseconds of a century fit 53 bits")]
    let expiry = EPOCH_SECONDS + expiry_ms as f64 / 1e3;
    let mut params = json!({
        "do_remote_prefill": true,
        "do_remote_decode": false,
        "remote_block_ids": (1..=grant.blocks).collect::<Vec<u64>>(),
        "remote_engine_id": engine_id,
        "remote_request_id": key,
        "remote_host": address.ip().to_string(),
        "remote_port": address.port(),
        "tp_size": 1,
        "remote_num_tokens": grant.tokens,
        "remote_blocks_expiry_time": (expiry * 1e3).round() / 1e3,
        "transfer_mode": "pull",
    });
    let seal = params.as_object().map(|fields| seal(fields, &NIXL_FIELDS, "", NIXL_SEED));
    params[NIXL_SEAL] = seal.into();
    params
}

/// Reads the parameters of a decode leg of the NIXL connector.
///
/// # Errors
/// A field is missing or changed.
pub(crate) fn nixl_claim(params: &Map<String, Value>) -> Result<DecodeLeg, String> {
    if let Some(missing) = NIXL_FIELDS.iter().chain([&NIXL_SEAL]).find(|name| !params.contains_key(**name)) {
        return Err(format!("{missing} is missing in kv_transfer_params"));
    }
    if params[NIXL_SEAL].as_str() != Some(&seal(params, &NIXL_FIELDS, "", NIXL_SEED)) {
        return Err("kv_transfer_params differ from those of the prefill leg".to_owned());
    }
    let host = text(params, "remote_host")?;
    let host = if host.contains(':') { format!("[{host}]") } else { host };
    let port: u16 = number(&params["remote_port"]).ok_or("remote_port is not a port")?;
    Ok(DecodeLeg {
        key: text(params, "remote_request_id")?,
        source: Source::Claim(format!("{host}:{port}")),
        engine_id: Some(text(params, "remote_engine_id")?),
        tokens: number(&params["remote_num_tokens"]),
        ..DecodeLeg::default()
    })
}

/// `disaggregated_params` of the answer to a context leg.
pub(crate) fn tensorrt_params(key: u64, address: SocketAddr, grant: &Grant) -> Value {
    let mut params = json!({
        "request_type": "context_only",
        "first_gen_tokens": [grant.first_token],
        "first_gen_log_probs": null,
        "ctx_request_id": key,
        "draft_tokens": null,
        "ctx_dp_rank": grant.rank,
        "ctx_info_endpoint": null,
        "schedule_style": "context_first",
    });
    let state = format!("{address}/{}", grant.tokens);
    let seal = params.as_object().map(|fields| seal(fields, &TENSORRT_FIELDS, &state, TENSORRT_SEED));
    params["encoded_opaque_state"] = format!("{state}/{}", seal.unwrap_or_default()).into();
    params
}

/// Reads the parameters of a generation leg.
///
/// # Errors
/// A field is missing or changed.
pub(crate) fn tensorrt_claim(params: &Map<String, Value>) -> Result<DecodeLeg, String> {
    let state = text(params, "encoded_opaque_state")?;
    let mismatch = || "disaggregated_params differ from those of the context leg".to_owned();
    if let Some(missing) = TENSORRT_FIELDS.iter().find(|name| !params.contains_key(**name)) {
        return Err(format!("{missing} is missing in disaggregated_params"));
    }
    let (state, found) = state.rsplit_once('/').ok_or_else(mismatch)?;
    if found != seal(params, &TENSORRT_FIELDS, state, TENSORRT_SEED) {
        return Err(mismatch());
    }
    let (address, tokens) = state.rsplit_once('/').ok_or_else(mismatch)?;
    Ok(DecodeLeg {
        key: number::<u64>(&params["ctx_request_id"]).ok_or_else(mismatch)?.to_string(),
        source: Source::Claim(address.to_owned()),
        prefill_rank: number(&params["ctx_dp_rank"]),
        tokens: tokens.parse().ok(),
        first_token: params["first_gen_tokens"].get(0).and_then(number),
        ..DecodeLeg::default()
    })
}

fn seal(params: &Map<String, Value>, names: &[&str], state: &str, seed: u64) -> String {
    let mut text = state.to_owned();
    for name in names {
        let value = params.get(*name).unwrap_or(&Value::Null);
        text.push_str(&format!("\n{name}={value}"));
    }
    format!("{:016x}", xxh3_64_with_seed(text.as_bytes(), seed))
}
