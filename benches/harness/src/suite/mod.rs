//! Many workloads, each with a comparison of its own.
//!
//! Owns the form of the outcome. Leaves comparing to [`crate::compare`].

use serde::{Deserialize, Serialize};

use crate::compare::Comparison;

/// What a suite gave.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Suite {
    /// [`crate::results::SCHEMA_VERSION`] of the program that wrote it.
    pub schema_version: u32,
    /// Its workloads, in order.
    pub rows: Vec<Row>,
}

/// One workload of a suite.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// What it is called.
    pub name: String,
    /// What it is there for.
    pub why: String,
    /// What was run on it.
    pub comparison: Comparison,
}
