//! Configuration of a worker.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use serde::de::value::{Error as ValueError, MapDeserializer};
use serde::{Deserialize, Serialize};

use super::{WorkerId, WorkerRank};

/// The desired set of workers from a discovery source: complete, not incremental.
pub type WorkerMap = BTreeMap<WorkerId, WorkerConfig>;

/// Strictness of keeping a decode request in the KV-transfer domain of its prefill.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KvTransferEnforcement {
    /// Ranks outside the domain are excluded.
    Required,
    /// Ranks inside the domain are preferred.
    #[default]
    Preferred,
}

/// Role of a worker in disaggregated serving.
///
/// A source may name the workers of several pools. Each pool uses those of its own role, and those without a role.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkerRole {
    /// Computes prompts for decode workers.
    Prefill,
    /// Generates from prompts that prefill workers have computed.
    Decode,
    /// Either, and whole requests.
    Both,
}

/// Endpoints at which an engine publishes its KV events.
///
/// vLLM and SGLang publish each data-parallel rank on a separate port: rank `r` at the configured port plus `r`, for
/// replays as well. Ports that are assigned by the operating system are not consecutive:
/// [`WorkerConfig::kv_events_by_rank`].
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
    /// `tcp://HOST:PORT` of rank 0's replay socket. Without it, lost messages cannot be recovered.
    pub replay_endpoint: Option<String>,
    /// Topic prefix of the subscription. Default: empty, all topics.
    #[serde(default)]
    pub topic: String,
}

impl KvEventsConfig {
    /// The endpoints of one rank.
    ///
    /// # Errors
    /// An endpoint that is not of the form `tcp://HOST:PORT`, or whose port plus `rank` is invalid.
    pub fn of_rank(&self, rank: u32) -> Result<Self, WorkerConfigError> {
        let replay_endpoint = self.replay_endpoint.as_deref().map(|endpoint| endpoint_of_rank(endpoint, rank));
        Ok(Self {
            endpoint: endpoint_of_rank(&self.endpoint, rank)?,
            replay_endpoint: replay_endpoint.transpose()?,
            topic: self.topic.clone(),
        })
    }
}

impl KvEventsConfig {
    /// The endpoints of rank 0, if these are the endpoints of rank `first`. The inverse of [`Self::of_rank`].
    ///
    /// # Errors
    /// An endpoint that is not of the form `tcp://HOST:PORT`, or whose port minus `first` is invalid.
    pub fn from_rank(&self, first: u32) -> Result<Self, WorkerConfigError> {
        let moved = |endpoint: &str| {
            let refused = || WorkerConfigError::FirstEndpoint { endpoint: endpoint.to_owned(), first };
            moved_endpoint(endpoint, -i64::from(first), refused)
        };
        let replay_endpoint = self.replay_endpoint.as_deref().map(moved);
        let endpoint = moved(&self.endpoint)?;
        Ok(Self { endpoint, replay_endpoint: replay_endpoint.transpose()?, topic: self.topic.clone() })
    }
}

impl LoadSource {
    /// The load socket of one rank; `None` if load is polled over HTTP.
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
    moved_endpoint(endpoint, i64::from(rank), refused)
}

fn moved_endpoint(
    endpoint: &str,
    ports: i64,
    refused: impl Fn() -> WorkerConfigError,
) -> Result<String, WorkerConfigError> {
    let (host, port) = endpoint.strip_prefix("tcp://").and_then(|rest| rest.rsplit_once(':')).ok_or_else(&refused)?;
    let base: u16 = port.parse().map_err(|_| refused())?;
    let port = u16::try_from(i64::from(base) + ports).ok().filter(|port| *port > 0);
    match port {
        Some(port) if !host.is_empty() => Ok(format!("tcp://{host}:{port}")),
        Some(_) | None => Err(refused()),
    }
}

/// Type of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Engine {
    /// vLLM.
    Vllm,
    /// SGLang.
    Sglang,
    /// Any other engine with an OpenAI-compatible API.
    Other,
}

