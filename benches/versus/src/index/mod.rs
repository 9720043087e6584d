//! Replay of the index alone: one writer, with the same events and the same queries for Pointsman's index and two
//! others.
//!
//! Contains the load ([`load`]), the common interface of the indexes ([`subject`]) and the measurement of one index in
//! one process ([`replay`]). All indexes receive the same events in the same order. Every query result is kept as a
//! digest, so that the command rejects figures of indexes with different results. The command also builds pairs and
//! tables.

pub mod load;
pub mod replay;
pub mod subject;

pub use replay::Replay;
