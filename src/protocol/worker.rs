//! What a worker says of itself when it joins.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::{WorkerId, WorkerRank};

/// The desired set of workers, as a discovery source states it: the whole truth, not a change.
pub type WorkerMap = BTreeMap<WorkerId, WorkerConfig>;

/// How strictly a decode request must stay in its prefill's KV-transfer domain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KvTransferEnforcement {
    /// Ranks outside the domain are not considered.
    Required,
    /// Ranks inside the domain are preferred.
    #[default]
    Preferred,
}

/// Where an engine publishes its KV events.
///
/// vLLM and SGLang publish each data-parallel rank on a port of its own: rank `r` at the port given plus `r`, and
/// answers to replay requests likewise.
///
/// ```
/// use pointsman::protocol::KvEventsConfig;
///
/// let config: KvEventsConfig = serde_json::from_str(r#"{ "endpoint": "tcp://10.0.0.7:5557" }"#)?;
/// assert_eq!(config.of_rank(2)?.endpoint, "tcp://10.0.0.7:5559");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KvEventsConfig {
    /// `tcp://HOST:PORT` of rank 0's publisher.
    pub endpoint: String,
    /// `tcp://HOST:PORT` of rank 0's replay socket. Without it nothing that was lost can be asked for again.
    #[serde(default)]
    pub replay_endpoint: Option<String>,
    /// Prefix of the topics to subscribe to. Default empty: everything.
    #[serde(default)]
    pub topic: String,
}

impl KvEventsConfig {
    /// The endpoints of one rank.
    ///
    /// # Errors
    /// An endpoint that is not of the form `tcp://HOST:PORT`, or whose port plus `rank` is none.
    pub fn of_rank(&self, rank: u32) -> Result<Self, WorkerConfigError> {
        let replay_endpoint = self.replay_endpoint.as_deref().map(|endpoint| endpoint_of_rank(endpoint, rank));
        Ok(Self {
            endpoint: endpoint_of_rank(&self.endpoint, rank)?,
            replay_endpoint: replay_endpoint.transpose()?,
            topic: self.topic.clone(),
        })
    }
}

impl LoadSource {
    /// The load socket of one rank; `None` where load is asked for over HTTP.
    ///
    /// # Errors
    /// As [`KvEventsConfig::of_rank`].
    pub fn socket_of_rank(&self, rank: u32) -> Result<Option<String>, WorkerConfigError> {
        match self {
            Self::Socket(endpoint) => endpoint_of_rank(endpoint, rank).map(Some),
            Self::Metrics(_) => Ok(None),
        }
    }
}

fn endpoint_of_rank(endpoint: &str, rank: u32) -> Result<String, WorkerConfigError> {
    let refused = || WorkerConfigError::Endpoint { endpoint: endpoint.to_owned(), rank };
    let (host, port) = endpoint.strip_prefix("tcp://").and_then(|rest| rest.rsplit_once(':')).ok_or_else(refused)?;
    let base: u16 = port.parse().map_err(|_| refused())?;
    let port = u16::try_from(rank).ok().and_then(|rank| base.checked_add(rank)).filter(|port| *port > 0);
    match port {
        Some(port) if !host.is_empty() => Ok(format!("tcp://{host}:{port}")),
        Some(_) | None => Err(refused()),
    }
}

/// Where an engine says how busy it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LoadSource {
    /// Its Prometheus page: `http://HOST:PORT/metrics`, of all ranks together.
    Metrics(String),
    /// SGLang's load socket: `tcp://HOST:PORT` of rank 0, rank `r` at the port plus `r`.
    Socket(String),
}

