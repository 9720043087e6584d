//! KV-cache-aware request router for fleets of LLM engines: selects the engine rank of each request. A library, embedded
//! in a gateway.
//!
//! # The problem
//!
//! Engines cache the KV blocks of computed prompts. A request on a rank that caches its prefix skips most of its prefill;
//! on another rank the prefix is computed again. If every request with a popular prefix went to the same rank, requests
//! would queue there while other ranks are idle. For each request, a router therefore needs the cached prefix and the
//! current load of every rank, and weighs one against the other.
//!
//! # Structure
//!
//! State and decisions are plain, synchronous Rust: `now` and seeds are arguments; nothing waits, performs I/O or reads a
//! clock. [`hashing`] computes block hashes of prompts, and [`policy`] compares ranks. The index of cached prefixes, the
//! load of ranks, queues, sessions, KV event streams and the decisions themselves are private.
//!
//! The actors, behind the default feature `runtime`, own that state and exchange messages: one scheduler, the only one
//! that books; one sequence actor per rank; one radix actor per index shard; a supervisor. Embedders use the `Router`, its
//! `Placement`s, the [`config`] and the [`error`]s. [`guide`] shows how a gateway embeds the router, from one placement to
//! a complete server.
//!
//! # Features
//!
//! | feature | adds |
//! |---|---|
//! | `runtime` (default) | the actors, [`Router`] and [`Placement`] on tokio; without it the crate is the pure core |
//! | `http` | [`PlacedBody`]: response bodies that hold their placement and report its progress |
//! | `tower` | [`PlacementLayer`]: a layer that places requests |
//! | `zmq` | the reader of the engines' KV event sockets ([`WorkerConfig::kv_events`](protocol::WorkerConfig::kv_events)) |
//! | `discovery` | workers by probes ([`ProbedUrls`]), DNS ([`DnsNames`]) and files ([`WatchedFile`]) |
//! | `kubernetes` | workers by the pods of a cluster ([`KubernetesPods`]) |
//! | `replicas` | load and cache contents shared with other replicas of the router ([`ReplicaBus`]) |
//! | `faults` | drills that crash or block one actor (`Router::inject`) |
//! | `test-support` | reference models for tests and benchmarks; not stable |
//!
//! # Example
//!
//! ```
//! # #[cfg(feature = "runtime")]
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use pointsman::protocol::{WorkerConfig, WorkerId};
//! use pointsman::{Prompt, RouteRequest, Router, RouterConfig};
//!
//! let worker = WorkerConfig::at("http://10.0.0.1:8000");
//! let router = Router::builder(RouterConfig::default()).worker(WorkerId(1), worker).start().await?;
//! let placement = router.route(RouteRequest::new("req-1", Prompt::Tokens(&[1, 2, 3]))).await?;
//! assert_eq!(placement.endpoint(), "http://10.0.0.1:8000");
//! placement.prefill_completed(); // when the first token is out
//! drop(placement); // when the request is over
//! assert_eq!(router.health().leases, 0);
//! # Ok(())
//! # }
//! # #[cfg(not(feature = "runtime"))]
//! # fn main() {}
//! ```
//!
//! # Cost and limits
//!
//! `benches/README.md` has the figures, with machine and commit: CPU and latency of a routed request on 8 to 2,048 ranks,
//! compared with Dynamo's router, and each part alone.
//!
//! - One scheduler decides all requests of a pool, so each booking is visible to the next decision. Its throughput does
//!   not grow with the number of cores. A decision by cost computes the bounds of every rank, so its cost grows with the
//!   fleet.
//! - Every overlap query visits every index shard: shards distribute events only.
//! - If one of many ranks removes a shared prefix block by block from its end, each removal is compared with the holdings
//!   of the others.
//! - With a temperature or a decaying credit, each decision queries every rank.
//! - Pools with queueing decide one request at a time. If all ranks are busy, a step evaluates each waiting lane.
//! - The index of a router holds at most `index.bytes_max`, a quarter of the memory by default.

#![cfg_attr(docsrs, feature(doc_cfg))]
// With `test-support` every item is reachable, so that the workspace reports what nothing uses.
#![cfg_attr(not(feature = "test-support"), allow(dead_code, unreachable_pub, unused_imports))]

#[cfg(feature = "runtime")]
#[path = "../actors/mod.rs"]
mod actors;
mod answer;
pub mod config;
mod directory;
mod disagg;
mod discovery;
mod engine_load;
pub mod error;
pub mod hashing;
mod health;
mod index;
mod ingest;
mod load;
mod membership;
mod names;
pub mod policy;
mod predict;
pub mod protocol;
mod queue;
mod record;
mod replica;
mod request;
mod schedule;
mod select;
mod session;
mod shell;
mod snapshot;
#[cfg(any(test, feature = "test-support"))]
pub mod test_support;
mod validation;
mod wire;
mod zmtp;

