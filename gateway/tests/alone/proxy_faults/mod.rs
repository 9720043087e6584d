//! The gateway between clients that leave and workers that fail, at every point of a request.
//!
//! Owns no scenario. Each is told to the byte: nothing goes on that was not let go on, and after each nothing is left
//! booked. Leaves clients that mean harm to `hostile_clients`.

mod blame;
mod bytes;
mod clients;
mod drain;
mod tenants;
mod tokenize;
mod workers;
