//! The policy `latency`: its formula and search, the loads that these read as columns, and what the pool has learned.

pub(super) mod columns;
pub(super) mod facts;
pub(super) mod formula;
mod lanes;
pub(super) mod prediction;
pub(super) mod recent;
pub(super) mod search;
pub(super) mod typical;
