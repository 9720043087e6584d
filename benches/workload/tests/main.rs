//! Integration tests, one module each.

mod generators;
mod traces;
