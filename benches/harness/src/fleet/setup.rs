//! Setup of a fleet and its router: engines, event delay, roles, and router settings.

use std::num::NonZeroU32;

use clap::{Args, ValueEnum};
use pointsman::RouterConfig;
use pointsman::config::{EventMode, SpeculativeModel};
use pointsman::policy::Policy;
use pointsman_trial::engine::EngineConfig;
use serde::de::IntoDeserializer;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Fleet, Rule};
use crate::Failed;

/// Lifetime of a speculative entry that bridges the delay of events.
const PREDICTED_TTL_MS: u64 = 5_000;

pub(crate) fn policy_named(name: &str) -> Result<Policy, serde::de::value::Error> {
    Policy::deserialize(name.into_deserializer())
}

/// Source of the router's knowledge of the ranks' caches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Knowledge {
    /// KV events of the engines
    #[default]
    Events,
    /// KV events, and speculative entries from the router's decisions until the events arrive
    Predicted,
    /// Decisions only; each entry expires after a time to live
    Ttl,
    /// Decisions only, on modelled LRU caches of the engines' size
    Lru,
}

impl Knowledge {
    /// Adapts `config` to a simulated fleet with this source of cache knowledge.
    pub(crate) fn apply(self, config: &mut RouterConfig) {
        let has_events = !matches!(self, Self::Ttl | Self::Lru);
        config.events.mode = if has_events { EventMode::On } else { EventMode::Off };
        config.index.speculative.model = match self {
            Self::Lru => SpeculativeModel::Lru,
            Self::Events | Self::Predicted | Self::Ttl => SpeculativeModel::Ttl,
        };
        config.index.speculative.with_events_ttl_ms = (self == Self::Predicted).then_some(PREDICTED_TTL_MS);
        config.health.probe_interval_ms = 0; // simulated workers have no endpoint to probe
    }
}

/// A simulated fleet with its router.
#[derive(Clone, Debug, PartialEq)]
pub struct Setup {
    /// Shape of the fleet.
    pub fleet: Fleet,
    /// Engine configuration of each worker's ranks. All have the same block size.
    pub engines: Vec<EngineConfig>,
    /// Delay of KV events between rank and router in µs.
    pub event_delay_us: u64,
    /// Whether the router receives first tokens, with the number of cached prompt tokens, and output blocks.
    pub is_streamed: bool,
    /// Number of initial requests that only warm caches.
    pub warmup_requests: usize,
    /// Settings of the router.
    pub router: RouterSetup,
    /// Routers over the fleet.
    pub replicas: ReplicaSetup,
    /// Ranks in two roles; none for aggregated ranks.
    pub disaggregation: Option<DisaggregationSetup>,
}

/// Prefill ranks of a fleet, and the transfer of KV blocks to its other ranks, which decode.
#[derive(Args, Clone, Copy, Debug, PartialEq)]
pub struct DisaggregationSetup {
    /// Number of ranks that only compute prompts, the first of the fleet; the others decode. Ranks of one worker have
    /// one role. 0: all ranks do both
    #[arg(long, default_value_t = 0, conflicts_with = "replicas")]
    pub prefill_ranks: u32,
    /// Duration of the transfer of KV blocks in µs per prompt token
    #[arg(long, default_value_t = 2.6, value_name = "US")]
    pub transfer_us_per_token: f64,
}

impl DisaggregationSetup {
    /// Duration of the transfer of a prompt in µs.
    pub(crate) fn transfer_us(&self, prompt_tokens: u64) -> u64 {
        (prompt_tokens as f64 * self.transfer_us_per_token).round() as u64
    }
}

/// Several routers over one fleet.
#[derive(Args, Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplicaSetup {
    /// Number of routers over the fleet, which receive the requests in turn
    #[arg(id = "replicas", long = "replicas", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub count: u32,
    /// State that these routers share
    #[arg(id = "replica_sharing", long = "replica-sharing", value_enum, default_value_t)]
    pub sharing: ReplicaSharing,
    /// Delay of messages between these routers in ms
    #[arg(id = "replica_delay_ms", long = "replica-delay-ms", default_value_t = 1, value_parser = clap::value_parser!(u32).range(0..=60_000))]
    pub delay_ms: u32,
}

impl Default for ReplicaSetup {
    fn default() -> Self {
        Self { count: 1, sharing: ReplicaSharing::Load, delay_ms: 1 }
    }
}

/// What several routers share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum ReplicaSharing {
    /// Nothing: each knows its own bookings only
    None,
    /// Loads, as of the last summaries
    #[default]
    Load,
}

/// Settings of the router that a run specifies.
#[derive(Args, Clone, Debug, Default, PartialEq)]
pub struct RouterSetup {
    /// Selection policy: latency, kv, cache_aware, least_loaded, power_of_two, round_robin or random
    #[arg(long, default_value = "kv", value_parser = policy_named)]
    pub policy: Policy,
    /// Rule of another router in its place.
    #[arg(skip)]
    pub rule: Option<Rule>,
    /// Source of the router's knowledge of caches
    #[arg(long, value_enum, default_value_t)]
    pub knowledge: Knowledge,
    /// Index shards [default: the router's]
    #[arg(long)]
    pub shards: Option<u32>,
    /// Seed of the router's random choices and of a generated workload
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Any other setting of the router by its path, such as queue.threshold=2: NAME=VALUE, the value in JSON. Applied
    /// last
    #[arg(long = "set", value_name = "NAME=VALUE", value_parser = unflagged_setting)]
    pub settings: Vec<(String, Value)>,
}

