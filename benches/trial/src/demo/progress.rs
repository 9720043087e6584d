//! Progress of the demo on standard error.

use std::io::{Write as _, stderr};

/// Destination of progress output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// None.
    Silent,
    /// Standard error: a line for each start of a fleet, and for each quarter of a run.
    Stderr,
}

impl Progress {
    /// Writes a line. Errors are ignored: a failed progress display must not fail the demo.
    pub(super) fn print(self, line: &str) {
        if self == Self::Stderr {
            let _ = writeln!(stderr(), "{line}");
        }
    }
}
