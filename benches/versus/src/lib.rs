//! Parts shared by the processes of a comparison: the index replay, and medians.

pub mod index;
pub mod medians;
