//! Endpoint picker over real sockets. The tests act as the proxy.

use crate::common::picker::{COMPLETIONS, ENDPOINTS, Pool, client, messages, workers};

mod health;
mod leaving;
mod picks;
mod refusals;
mod responses;
