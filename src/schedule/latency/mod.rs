//! The `latency` policy in the scheduler: its search, the columns of loads, and what the pool has learned.

pub(super) mod columns;
pub(super) mod contenders;
pub(super) mod formula;
pub(super) mod lanes;
pub(super) mod prediction;
pub(super) mod recent;
pub(super) mod typical;
