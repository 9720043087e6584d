//! Helpers of the gateway's tests: fleets of mock engines, scripted workers, HTTP clients, and a gateway with the admin
//! API.
//!
//! [`holdings`] asserts that the router's index matches the engines' caches. All other assertions are in the tests.

pub(crate) mod admin;
pub(crate) mod authority;
pub(crate) mod directory;
pub(crate) mod fleet;
pub(crate) mod front;
pub(crate) mod holdings;
pub(crate) mod http;
pub(crate) mod picker;
#[cfg(unix)]
pub(crate) mod process;
pub(crate) mod proxy;
pub(crate) mod workload;
