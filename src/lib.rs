//! Pointsman picks, for every LLM request, the engine rank that will serve it fastest.

pub mod hashing;
pub mod index;
pub mod load;
pub mod protocol;
