//! Message delivery between actors: the serial executor, scatter-gather, and injected faults.

#[cfg(feature = "faults")]
pub(crate) mod fault;
pub(crate) mod join;
pub(crate) mod strand;
