//! A gateway between clients that disconnect and workers that fail, at every point of a request.
//!
//! The scripts control every byte: no step runs before the test releases it. After each case no booking may remain.
//! Hostile clients are tested in `hostile_clients`.

mod bytes;
mod clients;
mod drain;
mod heartbeats;
mod outcomes;
mod tenants;
mod workers;
