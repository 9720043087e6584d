//! Integration tests, one module each.

mod properties;
mod story;
