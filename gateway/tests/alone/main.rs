//! Integration tests of the gateway that need the whole process: gateways share the process-wide metrics recorder, a
//! global allocator counts all bytes, and a tracing callsite caches the interest of the first thread that reaches it.
//! Each test holds the lock of [`alone`].

#[path = "../common/mod.rs"]
#[allow(dead_code, reason = "the other binary uses the rest")]
mod common;
mod faults;
#[path = "../../../tests/common/peak.rs"]
mod peak;

mod admin_audit;
mod dead_engines;
mod hostile_clients;
mod proxy_faults;
mod wrong_answers;

use std::alloc::System;

use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use tokio::sync::{Mutex, MutexGuard};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// The lock held by the running test.
async fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::const_new(());
    ALONE.lock().await
}
