//! Progress display of the demo on standard error.
//!
//! A terminal gets one line that is rewritten. A pipe or file gets whole lines without control characters, one for each
//! quarter of the run.

use std::io::{IsTerminal as _, Write as _, stderr};
use std::sync::Mutex;

/// Destination of progress output.
#[derive(Debug)]
pub struct Progress(Kind);

#[derive(Debug)]
enum Kind {
    Silent,
    Terminal,
    /// Label and completed quarters of the last line that was written.
    Lines(Mutex<(String, usize)>),
}

impl Progress {
    /// Discards all progress output.
    #[must_use]
    pub fn silent() -> Self {
        Self(Kind::Silent)
    }

    /// Writes to standard error: one changing line on a terminal, otherwise a few lines.
    #[must_use]
    pub fn stderr() -> Self {
        Self(if stderr().is_terminal() { Kind::Terminal } else { Kind::Lines(Mutex::default()) })
    }

    /// Shows the current activity.
    pub(super) fn print(&self, what: &str) {
        match &self.0 {
            Kind::Silent => {}
            Kind::Terminal => write(&format!("\r\x1b[K{what}")),
            Kind::Lines(_) => write(&format!("{what}\n")),
        }
    }

    /// Shows a line that stays.
    pub(super) fn note(&self, what: &str) {
        self.print(what);
        if matches!(self.0, Kind::Terminal) {
            write("\n");
        }
    }

    /// Shows the number of completed requests.
    pub(super) fn show(&self, label: &str, done: usize, planned: usize) {
        let line = format!("{label}: {done} of {planned} requests");
        match &self.0 {
            Kind::Silent => {}
            Kind::Terminal => self.print(&line),
            Kind::Lines(last) => {
                let now = (label.to_owned(), 4 * done / planned.max(1));
                let mut last = last.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                if *last != now && now.1 > 0 {
                    *last = now;
                    write(&format!("{line}\n"));
                }
            }
        }
    }

    /// Clears the line for subsequent output.
    pub(super) fn end(&self) {
        match self.0 {
            Kind::Terminal => write("\r\x1b[K"),
            Kind::Silent | Kind::Lines(_) => {}
        }
    }
}

/// Write errors are ignored: a failed progress display must not fail the demo.
fn write(text: &str) {
    let mut stderr = stderr();
    let _ = stderr.write_all(text.as_bytes());
    let _ = stderr.flush();
}
