//! Admission: who may send what and how much of it.
//!
//! Tenants and their limits, the memory of request bodies, and the budget of retries.

pub(crate) mod admit;
pub(crate) mod body_budget;
pub(crate) mod intake;
pub(crate) mod leases;
pub mod quota;
pub(crate) mod retry_budget;
pub mod tenants;
