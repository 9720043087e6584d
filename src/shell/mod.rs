//! Shells of the actors: what an actor does with a message, without a runtime.
//!
//! A shell owns the state of its actor and decides. It is generic over what callers attach to a message, such as reply
//! channels and permits, which it passes on unread. The effects of a step are values. The strands of `actors/` perform
//! them, and `tests/simulation` performs them in a world with a virtual clock, so that what is simulated is what ships.
//! A shell performs no I/O and reads no clock: each step takes a [`TimeSource`](crate::protocol::TimeSource).

mod defect;
mod incarnation;
pub mod reader;
pub mod scheduler;
pub mod sequence;
pub mod shard;
pub mod sharing;
pub mod supervisor;

pub use defect::Defect;
pub use incarnation::CurrentIncarnation;
