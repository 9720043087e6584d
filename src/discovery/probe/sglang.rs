//! SGLang: parser of `/server_info`.

use std::collections::BTreeSet;

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::discovery::HttpUrl;
use crate::discovery::hosts::reachable_host;
use crate::discovery::url::is_host;
use crate::protocol::{KvEventsConfig, LoadSource, WorkerRole};

/// Keys that only SGLang's response contains.
const ITS_OWN: &[&str] = &["kv_events", "max_total_num_tokens", "page_size"];

/// Configuration of the KV event publisher. Other keys vary between versions.
#[derive(Deserialize)]
struct KvEvents {
    publisher: Option<String>,
    endpoint_host: String,
    endpoint_port_base: u16,
    topic: Option<String>,
    block_size: Option<u32>,
    dp_size: Option<u32>,
    replay_endpoint_port_base: Option<u16>,
    load_endpoint_port_base: Option<u16>,
}

/// Facts of the page.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ServerInfo {
    pub(super) models: BTreeSet<String>,
    /// Tokens per page. Absent without events, for which it is irrelevant: pages may have one token.
    pub(super) block_size: Option<u32>,
    pub(super) cache_tokens: Option<u64>,
    pub(super) data_parallel_size: u32,
    pub(super) max_num_batched_tokens: Option<u32>,
    pub(super) max_model_len: Option<u32>,
    pub(super) load: Option<LoadSource>,
    pub(super) transfer_port: Option<u16>,
    pub(super) role: Option<WorkerRole>,
    pub(super) session_hints: bool,
    pub(super) priority_hints: bool,
    pub(super) kv_events: Option<KvEventsConfig>,
}

impl ServerInfo {
    /// Parses the page. Other engines have a page of this name, too.
    pub(super) fn read(url: &HttpUrl, body: &[u8]) -> Result<Self, String> {
        let info: Map<String, Value> = serde_json::from_slice(body).map_err(|error| error.to_string())?;
        if !ITS_OWN.iter().any(|key| info.contains_key(*key)) {
            return Err("it is that of another engine than SGLang".to_owned());
        }
        let number = |key: &str| info.get(key).and_then(Value::as_u64).filter(|number| *number > 0);
        let small = |key: &str| number(key).and_then(|number| u32::try_from(number).ok());
        let kv_events = match info.get("kv_events") {
            None | Some(Value::Null) => None,
            Some(said) => Some(KvEvents::deserialize(said).map_err(|error| format!("kv_events: {error}"))?),
        };
        // Other publishers do not use a socket.
        let kv_events = kv_events.filter(|said| said.publisher.as_deref().is_none_or(|publisher| publisher == "zmq"));
        let host = kv_events.as_ref().map(|said| reachable_host(&said.endpoint_host, url)).unwrap_or_default();
        if kv_events.is_some() && !is_host(&host) {
            return Err("kv_events: endpoint_host must be a name or an address".to_owned());
        }
        let socket = |port: u16| format!("tcp://{host}:{port}");
        let load_port = kv_events.as_ref().and_then(|said| said.load_endpoint_port_base);
        let is_set = |key: &str| info.get(key).and_then(Value::as_bool) == Some(true);
        let load_page = || is_set("enable_metrics").then(|| LoadSource::Metrics(url.below("/metrics").to_string()));
        let role = match info.get("disaggregation_mode").and_then(Value::as_str) {
            Some("prefill") => Some(WorkerRole::Prefill),
            Some("decode") => Some(WorkerRole::Decode),
            _ => None,
        };
        let has_priorities = is_set("enable_priority_scheduling") && !is_set("schedule_low_priority_values_first");
        let is_prefill = role == Some(WorkerRole::Prefill);
        let name = ["served_model_name", "model_path"].iter().find_map(|key| info.get(*key)?.as_str());
        Ok(Self {
            models: name.map(str::to_owned).into_iter().collect(),
            block_size: kv_events.as_ref().and_then(|said| said.block_size.or_else(|| small("page_size"))),
            cache_tokens: number("max_total_num_tokens"),
            data_parallel_size: small("dp_size").or(kv_events.as_ref().and_then(|said| said.dp_size)).unwrap_or(1),
            max_num_batched_tokens: small("chunked_prefill_size"),
            max_model_len: small("context_length"),
            load: load_port.map(|port| LoadSource::Socket(socket(port))).or_else(load_page),
            transfer_port: is_prefill.then(|| small("disaggregation_bootstrap_port")?.try_into().ok()).flatten(),
            role,
            session_hints: is_set("enable_session_radix_cache"),
            priority_hints: has_priorities,
            kv_events: kv_events.map(|said| KvEventsConfig {
                endpoint: socket(said.endpoint_port_base),
                replay_endpoint: said.replay_endpoint_port_base.map(socket),
                topic: said.topic.unwrap_or_default(),
            }),
        })
    }
}
