//! Clients that mean harm, beside one that means well.
//!
//! Owns nothing. Each case sends its bytes and sees how it ends; all the while the good client is served, nothing reaches
//! the worker that should not, and memory stays within what the limits allow.

mod bodies;
mod crowds;
mod http;
mod scene;
