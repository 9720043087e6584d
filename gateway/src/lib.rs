//! Library of the `pointsman` command: the gateway by floors.
//!
//! The folders below are in the order in which a request meets their code. A folder imports only from those above it in
//! this list, which a test verifies (`tests/import_cycles.rs`). `proxy::context` is what a request sees, and only
//! [`app`] knows all folders.

pub mod formats;

pub mod settings;

pub mod observe;

pub mod net;

pub mod admission;

pub mod tokens;

pub mod replicas;

pub mod pools;

pub mod proxy;

pub mod picker;

pub mod admin;

pub mod app;

#[cfg(test)]
mod tests;
