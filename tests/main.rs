//! Integration tests of the library, one module each.

#[macro_use]
#[path = "common/alone.rs"]
mod alone;
#[cfg(feature = "runtime")]
mod common;
#[path = "common/effort.rs"]
mod effort;
#[cfg(feature = "zmq")]
#[path = "common/engines.rs"]
mod engines;
#[path = "common/fleet.rs"]
mod fleet;
#[path = "common/msgpack.rs"]
mod msgpack;
#[cfg(feature = "zmq")]
#[path = "common/peak.rs"]
mod peak;
#[path = "common/recorded.rs"]
mod recorded;
#[path = "common/repetitions.rs"]
mod repetitions;
#[path = "common/world.rs"]
mod world;
#[path = "common/world_config.rs"]
mod world_config;
#[cfg(feature = "zmq")]
#[path = "common/zmtp.rs"]
mod zmtp;

// Tests of the pure core, which also run with `--no-default-features`.
mod answer_properties;
mod audit;
mod audit_engine;
mod audit_replies;
mod budgets;
mod docs_config;
mod hashing_allocations;
mod hashing_vectors;
mod import_cycles;
mod index_budget;
mod index_copies;
mod index_groups;
mod index_memory;
mod index_proofs;
mod index_properties;
mod index_reference;
mod ingest;
mod ingest_allocations;
mod ingest_properties;
mod load_properties;
mod load_reference;
mod predict_properties;
mod program_holds;
mod programs;
mod queue_properties;
mod queue_shares;
mod rank_limits;
mod record_hostile;
mod replica_properties;
mod schedule_choice;
mod schedule_filters;
mod schedule_record;
mod schedule_targets;
mod schedule_turns;
mod schedule_waiting;
mod snapshot;
mod tidy;
mod wire;
mod wire_properties;

#[cfg(all(feature = "faults", feature = "zmq", feature = "replicas"))]
mod block_size;
#[cfg(feature = "runtime")]
mod calibration;
#[cfg(feature = "runtime")]
mod churn;
#[cfg(feature = "runtime")]
mod disagg;
#[cfg(feature = "faults")]
mod discovery;
#[cfg(feature = "tower")]
mod embedding_layers;
#[cfg(feature = "runtime")]
mod engine_load;
#[cfg(feature = "faults")]
mod faults;
#[cfg(feature = "runtime")]
mod gateway;
#[cfg(feature = "faults")]
mod hangs;
#[cfg(feature = "runtime")]
mod health;
#[cfg(feature = "zmq")]
mod hostile;
#[cfg(all(feature = "faults", feature = "zmq"))]
mod ingest_faults;
#[cfg(feature = "zmq")]
mod ingest_hostile;
#[cfg(feature = "runtime")]
mod latency;
#[cfg(feature = "runtime")]
mod latency_traffic;
#[cfg(feature = "runtime")]
mod metrics;
#[cfg(feature = "runtime")]
mod predict;
#[cfg(feature = "runtime")]
mod prompt_weight;
#[cfg(feature = "replicas")]
mod replicas;
#[cfg(feature = "runtime")]
mod router;
#[cfg(feature = "faults")]
mod router_close;
#[cfg(feature = "replicas")]
mod session_properties;
#[cfg(all(feature = "faults", feature = "zmq"))]
mod snapshot_restore;
#[cfg(feature = "runtime")]
mod traces;
#[cfg(feature = "faults")]
mod under_fire;
#[cfg(feature = "runtime")]
mod waiting;
#[cfg(feature = "faults")]
mod waiting_faults;

use std::alloc::System;

use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;
