//! Transports between replicas: one suite over every transport.

mod conformance;
mod direct;
mod memory;
mod nats;
mod settings;
mod shared_state;
