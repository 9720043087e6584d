//! Load and replay harness of Pointsman: what a router costs, measured in a closed loop.
//!
//! A [`workload`] gives prompts, simulated [`engine`]s stand in for the fleet, and the [`closed_loop`] drives a
//! [`target::Target`] with them: route, let the engine serve, hand its events on, complete the prefill, free. What
//! that took is [`measure`]d and [`report`]ed. Two routers are targets today: Pointsman, and in `benches/versus` its
//! nearest peer, so that both run exactly the same loop.
//!
//! Beside the loop, [`events`] measures what comes from engines alone: how many blocks a second one core takes in.
//!
//! The loop simulates no time: its engines answer at once, and load is whatever `--inflight` requests weigh. It says what
//! routing costs and what it finds in caches. What a fleet's users would see of it is for [`simulate`] to say: the same
//! targets over engines that take their time, on a clock that nobody waits for. And [`load`] asks real endpoints, over
//! HTTP.
//!
//! Whatever ran over time, simulated or not, leaves a [`record::Run`], of which [`results`] make figures and doubts.
//! [`compare`] and [`suite`] put policies side by side, [`page`] draws what they found, [`drift`] holds them to it.
//!
//! The harness embeds the router through its public API only.

pub mod cli;
pub mod closed_loop;
pub mod compare;
pub mod drift;
pub mod embedded;
pub mod engine;
pub mod events;
pub mod fleet;
pub mod load;
pub mod measure;
pub mod page;
pub mod record;
pub mod report;
pub mod results;
pub mod simulate;
pub mod source;
pub mod suite;
pub mod target;

pub use pointsman_trial::workload;
