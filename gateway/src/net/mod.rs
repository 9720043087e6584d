//! Network: listeners for clients, and the HTTP client for workers.
//!
//! Sockets, TLS, connections and their limits. The content of a request is not read here.

pub(crate) mod budget;
pub mod certificates;
pub(crate) mod cores;
pub(crate) mod head;
pub mod limits;
pub mod listener;
pub mod tls;
pub mod upstream;