#[cfg(feature = "faults")]
pub use actors::Fault;
#[cfg(feature = "kubernetes")]
pub use actors::KubernetesPods;
#[cfg(feature = "http")]
pub use actors::PlacedBody;
#[cfg(feature = "runtime")]
pub use actors::{
    AddRequest, BoxFuture, Disaggregated, DiscoverySource, Health, KvSourceStatus, Placement, PrefillPlacement,
    RankReport, RecordedDecision, Router, RouterBuilder, SharedCache, StaticList, WorkerEntry,
};
#[cfg(feature = "replicas")]
pub use actors::{BusError, ReplicaBus, ReplicaMember, ReplicaMessage, SnapshotSource, SnapshotStore};
#[cfg(feature = "discovery")]
pub use actors::{DnsNames, EngineClient, EngineGet, EngineHttpError, ProbeOptions, ProbedUrls, WatchedFile};
#[cfg(feature = "tower")]
pub use actors::{PlaceError, PlacedTarget, PlacementLayer};
pub use answer::{AnswerKind, AnswerReader, Usage};
pub use config::router::RouterConfig;
pub use disagg::{DisaggConfig, SkipPolicy, WhyLocal};
#[cfg(feature = "discovery")]
pub use discovery::NamedWorker;
pub use discovery::{DiscoveryError, HttpUrl};
pub use engine_load::{EngineLoadFact, EngineReading};
pub use health::{HealthState, Outcome, RankHealth};
pub use ingest::{Backoff, EngineContents, RestoreState, StreamState};
pub use membership::DiscoveryStatus;
pub use queue::LimitKind;
pub use record::{RecordCursor, RecordFile, RecordPart};
pub use replica::{ReplicaId, ReplicaLife, ReplicaTopic};
pub use request::{Prompt, RequestOptions, RouteRequest};
pub use schedule::{Decision, PotentialLoad, RecordedChoice, Rejection, Replay, ReplayedDecision};
pub use select::{Constraints, Filter, Pin, PinMode, RankConditions, RankTraits};
pub use session::SessionId;
pub use snapshot::{Snapshot, SnapshotError};

/// The README's example, compiled and run.
#[cfg(all(doctest, feature = "runtime"))]
#[doc = include_str!("../README.md")]
mod readme {}

/// [configuration]: crate::config
/// [discovery sources]: crate::DiscoverySource
/// [health]: crate::HealthState
/// [kv events]: crate::protocol::KvEventsConfig
/// [metrics]: #configuration-and-metrics
/// [policies]: crate::policy
///
// The first definition of a link counts: those of the page are files beside it.
#[cfg(any(all(doc, not(doctest)), all(doctest, feature = "tower")))]
#[doc = include_str!("../docs/embedding.md")]
pub mod guide {}

/// Modules behind the public names, for the tests and benchmarks of this project; not stable.
#[cfg(feature = "test-support")]
#[doc(hidden)]
#[allow(missing_docs)]
pub mod internals {
    #[cfg(feature = "faults")]
    pub use crate::actors::Hang;
    #[cfg(feature = "discovery")]
    pub use crate::actors::PlainEngineClient;
    #[cfg(feature = "runtime")]
    pub use crate::actors::{
        DisaggPlacement, KvAuditStatus, KvDifferenceStatus, OverlapScores, PendingClass, RankScores, RoutePhases,
        ShadowTotals, SharedCacheFailure, SharedSummary,
    };
    #[cfg(feature = "tower")]
    pub use crate::actors::{PlaceFuture, PlaceRequests};

    macro_rules! expose {
        ($($module:ident)*) => { $(pub mod $module { pub use crate::$module::*; })* };
    }
    expose! {
        answer directory disagg discovery engine_load health index ingest load membership predict queue record replica
        schedule select session shell snapshot wire zmtp
    }

    pub mod config {
        pub use crate::config::discovery::DiscoveryConfig;
        pub use crate::config::engine_load::EngineLoadConfig;
        pub use crate::config::events::EventsConfig;
        pub use crate::config::health::HealthConfig;
        pub use crate::config::index::{IndexConfig, SpeculativeConfig};
        pub use crate::config::load::LoadConfig;
        pub use crate::config::overload::OverloadConfig;
        pub use crate::config::queue::QueueConfig;
        pub use crate::config::recorder::RecorderConfig;
        pub use crate::config::replicas::ReplicasConfig;
        pub use crate::config::session::SessionConfig;
        pub use crate::config::shadow::ShadowConfig;
        pub use crate::config::shared_cache::SharedCacheConfig;
        pub use crate::config::slow_start::SlowStartConfig;
        pub use crate::config::supervision::SupervisionConfig;
        pub use crate::validation::ConfigError;
    }

    pub mod hashing {
        pub use crate::hashing::block::BlockHasher;
        pub use crate::hashing::mm::{MmBlocks, MmError};
        pub use crate::hashing::prompt::HashedPromptError;
        pub use crate::hashing::sequence::{chain, hash_bytes, sequence_hashes};
    }

    pub mod policy {
        pub use crate::policy::cache_aware::CacheAware;
        pub use crate::policy::custom::RankFilters;
        pub use crate::policy::kv::{CostFacts, CostTerms, KvCost};
        pub use crate::policy::least_loaded::LeastLoaded;
        pub use crate::policy::needs::Bounds;
        pub use crate::policy::power_of_two::PowerOfTwo;
        pub use crate::policy::random::Random;
        pub use crate::policy::round_robin::RoundRobin;
    }

    pub mod protocol {
        pub use crate::protocol::block_size::{BlockSizeOrigin, PoolBlockSize};
        pub use crate::protocol::ids::{BookingId, Generation, SequenceHash, Slot};
        pub use crate::protocol::time::TimeSource;
        pub use crate::protocol::worker::WorkerConfigError;
    }
}
