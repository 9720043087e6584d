//! Pointsman picks, for every LLM request, the engine rank that will serve it fastest, and keeps count of what each
//! rank is doing. It is a library: a gateway embeds it.
//!
//! # The problem
//!
//! Engines keep the KV blocks of prompts they have computed. A request that goes where its prefix lies skips most of
//! its prefill; one that goes elsewhere has it computed again. But if every request with a popular prefix goes to the
//! rank that has it, they queue there while others idle. So a router must know, for each request, what each rank holds
//! of just this prompt and what it was given to do up to a moment ago, and weigh the one against the other.
//!
//! # The shape
//!
//! The public modules are what the router knows and decides, as plain synchronous Rust: `now` and seeds are arguments,
//! and nothing in them waits, performs I/O or reads a clock. [`hashing`] turns prompts into block hashes, [`index`]
//! knows which rank holds which prefix, [`load`] counts what is booked on a rank, [`select`] weighs, [`queue`] has who
//! must wait, and [`schedule`] decides, one request after the other. The [`directory`] has every booking's lease by
//! request id. [`zmtp`], [`ingest`] and [`wire`] make events of what engines publish about their caches.
//!
//! The actors, behind the default feature `runtime`, own that state and carry the messages: one scheduler, the only one
//! that books; a sequence actor for each rank; a radix actor for each index shard; a supervisor. Embedders see the
//! `Router`, its `Placement`s, the [`config`] and the [`error`]s; with the feature `http` bodies of answers that hold
//! their placement, read as [`answer`] has it, and with `tower` a layer that places requests. The feature `faults` adds drills that break one part
//! of a running router. `ARCHITECTURE.md` has the way of a request and the invariants.
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
//! # What it costs, and where it loses
//!
//! `benches/README.md` has the figures, with machine and commit: CPU and latency of a routed request on 8 to 2,048
//! ranks beside the nearest peer's, and each part alone.
//!
//! - All decisions of a pool pass one scheduler. That makes a booking visible to the very next decision, and is a
//!   ceiling that cores do not lift; a `kv` decision also looks at every rank's bounds, so it grows with the fleet.
//! - Every query visits every index shard: shards spread events only.
//! - A prompt run that many ranks hold and one gives up block by block from its end is checked against the others'
//!   holdings each time.
//! - With a temperature or a decaying credit each decision queries every rank.
//! - Where requests may have to wait they are decided one at a time, and a step that finds everybody busy looks at each
//!   lane that waits.
//! - Without `index.bytes_max` the index grows with what engines report.

#[cfg(feature = "runtime")]
#[path = "../actors/mod.rs"]
mod actors;
pub mod answer;
pub mod config;
pub mod directory;
pub mod disagg;
pub mod discovery;
pub mod engine_load;
pub mod error;
pub mod hashing;
pub mod health;
pub mod index;
pub mod ingest;
pub mod load;
pub mod membership;
pub mod policy;
pub mod predict;
pub mod protocol;
pub mod queue;
mod request;
pub mod schedule;
pub mod select;
pub mod session;
mod validation;
pub mod wire;
pub mod zmtp;

#[cfg(feature = "http")]
pub use actors::PlacedBody;
#[cfg(feature = "runtime")]
pub use actors::{
    AddRequest, CacheHit, DisaggPlacement, Disaggregated, DiscoverySource, Health, KvSourceStatus, OverlapScores,
    PendingClass, Placement, RankScores, Router, RouterBuilder, SharedCache, SharedCacheAnswer, SharedCacheError,
    SharedCacheFailure, SharedSummary, StaticList, WorkerEntry,
};
#[cfg(feature = "discovery")]
pub use actors::{DnsNames, ProbeOptions, ProbedUrls, WatchedFile};
#[cfg(feature = "faults")]
pub use actors::{Fault, Hang};
#[cfg(feature = "tower")]
pub use actors::{PlaceError, PlaceFuture, PlaceRequests, PlacedTarget, PlacementLayer};
pub use config::RouterConfig;
pub use membership::DiscoveryStatus;
pub use request::{Prompt, RequestOptions, RouteRequest};

/// The README's example, compiled and run.
#[cfg(all(doctest, feature = "runtime"))]
#[doc = include_str!("../README.md")]
mod readme {}

/// Those of the guide for embedders.
#[cfg(all(doctest, feature = "tower"))]
#[doc = include_str!("../docs/embedding.md")]
mod embedding {}
