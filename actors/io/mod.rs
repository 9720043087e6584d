//! Input and output of the actors: the clock, the memory of the machine, HTTP, and the engines' ZeroMQ sockets.

pub(crate) mod clock;
#[cfg(feature = "zmq")]
pub(crate) mod engine_socket;
#[cfg(feature = "discovery")]
pub(crate) mod http;
pub(crate) mod memory;

use std::pin::Pin;

/// A boxed future: the return type of asynchronous methods that an embedder implements.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;
