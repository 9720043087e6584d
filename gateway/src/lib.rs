//! What the `pointsman` command is made of and other members test against.
//!
//! Owns [`mock`]: an engine without a GPU. The command line is `main`'s.

pub mod mock;
