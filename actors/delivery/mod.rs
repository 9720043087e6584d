//! Message delivery between actors: the serial executor, scatter-gather, and injected faults.

pub(crate) mod ack;
#[cfg(feature = "faults")]
pub(crate) mod fault;
pub(crate) mod join;
pub(crate) mod reply;
pub(crate) mod strand;
