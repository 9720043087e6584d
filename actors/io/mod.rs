//! Input and output of the actors: the runtime's clock, HTTP, and the engines' ZeroMQ sockets.

pub(crate) mod clock;
#[cfg(feature = "zmq")]
pub(crate) mod engine_socket;
#[cfg(feature = "discovery")]
pub(crate) mod http;
