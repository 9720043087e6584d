//! SGLang: parser of `/server_info`.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::{Described, Engine, ProbeError};
use crate::discovery::HttpUrl;
use crate::discovery::hosts::reachable_host;
use crate::discovery::url::is_host;
use crate::protocol::{KvEventsConfig, LoadSource, WorkerRole};

/// Keys that only SGLang's response contains.
const ITS_OWN: &[&str] = &["kv_events", "max_total_num_tokens", "page_size"];

/// Configuration of the KV event publisher. Other keys vary between versions.
#[derive(Deserialize)]
struct KvEvents {
    #[serde(default)]
    publisher: Option<String>,
    endpoint_host: String,
    endpoint_port_base: u16,
    #[serde(default)]
    topic: Option<String>,
    #[serde(default)]
    block_size: Option<u32>,
    #[serde(default)]
    dp_size: Option<u32>,
    #[serde(default)]
    replay_endpoint_port_base: Option<u16>,
    #[serde(default)]
    load_endpoint_port_base: Option<u16>,
}

pub(super) fn describe(url: &HttpUrl, server_info: &[u8]) -> Result<Option<Described>, ProbeError> {
    let broken = |reason: String| ProbeError::Broken { path: "/server_info", reason };
    let info: Map<String, Value> = serde_json::from_slice(server_info).map_err(|error| broken(error.to_string()))?;
    if !ITS_OWN.iter().any(|key| info.contains_key(*key)) {
        return Ok(None);
    }
    let number = |key: &str| info.get(key).and_then(Value::as_u64).filter(|number| *number > 0);
    let small = |key: &str| number(key).and_then(|number| u32::try_from(number).ok());
    let kv_events = match info.get("kv_events") {
        None | Some(Value::Null) => None,
        Some(said) => Some(KvEvents::deserialize(said).map_err(|error| broken(format!("kv_events: {error}")))?),
    };
    // Other publishers do not use a socket.
    let kv_events = kv_events.filter(|said| said.publisher.as_deref().is_none_or(|publisher| publisher == "zmq"));
    let host = kv_events.as_ref().map(|said| reachable_host(&said.endpoint_host, url));
    if host.as_deref().is_some_and(|host| !is_host(host)) {
        return Err(broken("kv_events: endpoint_host must be a name or an address".to_owned()));
    }

    let name = ["served_model_name", "model_path"].iter().find_map(|key| info.get(*key)?.as_str());
    let socket = |host: &str, port: u16| format!("tcp://{host}:{port}");
    let load_socket = kv_events.as_ref().and_then(|said| {
        let host = reachable_host(&said.endpoint_host, url);
        said.load_endpoint_port_base.map(|port| LoadSource::Socket(socket(&host, port)))
    });
    let load_page = || {
        let has_metrics = info.get("enable_metrics").and_then(Value::as_bool) == Some(true);
        has_metrics.then(|| LoadSource::Metrics(url.below("/metrics").to_string()))
    };
    let role = match info.get("disaggregation_mode").and_then(Value::as_str) {
        Some("prefill") => Some(WorkerRole::Prefill),
        Some("decode") => Some(WorkerRole::Decode),
        _ => None,
    };
    let is_prefill = role == Some(WorkerRole::Prefill);
    Ok(Some(Described {
        engine: Engine::Sglang,
        models: name.map(str::to_owned).into_iter().collect(),
        lora_adapters: Default::default(),
        // Without events the block size is irrelevant, and pages may have one token.
        block_size: kv_events.as_ref().and_then(|said| said.block_size.or_else(|| small("page_size"))),
        cache_tokens: number("max_total_num_tokens"),
        data_parallel_start_rank: 0,
        data_parallel_size: small("dp_size").or(kv_events.as_ref().and_then(|said| said.dp_size)).unwrap_or(1),
        max_num_batched_tokens: small("chunked_prefill_size"),
        max_model_len: small("context_length"),
        load: load_socket.or_else(load_page),
        transfer_port: is_prefill.then(|| small("disaggregation_bootstrap_port")?.try_into().ok()).flatten(),
        role,
        kv_events: kv_events.map(|said| {
            let host = reachable_host(&said.endpoint_host, url);
            KvEventsConfig {
                endpoint: socket(&host, said.endpoint_port_base),
                replay_endpoint: said.replay_endpoint_port_base.map(|port| socket(&host, port)),
                topic: said.topic.unwrap_or_default(),
            }
        }),
    }))
}
