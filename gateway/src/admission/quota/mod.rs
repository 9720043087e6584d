//! Rate limits, token quotas and concurrency limits of tenants and their keys.
//!
//! Pure: the time is an argument. The limiter holds the state of one tenant with the limits of each of its keys, and
//! decides on both at once, so that a rejected request takes nothing. The prompt is charged when its length is known,
//! and settled with the usage at the end. `leases` owns the state.

mod bucket;
mod limiter;
#[cfg(test)]
mod tests;

pub(crate) use crate::formats::openai::Limit;
pub(crate) use crate::settings::QuotaLimits;
pub(crate) use limiter::{Allowance, Charge, Exceeded, KeyId, Limiter};
