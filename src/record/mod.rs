//! Records of decisions as bytes: a bounded memory of them, and the format of files.
//!
//! The scheduler writes what its decisions read ([`crate::schedule::Recorder`]). [`DecisionRing`] keeps the last entries
//! within a number of bytes and an age. [`crate::schedule::Replay`] decides the entries again. All of it is plain data
//! without I/O.

pub(crate) mod bytes;
mod file;
mod ring;

pub use file::{FileEnd, FiledEntries, FiledSegment, RecordFile, RecordFileError};
pub use ring::{DecisionRing, RecordCursor, RecordPart, RecordSegment};
