//! Spans of requests at a collector, decoded from OTLP over gRPC. A binary of its own, because the feature `otlp` compiles
//! the gateway once more.

#[path = "../common/mod.rs"]
#[allow(dead_code, reason = "the other binaries use the rest")]
mod common;

mod collector;
mod picked;
mod proxied;
