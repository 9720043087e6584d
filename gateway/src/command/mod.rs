//! Parts of the command line.

pub(crate) mod demo;
pub(crate) mod output;
