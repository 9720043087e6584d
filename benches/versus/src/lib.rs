//! Parts shared by the processes of a comparison: the index replay, and columns of tables.

pub mod columns;
pub mod index;
