//! Input and output of the actors: the clock, the memory of the machine, HTTP, and the engines' ZeroMQ sockets.

pub(crate) mod clock;
#[cfg(feature = "zmq")]
pub(crate) mod engine_socket;
#[cfg(feature = "discovery")]
pub(crate) mod http;
pub(crate) mod memory;
