//! Integration tests that need the whole process: a global allocator counts all bytes, a panic hook counts all panics,
//! and a tracing callsite caches the interest of the first thread that reaches it. Each test holds the lock of
//! [`alone`].

#[cfg(feature = "runtime")]
#[path = "../common/mod.rs"]
#[allow(dead_code, reason = "the other binary uses the rest")]
mod common;
#[path = "../common/effort.rs"]
mod effort;
#[cfg(feature = "zmq")]
#[path = "../common/engines.rs"]
#[allow(dead_code, reason = "the other binary uses the rest")]
mod engines;
#[path = "../common/msgpack.rs"]
#[allow(dead_code, reason = "the other binary uses the rest")]
mod msgpack;
#[cfg(feature = "zmq")]
#[path = "../common/peak.rs"]
mod peak;
#[path = "../common/recorded.rs"]
#[allow(dead_code, reason = "the other binary uses the rest")]
mod recorded;
#[cfg(feature = "runtime")]
#[path = "../common/repetitions.rs"]
mod repetitions;
#[cfg(feature = "zmq")]
#[path = "../common/zmtp.rs"]
#[allow(dead_code, reason = "the other binary uses the rest")]
mod zmtp;

#[cfg(feature = "runtime")]
mod churn;
mod hashing_allocations;
#[cfg(feature = "zmq")]
mod hostile;
mod index_memory;
mod ingest_allocations;
#[cfg(feature = "zmq")]
mod ingest_hostile;
mod record_hostile;
#[cfg(feature = "runtime")]
mod traces;
mod wire_properties;

use std::alloc::System;
use std::sync::{Mutex, MutexGuard, PoisonError};

use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// The lock held by the running test. A failed test does not fail the others.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}
