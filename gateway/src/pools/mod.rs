//! Pools: the served models and what keeps them.
//!
//! A model with its router, its worker sources, its prefill pool, its index snapshots and files of decisions, and the
//! readiness that follows from all models. No request is known here.

pub(crate) mod decision_files;
pub(crate) mod disaggregation;
pub mod models;
#[cfg(feature = "kubernetes")]
mod pods;
pub(crate) mod rank_names;
pub(crate) mod readiness;
mod sources;
pub(crate) mod warm;
pub(crate) mod workers;
