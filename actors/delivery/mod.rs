//! Message delivery between actors: the serial executor, its actor and gate, scatter-gather, and injected faults.

pub(crate) mod ack;
#[cfg(feature = "faults")]
pub(crate) mod fault;
pub(crate) mod gate;
pub(crate) mod join;
pub(crate) mod reply;
pub(crate) mod strand;
pub(crate) mod strand_actor;
pub(crate) mod sync;

/// Result of a step of an actor: an error ends it.
pub(crate) type ActorResult<T = ()> = Result<T, ractor::ActorProcessingErr>;