/// Source of an engine's load reports.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LoadSource {
    /// The Prometheus page of all ranks: `http://HOST:PORT/metrics`.
    Metrics(String),
    /// SGLang's load socket: `tcp://HOST:PORT` of rank 0; rank `r` uses the port plus `r`.
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
/// # Ok::<(), pointsman::internals::protocol::WorkerConfigError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkerConfig {
    /// Address for requests: opaque to the router, returned with every placement.
    pub endpoint: String,
    /// First data-parallel rank. Default 0.
    #[serde(default)]
    pub data_parallel_start_rank: u32,
    /// Number of data-parallel ranks, 1 to [`WorkerConfig::RANKS_MAX`]. Default 1.
    #[serde(default = "one")]
    pub data_parallel_size: u32,
    /// Tokens per engine step (`max_num_batched_tokens`), if known. At least 1.
    pub max_num_batched_tokens: Option<u32>,
    /// KV blocks of one rank, if known. At least 1.
    pub total_kv_blocks: Option<u32>,
    /// Tokens per KV block, if the engine reports it. A pool without
    /// [`RouterConfig::block_size`](crate::RouterConfig::block_size) takes that of its first worker until KV events show
    /// another. At least 1.
    pub block_size: Option<u32>,
    /// Longest sequence of the model, prompt and output together, in tokens (`max_model_len`), if known. At least 1. A
    /// prompt longer than that of every worker is rejected.
    pub max_model_len: Option<u32>,
    /// Role in disaggregated serving. Pools of another role ignore the worker. Default: that of the pool.
    pub role: Option<WorkerRole>,
    /// Labels that requests may require or prefer.
    #[serde(default)]
    pub taints: BTreeSet<String>,
    /// LoRA adapters loaded by the worker. Requests for an adapter are sent to workers that have it, overloaded or not;
    /// without such a worker, to any worker.
    #[serde(default)]
    pub lora_adapters: BTreeSet<String>,
    /// A name that survives restarts of the worker, for placement that must be stable across them.
    pub stable_routing_id: Option<String>,
    /// Topology: the worker's value of each domain kind (`zone`, `rack`, ...).
    #[serde(default)]
    pub topology_domains: BTreeMap<String, String>,
    /// Kind of the topology domain that KV transfers should stay inside.
    pub kv_transfer_domain: Option<String>,
    /// Strictness of this.
    #[serde(default)]
    pub kv_transfer_enforcement: KvTransferEnforcement,
    /// Weight of the preference in preferred mode; finite.
    pub kv_transfer_preferred_weight: Option<f64>,
    /// Port at which KV transfers start: the bootstrap server of SGLang and Mooncake, or the KV port of rank 0 of P2P
    /// NCCL. Default: that of the pool.
    pub transfer_port: Option<u16>,
    /// Type of the engine, which determines the prompt of some requests. Default: as probed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<Engine>,
    /// Whether requests name their sessions to the engine, which evicts their blocks after others until they are closed:
    /// SGLang with `--enable-session-radix-cache`. A probe of another engine resets it. Default false.
    #[serde(default, skip_serializing_if = "core::ops::Not::not")]
    pub session_hints: bool,
    /// Whether requests have their strict priorities at the engine: SGLang with `--enable-priority-scheduling`, higher values
    /// first. A probe of another engine resets it. Default false.
    #[serde(default, skip_serializing_if = "core::ops::Not::not")]
    pub priority_hints: bool,
    /// Whether the worker hashes EAGLE windows; must match the pool's setting if given.
    pub is_eagle: Option<bool>,
    /// KV event endpoints on consecutive ports. Default: none; the embedder may provide events.
    pub kv_events: Option<KvEventsConfig>,
    /// KV event endpoints of single ranks, by rank number, where ports are not consecutive. They have precedence over
    /// `kv_events`. Entries of other ranks have no effect.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub kv_events_by_rank: BTreeMap<u32, KvEventsConfig>,
    /// Source of load reports. Default: none; only bookings count.
    pub load: Option<LoadSource>,
    /// Path below `endpoint` that returns 200 while the engine is healthy. Default: `/health`.
    #[serde(default = "health_path")]
    pub health_path: String,
    /// File with the API key of the engine, for all requests of the router to it (`Authorization: Bearer`). The key itself
    /// is never part of a configuration. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_key_file: Option<PathBuf>,
    /// Facts that the probed engine does not report, each with the reason. Probes set this field.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub unreported: BTreeMap<String, String>,
    /// Whether a discovery source drains the worker: it gets no new requests and is removed after its last booking or
    /// after `discovery.drain_timeout_ms`. Without workers that run, it is not added. Default false. Only for workers of
    /// discovery sources.
    #[serde(default, skip_serializing_if = "core::ops::Not::not")]
    pub drain: bool,
}

