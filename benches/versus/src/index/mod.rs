//! The index alone, replayed: one writer, the same events and the same questions, over Pointsman's index and its peers'.
//!
//! Owns the load ([`load`]), the indexes under one form ([`subject`]) and what one process measures of one of them
//! ([`replay`]). Promises that all get the same events in the same order, and that every answer is kept as a
//! digest, so that whoever compares can refuse figures of indexes that do not agree. Leaves pairs and tables to the
//! command.

pub mod load;
pub mod replay;
pub mod subject;

pub use replay::Replay;
