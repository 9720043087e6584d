//! Hostile clients beside a well-behaved one.
//!
//! Each case sends its bytes and checks the result. Throughout, the well-behaved client is served, no unwanted request
//! reaches the worker, and memory stays within the configured limits.

mod bodies;
mod crowds;
mod http;
mod scene;
