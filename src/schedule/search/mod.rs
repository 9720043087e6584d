//! Searches for a rank.

pub(super) mod scratch;
pub(super) mod table;
pub(super) mod ties;
