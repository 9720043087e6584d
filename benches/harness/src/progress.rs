//! Progress of long commands on standard error: a bar on a terminal, elsewhere a line every half minute.

use std::io::{self, Write};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use crate::measure::Stopwatch;

/// Interval of lines where standard error is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(30);

/// Counts parts of a run.
pub(crate) struct Progress {
    bar: ProgressBar,
    parts: &'static str,
    since_line: Mutex<Stopwatch>,
}

impl Progress {
    /// Progress of `total` parts, such as `requests`.
    pub(crate) fn new(total: usize, parts: &'static str) -> Self {
        let style = ProgressStyle::with_template(&format!("{{bar:40}} {{pos}}/{{len}} {parts} {{msg}} {{eta}} left"));
        let bar = ProgressBar::new(total as u64).with_style(style.expect("a valid template"));
        Self { bar, parts, since_line: Mutex::new(Stopwatch::start()) }
    }

    /// Names the present part of the run.
    pub(crate) fn name(&self, name: &str) {
        self.bar.set_message(name.to_owned());
    }

    /// Counts parts that are done.
    pub(crate) fn add(&self, done: usize) {
        self.bar.inc(done as u64);
        if !self.bar.is_hidden() {
            return;
        }
        let mut since_line = self.since_line.lock().unwrap_or_else(PoisonError::into_inner);
        if since_line.elapsed() >= LINE_EVERY {
            *since_line = Stopwatch::start();
            let line = self.line();
            drop(since_line);
            // Progress that cannot be written is no error of the run.
            let _ = writeln!(io::stderr(), "{line}");
        }
    }

    /// Removes the bar.
    pub(crate) fn end(&self) {
        self.bar.finish_and_clear();
    }

    fn line(&self) -> String {
        let (done, total) = (self.bar.position(), self.bar.length().unwrap_or_default());
        format!("progress: {done} of {total} {} {}", self.parts, self.bar.message()).trim_end().to_owned()
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.end();
    }
}
