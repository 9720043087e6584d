//! Load and replay harness of Pointsman. Measures the cost of a router in a closed and in an open loop.
//!
//! A [`workload`] provides prompts, simulated [`engine`]s replace the fleet, and the [`closed_loop`] or
//! the [`open_loop`] drives a [`target::Target`]: route, let the engine serve, deliver its events, complete the prefill,
//! free. [`measure`] has the clocks and [`report`] the results. There are two targets: Pointsman, and in `benches/versus` Dynamo's router, so
//! that both run exactly the same loops.
//!
//! In addition, [`events`] measures the processing of KV events alone: the number of blocks per second on one core.
//!
//! The loops do not simulate time: their engines respond immediately, and the load consists of the `--inflight`
//! requests. They measure the cost of routing and the cache hits. [`simulate`] measures the latency that users of a
//! fleet would see: the same targets over engines with modelled durations, in virtual time. [`load`] sends requests to
//! real endpoints over HTTP.
//!
//! Every run over time, simulated or real, gives a [`record::Run`], from which [`results`] computes figures and
//! warnings. [`compare`] and [`suite`] compare policies, [`page`] draws their results, [`drift`] tests them for
//! regressions.
//!
//! The harness uses the router through its public API only.

pub mod cli;
pub mod closed_loop;
pub mod compare;
pub mod decisions;
pub mod drift;
pub mod drill;
pub mod embedded;
pub mod engine;
pub mod events;
pub mod fleet;
pub mod hold;
pub mod load;
pub mod loop_state;
pub mod measure;
pub mod open_loop;
pub mod page;
mod progress;
pub mod record;
pub mod report;
pub mod results;
pub mod simulate;
pub mod source;
pub mod suite;
pub mod target;

pub use pointsman_trial::workload;
