//! Admission: who may send what and how much of it.
//!
//! Tenants and their limits, the reading of request bodies, the budget of retries, and shared sessions.

pub(crate) mod admit;
pub(crate) mod coding;
pub(crate) mod intake;
pub(crate) mod leases;
pub mod quota;
pub(crate) mod retry_budget;
pub(crate) mod shared_sessions;
pub mod tenants;
