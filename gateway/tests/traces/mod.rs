//! Spans of requests at a collector, decoded from OTLP over gRPC.

mod collector;
mod picked;
mod proxied;