fn one() -> u32 {
    1
}

fn health_path() -> String {
    "/health".to_owned()
}

/// Reason for rejecting a worker's configuration.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum WorkerConfigError {
    /// No ranks, or more than the supported maximum.
    #[error("data_parallel_size is {0}, must be 1 to {max}", max = WorkerConfig::RANKS_MAX)]
    DataParallelSize(u32),
    /// The last rank number overflows.
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
    /// An invalid socket address.
    #[error("endpoint {endpoint:?} of rank {rank} must be tcp://HOST:PORT with PORT + {rank} from 1 to 65535")]
    Endpoint {
        /// The base endpoint.
        endpoint: String,
        /// The rank of the address.
        rank: u32,
    },
    /// An invalid socket address of the first rank of an engine.
    #[error(
        "endpoint {endpoint:?} of the first rank {first} must be tcp://HOST:PORT with PORT - {first} from 1 to 65535"
    )]
    FirstEndpoint {
        /// The endpoint.
        endpoint: String,
        /// Number of the first rank.
        first: u32,
    },
    /// The build has no KV event reader.
    #[error("kv_events is given, but this build lacks the feature `zmq` that reads them")]
    NoReader,
    /// An invalid path.
    #[error("health_path is {0:?}, must begin with /")]
    HealthPath(String),
    /// A drain outside of discovery sources.
    #[error("drain is true, must be false for a worker that no discovery source names")]
    Drain,
    /// A weight that is not finite.
    #[error("kv_transfer_preferred_weight is {0}, must be finite")]
    Weight(f64),
    /// Worker and pool differ in EAGLE hashing, so no block would match.
    #[error("is_eagle is {worker}, but the pool hashes with is_eagle = {pool}")]
    Eagle {
        /// The worker's setting.
        worker: bool,
        /// The pool's setting.
        pool: bool,
    },
}

impl WorkerConfig {
    /// Maximum number of data-parallel ranks of one worker.
    pub const RANKS_MAX: u32 = 4096;

    /// A single-rank worker at `endpoint`, with defaults otherwise.
    #[must_use]
    pub fn at(endpoint: impl Into<String>) -> Self {
        let only = MapDeserializer::new(std::iter::once(("endpoint", endpoint.into())));
        let config: Result<_, ValueError> = Self::deserialize(only);
        config.expect("all other fields have defaults")
    }

    /// The worker's ranks, lowest first. Call on a validated configuration.
    pub fn ranks(&self, worker: WorkerId) -> impl Iterator<Item = WorkerRank> + use<> {
        let start = self.data_parallel_start_rank;
        (start..start.saturating_add(self.data_parallel_size)).map(move |rank| WorkerRank::new(worker, rank))
    }

