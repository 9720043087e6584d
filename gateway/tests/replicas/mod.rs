//! Transports between replicas: one suite over every transport.

mod conformance;
mod direct;
mod nats;
mod settings;
mod shared_state;
