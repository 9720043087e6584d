//! Parser of vLLM's `/kv_event_sources` (from 0.31 on): the event endpoints of each data-parallel rank, by the global
//! rank number.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::discovery::HttpUrl;
use crate::protocol::{KvEventsConfig, WorkerConfig};

/// Publisher of one rank. Other keys configure its queues.
#[derive(Deserialize)]
struct Publisher {
    publisher: Option<String>,
    endpoint: String,
    replay_endpoint: Option<String>,
    topic: Option<String>,
}

/// The endpoints of each rank that publishes, with the hosts that the engine listens on.
pub(super) fn read(body: &[u8]) -> Result<BTreeMap<u32, KvEventsConfig>, String> {
    let publishers: BTreeMap<u32, Publisher> = serde_json::from_slice(body).map_err(|error| error.to_string())?;
    if publishers.len() > WorkerConfig::RANKS_MAX as usize {
        return Err(format!("it has more than {} ranks", WorkerConfig::RANKS_MAX));
    }
    // Other publishers and other transports, such as ipc, cannot be read.
    let publishers = publishers.into_iter().filter(|(_, rank)| rank.publisher.as_deref().is_none_or(|of| of == "zmq"));
    let reachable = publishers.filter(|(_, rank)| is_socket(&rank.endpoint));
    let endpoints = reachable.map(|(rank, Publisher { endpoint, replay_endpoint, topic, .. })| {
        let replay_endpoint = replay_endpoint.filter(|endpoint| is_socket(endpoint));
        (rank, KvEventsConfig { endpoint, replay_endpoint, topic: topic.unwrap_or_default() })
    });
    Ok(endpoints.collect())
}

/// Whether the text is `tcp://HOST:PORT` with a host or a wildcard.
fn is_socket(endpoint: &str) -> bool {
    let Some(address) = endpoint.strip_prefix("tcp://") else { return false };
    let address = address.strip_prefix('*').map_or_else(|| address.to_owned(), |port| format!("0.0.0.0{port}"));
    let has_port = address.rsplit_once(':').is_some_and(|(_, port)| port.bytes().all(|byte| byte.is_ascii_digit()));
    has_port && HttpUrl::parse(&format!("http://{address}")).is_ok_and(|url| url.path() == "/")
}
