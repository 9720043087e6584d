//! How far the demo is, on standard error.
//!
//! Owns that one line. Promises no control characters where nobody watches: into a pipe or a file go whole lines, one
//! for each quarter of the way.

use std::io::{IsTerminal as _, Write as _, stderr};
use std::sync::Mutex;

/// Where progress goes.
#[derive(Debug)]
pub struct Progress(Kind);

#[derive(Debug)]
enum Kind {
    Silent,
    Terminal,
    /// What was said last: of which part, and how many quarters.
    Lines(Mutex<(String, usize)>),
}

impl Progress {
    /// Nowhere.
    #[must_use]
    pub fn silent() -> Self {
        Self(Kind::Silent)
    }

    /// Standard error: one line that changes on a terminal, else a few lines.
    #[must_use]
    pub fn stderr() -> Self {
        Self(if stderr().is_terminal() { Kind::Terminal } else { Kind::Lines(Mutex::default()) })
    }

    /// What happens now.
    pub(super) fn say(&self, what: &str) {
        match &self.0 {
            Kind::Silent => {}
            Kind::Terminal => write(&format!("\r\x1b[K{what}")),
            Kind::Lines(_) => write(&format!("{what}\n")),
        }
    }

    /// How far a part is.
    pub(super) fn show(&self, label: &str, done: usize, planned: usize) {
        let line = format!("{label}: {done} of {planned} requests");
        match &self.0 {
            Kind::Silent => {}
            Kind::Terminal => self.say(&line),
            Kind::Lines(said) => {
                let now = (label.to_owned(), 4 * done / planned.max(1));
                let mut said = said.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                if *said != now && now.1 > 0 {
                    *said = now;
                    write(&format!("{line}\n"));
                }
            }
        }
    }

    /// Leaves the line free for what comes next.
    pub(super) fn end(&self) {
        match self.0 {
            Kind::Terminal => write("\r\x1b[K"),
            Kind::Silent | Kind::Lines(_) => {}
        }
    }
}

/// Progress that cannot be shown is not worth failing for.
fn write(text: &str) {
    let mut stderr = stderr();
    let _ = stderr.write_all(text.as_bytes());
    let _ = stderr.flush();
}