/// One worker's configuration.
///
/// ```
/// use pointsman::protocol::{WorkerConfig, WorkerId};
///
/// let config = WorkerConfig { data_parallel_size: 2, ..WorkerConfig::at("http://10.0.0.7:8000") };
/// config.validate()?;
/// assert_eq!(config.ranks(WorkerId(1)).count(), 2);
/// # Ok::<(), pointsman::protocol::WorkerConfigError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkerConfig {
    /// Where to send requests: opaque to the router, handed back with every placement.
    pub endpoint: String,
    /// First data-parallel rank. Default 0.
    #[serde(default)]
    pub data_parallel_start_rank: u32,
    /// Number of data-parallel ranks, 1 to [`WorkerConfig::RANKS_MAX`]. Default 1.
    #[serde(default = "one")]
    pub data_parallel_size: u32,
    /// Tokens one engine step may hold (`max_num_batched_tokens`), where known. At least 1.
    #[serde(default)]
    pub max_num_batched_tokens: Option<u32>,
    /// KV blocks of one rank, where known. At least 1.
    #[serde(default)]
    pub total_kv_blocks: Option<u32>,
    /// Longest sequence that its model takes, prompt and output together, in tokens (`max_model_len`), where known. At
    /// least 1. A prompt that is longer than that of every worker is refused.
    #[serde(default)]
    pub max_model_len: Option<u32>,
    /// Labels that requests may require or prefer.
    #[serde(default)]
    pub taints: BTreeSet<String>,
    /// LoRA adapters that the worker has loaded. Requests for one go to workers that have it, overloaded or not, while
    /// there are any; else to anybody.
    #[serde(default)]
    pub lora_adapters: BTreeSet<String>,
    /// A name that survives restarts of the worker, for placement that must be stable across them.
    #[serde(default)]
    pub stable_routing_id: Option<String>,
    /// Topology: domain kind (`zone`, `rack`, ...) to the value that holds for this worker.
    #[serde(default)]
    pub topology_domains: BTreeMap<String, String>,
    /// Which kind of topology domain KV transfers should stay inside.
    #[serde(default)]
    pub kv_transfer_domain: Option<String>,
    /// How strictly.
    #[serde(default)]
    pub kv_transfer_enforcement: KvTransferEnforcement,
    /// Weight of the preference when it is only preferred; finite.
    #[serde(default)]
    pub kv_transfer_preferred_weight: Option<f64>,
    /// Whether the worker hashes EAGLE windows; must agree with the pool's setting when given.
    #[serde(default)]
    pub is_eagle: Option<bool>,
    /// Where it publishes its KV events. Default none: the embedder brings them, or nobody does.
    #[serde(default)]
    pub kv_events: Option<KvEventsConfig>,
    /// Where it says how busy it is. Default none: only what was booked counts.
    #[serde(default)]
    pub load: Option<LoadSource>,
    /// Path below `endpoint` that answers 200 while the engine is well. Default `/health`.
    #[serde(default = "health_path")]
    pub health_path: String,
}

fn one() -> u32 {
    1
}

fn health_path() -> String {
    "/health".to_owned()
}

/// Why a worker's configuration was refused.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum WorkerConfigError {
    /// No ranks, or more than the router will index.
    #[error("data_parallel_size is {0}, must be 1 to {max}", max = WorkerConfig::RANKS_MAX)]
    DataParallelSize(u32),
    /// The last rank would not fit.
    #[error("data_parallel_start_rank {start} plus data_parallel_size {size} exceeds {max}", max = u32::MAX)]
    RankOverflow {
        /// First rank.
        start: u32,
        /// Number of ranks.
        size: u32,
    },
    /// A capacity of zero.
    #[error("{field} is 0, must be at least 1")]
    Zero {
        /// The field's name.
        field: &'static str,
    },
    /// A socket that cannot be found.
    #[error("endpoint {endpoint:?} of rank {rank} must be tcp://HOST:PORT with PORT + {rank} from 1 to 65535")]
    Endpoint {
        /// The base endpoint.
        endpoint: String,
        /// The rank whose port it gives.
        rank: u32,
    },
    /// Nobody here reads events.
    #[error("kv_events is given, but this build lacks the feature `zmq` that reads them")]
    NoReader,
    /// A path that is none.
    #[error("health_path is {0:?}, must begin with /")]
    HealthPath(String),
    /// A weight that is no number.
    #[error("kv_transfer_preferred_weight is {0}, must be finite")]
    Weight(f64),
    /// The worker and the pool disagree about EAGLE hashing, so nothing would ever match.
    #[error("is_eagle is {worker}, but the pool hashes with is_eagle = {pool}")]
    Eagle {
        /// What the worker says.
        worker: bool,
        /// What the pool does.
        pool: bool,
    },
}

impl WorkerConfig {
    /// Most data-parallel ranks of one worker.
    pub const RANKS_MAX: u32 = 4096;

