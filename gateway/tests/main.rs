//! Integration tests of the gateway, one module each. `alone/` is a second binary for the tests that need a separate
//! process.

mod common;
#[path = "../src/command/demo.rs"]
mod demo_gateway;

mod admin;
mod admin_undo;
mod alerts;
mod asleep;
mod audits;
mod block_sizes;
mod check_config;
mod command_line;
mod demo;
mod descriptors;
mod disaggregation;
mod discovered;
mod docs_metrics;
mod docs_settings;
mod drain;
mod engines;
mod grafana;
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
mod reload;
mod replayed;
mod replicas;
mod scale_from_zero;
mod targets;
mod tokens;
mod traces;
mod warm_start;
mod worker_keys;
mod worker_tls;
