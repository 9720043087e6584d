//! Library of the `pointsman` command.

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
mod hostile;