    /// A single-rank worker at `endpoint`, all else default.
    #[must_use]
    pub fn at(endpoint: impl Into<String>) -> Self {
        Self {
            endpoint: endpoint.into(),
            data_parallel_start_rank: 0,
            data_parallel_size: 1,
            max_num_batched_tokens: None,
            total_kv_blocks: None,
            max_model_len: None,
            taints: BTreeSet::new(),
            lora_adapters: BTreeSet::new(),
            stable_routing_id: None,
            topology_domains: BTreeMap::new(),
            kv_transfer_domain: None,
            kv_transfer_enforcement: KvTransferEnforcement::default(),
            kv_transfer_preferred_weight: None,
            is_eagle: None,
            kv_events: None,
            load: None,
            health_path: health_path(),
        }
    }

    /// The worker's ranks, lowest first. Call on a validated configuration.
    pub fn ranks(&self, worker: WorkerId) -> impl Iterator<Item = WorkerRank> + use<> {
        let start = self.data_parallel_start_rank;
        (start..start.saturating_add(self.data_parallel_size)).map(move |rank| WorkerRank::new(worker, rank))
    }

    /// Checks every rule.
    ///
    /// # Errors
    /// The first rule broken, with the value that broke it.
    pub fn validate(&self) -> Result<(), WorkerConfigError> {
        let (start, size) = (self.data_parallel_start_rank, self.data_parallel_size);
        if size == 0 || size > Self::RANKS_MAX {
            return Err(WorkerConfigError::DataParallelSize(size));
        }
        if start.checked_add(size).is_none() {
            return Err(WorkerConfigError::RankOverflow { start, size });
        }
        for (field, value) in [
            ("max_num_batched_tokens", self.max_num_batched_tokens),
            ("total_kv_blocks", self.total_kv_blocks),
            ("max_model_len", self.max_model_len),
        ] {
            if value == Some(0) {
                return Err(WorkerConfigError::Zero { field });
            }
        }
        if !self.health_path.starts_with('/') {
            return Err(WorkerConfigError::HealthPath(self.health_path.clone()));
        }
        // If the first rank and the last have a port, so have those between.
        for rank in [start, start + size - 1] {
            if let Some(kv_events) = &self.kv_events {
                kv_events.of_rank(rank)?;
            }
            if let Some(load) = &self.load {
                load.socket_of_rank(rank)?;
            }
        }
        match self.kv_transfer_preferred_weight {
            Some(weight) if !weight.is_finite() => Err(WorkerConfigError::Weight(weight)),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broken_rules_name_the_value() {
        let with = |change: fn(&mut WorkerConfig)| {
            let mut config = WorkerConfig::at("x");
            change(&mut config);
            config.validate().expect_err("must be refused").to_string()
        };
        assert_eq!(with(|c| c.data_parallel_size = 0), "data_parallel_size is 0, must be 1 to 4096");
        assert_eq!(with(|c| c.total_kv_blocks = Some(0)), "total_kv_blocks is 0, must be at least 1");
        assert!(with(|c| c.data_parallel_start_rank = u32::MAX).contains("exceeds 4294967295"));
        assert!(with(|c| c.kv_transfer_preferred_weight = Some(f64::NAN)).contains("NaN"));
        assert_eq!(with(|c| c.health_path = "ok".to_owned()), "health_path is \"ok\", must begin with /");
    }

    #[test]
    fn endpoints_of_ranks_are_ports_in_a_row() {
        let publishing = |endpoint: &str, ranks| {
            let kv_events =
                KvEventsConfig { endpoint: endpoint.to_owned(), replay_endpoint: None, topic: String::new() };
            WorkerConfig { data_parallel_size: ranks, kv_events: Some(kv_events), ..WorkerConfig::at("x") }.validate()
        };
        assert_eq!(publishing("tcp://[::1]:5557", 8), Ok(()));
        for (endpoint, ranks) in
            [("tcp://h:65535", 2), ("tcp://h:0", 2), ("h:1", 1), ("tcp://:1", 1), ("tcp://h:0", 1), ("tcp://h:x", 1)]
        {
            let error = publishing(endpoint, ranks).expect_err("must be refused").to_string();
            assert!(error.contains(endpoint) && error.contains("tcp://HOST:PORT"), "{error}");
        }
    }

    #[test]
    fn unknown_keys_are_refused_by_name() {
        let error = serde_json::from_str::<WorkerConfig>(r#"{"endpoint":"x","endpiont":"y"}"#).expect_err("refused");
        assert!(error.to_string().contains("endpiont"));
    }
}
