//! Integration tests of the gateway, one module each.

#[macro_use]
#[path = "../../tests/common/alone.rs"]
mod alone;
mod common;
#[path = "../src/command/demo.rs"]
mod demo_gateway;
mod faults;
#[path = "../../tests/common/peak.rs"]
mod peak;

mod admin;
mod admin_audit;
mod admin_undo;
mod alerts;
mod asleep;
mod audits;
mod block_sizes;
mod check_config;
mod command_line;
mod compressed;
mod control;
mod cross_origin;
mod dead_engines;
mod demo;
mod descriptors;
mod dialects;
mod disaggregation;
mod discovered;
mod docs_metrics;
mod docs_settings;
mod drain;
mod endpoints;
mod engines;
mod grafana;
mod hints;
mod hostile_clients;
mod index_api;
mod kubernetes;
mod lengths;
mod limits;
mod live;
mod logs;
mod media;
mod memory;
mod messages;
mod metrics_page;
mod migration;
mod operations;
mod picker;
mod proxy;
mod proxy_faults;
mod realtime;
mod reload;
mod replayed;
mod replicas;
mod scale_from_zero;
mod sessions;
mod stalled;
mod stored_responses;
mod targets;
mod tokens;
mod traces;
mod warm_start;
mod worker_keys;
mod worker_tls;
mod wrong_answers;

use std::alloc::System;

use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;
