//! Transports between replicas: one suite over every transport.

mod conformance;
mod direct;
mod memory;
#[cfg(feature = "nats")]
mod nats;
mod settings;
