//! Clients that mean harm, beside one that means well.
//!
//! Owns nothing. Each case sends its bytes and sees how it ends; all the while the good client is served, nothing reaches
//! the worker that should not, and memory stays within what the limits allow.

#[path = "../fault_support/mod.rs"]
mod fault_support;
#[path = "../proxy_support/mod.rs"]
mod proxy_support;

mod bodies;
mod crowds;
mod http;
mod scene;

use std::alloc::System;

use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

fn live_bytes() -> usize {
    let stats = ALLOCATOR.stats();
    stats.bytes_allocated.saturating_sub(stats.bytes_deallocated)
}