    /// The KV event endpoints of one rank; `None` if its events are not read.
    ///
    /// ```
    /// use pointsman::protocol::{KvEventsConfig, WorkerConfig};
    ///
    /// let endpoints: KvEventsConfig = serde_json::from_str(r#"{ "endpoint": "tcp://10.0.0.7:40123" }"#)?;
    /// let kv_events_by_rank = [(1, endpoints.clone())].into();
    /// let config = WorkerConfig { data_parallel_size: 2, kv_events_by_rank, ..WorkerConfig::at("http://10.0.0.7:8000") };
    /// assert_eq!(config.kv_events_of(1)?, Some(endpoints));
    /// assert_eq!(config.kv_events_of(0)?, None);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`KvEventsConfig::of_rank`].
    pub fn kv_events_of(&self, rank: u32) -> Result<Option<KvEventsConfig>, WorkerConfigError> {
        match self.kv_events_by_rank.get(&rank) {
            Some(of_rank) => Ok(Some(of_rank.clone())),
            None => self.kv_events.as_ref().map(|events| events.of_rank(rank)).transpose(),
        }
    }

    /// Whether the events of any rank are read.
    #[must_use]
    pub fn has_kv_events(&self) -> bool {
        self.kv_events.is_some() || !self.kv_events_by_rank.is_empty()
    }

    /// Checks all rules.
    ///
    /// # Errors
    /// The first violated rule, with its value.
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
            ("block_size", self.block_size),
            ("max_model_len", self.max_model_len),
        ] {
            if value == Some(0) {
                return Err(WorkerConfigError::Zero { field });
            }
        }
        if !self.health_path.starts_with('/') {
            return Err(WorkerConfigError::HealthPath(self.health_path.clone()));
        }
        // If the first and the last rank have valid ports, so do the ranks in between.
        for rank in [start, start + size - 1] {
            if let Some(kv_events) = &self.kv_events {
                kv_events.of_rank(rank)?;
            }
            if let Some(load) = &self.load {
                load.socket_of_rank(rank)?;
            }
        }
        for events in self.kv_events_by_rank.values() {
            events.of_rank(0)?;
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
    fn rank_endpoints_are_consecutive_ports() {
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
    fn endpoints_of_a_rank_replace_consecutive_ports() {
        let events = |endpoint: &str| KvEventsConfig {
            endpoint: endpoint.to_owned(),
            replay_endpoint: None,
            topic: String::new(),
        };
        let config = WorkerConfig {
            data_parallel_start_rank: 2,
            data_parallel_size: 2,
            kv_events: Some(events("tcp://h:5557")),
            kv_events_by_rank: [(3, events("tcp://other:40000"))].into(),
            ..WorkerConfig::at("x")
        };
        assert_eq!(config.validate(), Ok(()));
        assert_eq!(config.kv_events_of(2), Ok(Some(events("tcp://h:5559"))));
        assert_eq!(config.kv_events_of(3), Ok(Some(events("tcp://other:40000"))));
        let text = serde_json::to_string(&config).expect("JSON");
        assert_eq!(serde_json::from_str::<WorkerConfig>(&text).expect("read back"), config);
        let invalid = WorkerConfig { kv_events_by_rank: [(9, events("tcp://h:0"))].into(), ..WorkerConfig::at("x") };
        assert!(invalid.validate().expect_err("port 0").to_string().contains("tcp://h:0"));
    }

    #[test]
    fn endpoints_of_the_first_rank_determine_those_of_rank_0() {
        let replay_endpoint = Some("tcp://h:5660".to_owned());
        let of_first =
            KvEventsConfig { endpoint: "tcp://[::1]:5560".to_owned(), replay_endpoint, topic: "t".to_owned() };
        let base = of_first.from_rank(3).expect("valid ports");
        assert_eq!(base.endpoint, "tcp://[::1]:5557");
        assert_eq!(base.of_rank(3), Ok(of_first.clone()));
        let error = of_first.from_rank(5560).expect_err("port 0").to_string();
        assert!(error.contains("PORT - 5560 from 1 to 65535"), "{error}");
    }

    #[test]
    fn unknown_keys_are_refused_by_name() {
        let error = serde_json::from_str::<WorkerConfig>(r#"{"endpoint":"x","endpiont":"y"}"#).expect_err("refused");
        assert!(error.to_string().contains("endpiont"));
    }
}
