//! Rate limits, token quotas and concurrency limits of tenants and their keys.
//!
//! Pure: the time is an argument. The limiter holds the state of one tenant with the limits of each of its keys, and
//! decides on both at once, so that a rejected request takes nothing. The prompt is charged when its length is known,
//! and settled with the usage at the end. [`serve`](crate::app) owns the state of a gateway.

mod bucket;
mod limiter;
#[cfg(test)]
mod tests;

pub(crate) use limiter::{Allowance, Charge, Exceeded, KeyId, Limiter};

/// Limits of a tenant, or of each of its keys. An absent limit does not apply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QuotaLimits {
    /// Requests per minute.
    pub requests_per_minute: Option<u64>,
    /// Prompt and completion tokens per minute.
    pub tokens_per_minute: Option<u64>,
    /// Prompt and completion tokens per day.
    pub tokens_per_day: Option<u64>,
    /// Requests in flight.
    pub requests_in_flight_max: Option<u32>,
}

/// Kind of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Limit {
    /// Requests per minute.
    RequestsPerMinute,
    /// Tokens per minute.
    TokensPerMinute,
    /// Tokens per day.
    TokensPerDay,
    /// Requests in flight.
    RequestsInFlight,
}

impl Limit {
    /// All limits.
    pub const ALL: [Self; 4] =
        [Self::RequestsPerMinute, Self::TokensPerMinute, Self::TokensPerDay, Self::RequestsInFlight];

    /// Name in labels.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::RequestsPerMinute => "requests_per_minute",
            Self::TokensPerMinute => "tokens_per_minute",
            Self::TokensPerDay => "tokens_per_day",
            Self::RequestsInFlight => "requests_in_flight",
        }
    }
}
