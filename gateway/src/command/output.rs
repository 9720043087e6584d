//! Output of the commands.
//!
//! A reader that closes the pipe, such as `head`, ends a command early and without an error.

use std::fmt::Display;
use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;

/// Exit code for invalid input and failures.
const UNUSABLE: u8 = 2;

/// Early end of a command.
#[derive(Debug)]
pub(crate) enum Stop {
    /// The output is closed.
    Unread,
    /// Problems, one per line.
    Problem(String),
}

/// Writes a part of the result to the standard output.
///
/// # Errors
/// A closed pipe, or a failure to write.
pub(crate) fn print(text: impl Display) -> Result<(), Stop> {
    let mut output = io::stdout();
    write!(output, "{text}").and_then(|()| output.flush()).map_err(Stop::from)
}

/// Writes a line to the standard error. It has no reader of its own failure.
pub(crate) fn print_error(text: impl Display) {
    let _ = writeln!(io::stderr(), "{}", text.to_string().trim_end());
}

/// Exit code of a command.
pub(crate) fn ended(result: Result<(), Stop>) -> ExitCode {
    match result {
        Ok(()) | Err(Stop::Unread) => ExitCode::SUCCESS,
        Err(Stop::Problem(problems)) => {
            print_error(problems);
            ExitCode::from(UNUSABLE)
        }
    }
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            ErrorKind::BrokenPipe => Self::Unread,
            _ => Self::Problem(format!("cannot write: {error}")),
        }
    }
}
