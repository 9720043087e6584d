//! Pools: the served models and what keeps them.
//!
//! A model with its router, its worker sources, its prefill pool, its index snapshots and files of decisions, and the
//! readiness that follows from all models. No request is known here.

pub(crate) mod decision_files;
pub(crate) mod disaggregation;
pub(crate) mod gate;
pub(crate) mod latest;
pub mod model;
pub(crate) mod models;
#[cfg(feature = "kubernetes")]
mod pods;
pub(crate) mod rank_names;
pub(crate) mod readiness;
pub(crate) mod serving;
mod sources;
pub(crate) mod unread_events;
pub(crate) mod warm;
pub(crate) mod workers;
