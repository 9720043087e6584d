//! Tools to test the router without GPUs.
//!
//! [`engine`] is a deterministic model of one engine rank, [`kv_events`] encodes its cache events in the formats of
//! real engines, [`workload`] reads traces and generates requests, and [`sse`] reads server-sent events; all are pure.
//! With the feature `mock`, [`mock`] serves the model over HTTP and publishes its KV events, [`driver`] sends requests to
//! any endpoint and measures its responses, and [`demo`] compares two policies on a fleet of mock engines behind a
//! gateway that its caller starts.

#[cfg(feature = "mock")]
pub mod demo;
#[cfg(feature = "mock")]
pub mod driver;
pub mod engine;
pub mod kv_events;
#[cfg(feature = "mock")]
pub mod mock;
pub mod sse;
pub mod workload;