/// Parses NAME=VALUE. Strings may be given without quotes.
pub(crate) fn setting(text: &str) -> Result<(String, Value), String> {
    let (name, value) = text.split_once('=').ok_or_else(|| format!("no '=' in {text:?}"))?;
    let value = serde_json::from_str(value).unwrap_or_else(|_| Value::String(value.to_owned()));
    Ok((name.to_owned(), value))
}

/// Settings that have their own flag, because reports identify a run by them.
const FLAGGED: [(&str, &str); 4] =
    [("policy", "--policy"), ("seed", "--seed"), ("block_size", "--block-size"), ("index.shards", "--shards")];

fn unflagged_setting(text: &str) -> Result<(String, Value), String> {
    let (name, value) = setting(text)?;
    match FLAGGED.iter().find(|(setting, _)| *setting == name) {
        Some((_, flag)) => Err(format!("{name} is set by {flag}")),
        None => Ok((name, value)),
    }
}

impl Setup {
    /// `workers` default engines with `dp_size` ranks each, a router with default settings, and an event delay of 1 ms.
    #[must_use]
    pub fn new(workers: u32, dp_size: u32) -> Self {
        Self {
            fleet: Fleet { workers, dp_size },
            engines: vec![EngineConfig::default(); workers as usize],
            event_delay_us: 1_000,
            is_streamed: true,
            warmup_requests: 0,
            router: RouterSetup::default(),
            replicas: ReplicaSetup::default(),
            disaggregation: None,
        }
    }

    /// Tokens per block.
    #[must_use]
    pub fn block_size(&self) -> NonZeroU32 {
        self.engines.first().and_then(|engine| NonZeroU32::new(engine.block_size)).unwrap_or(NonZeroU32::MIN)
    }

    /// Configuration of the router.
    ///
    /// # Errors
    /// A setting is unknown or has the wrong type.
    pub fn router_config(&self) -> Result<RouterConfig, Failed> {
        let RouterSetup { policy, knowledge, shards, seed, settings, .. } = &self.router;
        let mut config = RouterConfig::default();
        knowledge.apply(&mut config);
        config.block_size = Some(self.block_size().get());
        config.policy = (*policy).into();
        config.seed = *seed;
        if let Some(shards) = shards {
            config.index.shards = *shards;
        }
        let mut value = serde_json::to_value(config)?;
        for (path, setting) in settings {
            set(&mut value, path, setting)?;
        }
        Ok(serde_json::from_value(value)?)
    }

    /// Checks that engines, roles and fleet agree.
    pub(crate) fn validate(&self) -> Result<(), Failed> {
        let (workers, engines) = (self.fleet.workers, self.engines.len());
        if engines != workers as usize || self.fleet.ranks() == 0 {
            return Err(format!("{engines} engines for {workers} workers").into());
        }
        let block_size = self.block_size().get();
        if let Some(other) = self.engines.iter().find(|engine| engine.block_size != block_size) {
            let other = other.block_size;
            return Err(format!("block sizes {block_size} and {other} in one fleet").into());
        }
        self.disaggregation.map_or(Ok(()), |disaggregation| self.validate_roles(disaggregation))
    }

    fn validate_roles(&self, disaggregation: DisaggregationSetup) -> Result<(), Failed> {
        let DisaggregationSetup { prefill_ranks, transfer_us_per_token } = disaggregation;
        let (ranks, dp_size) = (self.fleet.ranks(), self.fleet.dp_size);
        let wrong = if prefill_ranks == 0 || prefill_ranks as usize >= ranks {
            format!("{prefill_ranks} prefill ranks of {ranks} ranks leave a role without ranks")
        } else if !prefill_ranks.is_multiple_of(dp_size) {
            format!("{prefill_ranks} prefill ranks are not whole workers of {dp_size} ranks")
        } else if !(0.0..=1e6).contains(&transfer_us_per_token) {
            format!("transfer_us_per_token is {transfer_us_per_token}, must be 0 to 1000000")
        } else if self.replicas.count > 1 {
            "several routers over ranks in two roles are not simulated".to_owned()
        } else {
            return Ok(());
        };
        Err(wrong.into())
    }
}

/// Sets the field at a path such as `queue.threshold`.
fn set(config: &mut Value, path: &str, setting: &Value) -> Result<(), Failed> {
    let (sections, name) = path.rsplit_once('.').map_or((None, path), |(sections, name)| (Some(sections), name));
    let mut at = config;
    for section in sections.into_iter().flat_map(|sections| sections.split('.')) {
        at = at.get_mut(section).ok_or_else(|| format!("{path} is no setting of the router"))?;
    }
    let fields = at.as_object_mut().ok_or_else(|| format!("{path} is no setting of the router"))?;
    fields.insert(name.to_owned(), setting.clone());
    Ok(())
}
