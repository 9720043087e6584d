//! Body examples and properties, and errors compared with the documentation.

mod asks;
mod errors;
mod splices;
