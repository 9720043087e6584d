//! What the comparisons share between their processes: the index replay, and medians.

pub mod index;
pub mod medians;
