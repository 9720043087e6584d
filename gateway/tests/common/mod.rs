//! What the tests of a router before a fleet of mock engines need.
//!
//! Owns no assertion about routers but one: that index and caches agree ([`holdings`]). Leaves scenarios to the tests.

pub(crate) mod fleet;
pub(crate) mod holdings;
pub(crate) mod http;
pub(crate) mod workload;
