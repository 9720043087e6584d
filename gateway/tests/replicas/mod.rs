//! Transports between replicas: one suite over every transport.

mod conformance;
mod direct;
#[cfg(feature = "nats")]
mod nats;
mod settings;
