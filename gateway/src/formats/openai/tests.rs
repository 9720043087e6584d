//! Body examples and properties, and errors compared with the documentation.

mod bodies;
mod errors;
mod responses;
mod splices;
