//! What discovery reads, as data in and data out: addresses of engines and what they say of themselves.
//!
//! Owns the parsing. Promises that nothing read from outside can make it panic, and errors that name the value and its
//! rule. Leaves waiting, files and sockets to the actors.

mod url;

pub use url::{HttpUrl, HttpUrlError};
