//! Integration tests of the harness, one module each.

mod decisions;
mod drift;
mod load;
