//! The log on stderr and the access log.
//!
//! Parses `log_level`, and queues lines between callers and one writer thread per log. Logging never waits for a reader:
//! lines beyond the queue are dropped and counted.
//!
//! Not `tracing_appender::non_blocking` (0.2.5): at shutdown with a full queue its guard writes to stdout with `println!`.
//! With a reader of stdout that had stalled the process did not end within 25 s; here it ends after one second per log.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use metrics::Counter;
use parking_lot::{Condvar, Mutex, MutexGuard};
use tracing_subscriber::Layer as _;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use super::access::ACCESS_TARGET;
use super::page::LOG_LINES_DROPPED;
use crate::settings::{AccessLog, LogFormat};

/// Queue length of one log.
const LINES_MAX: u64 = 4096;

/// Limit of the wait for queued lines at shutdown.
const FLUSH_WAIT: Duration = Duration::from_secs(1);

/// A file to append to, unreadable for other users: an access log names tenants, models and workers.
fn appended(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    options.append(true).create(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt as _;
        options.mode(0o640);
    }
    options.open(path)
}

/// Starts the log and the access log; a process with a subscriber keeps it.
///
/// # Errors
/// The file of the access log cannot be opened.
pub(crate) fn start_log(level: Targets, format: LogFormat, access: &AccessLog) -> io::Result<Logs> {
    let log = Log::to(io::stderr());
    let layer = tracing_subscriber::fmt::layer().with_writer(Arc::clone(&log)).log_internal_errors(false);
    // Spans come from the actor library and mean nothing to operators.
    let layer = match format {
        LogFormat::Text => layer.with_ansi(false).boxed(),
        LogFormat::Json => layer.json().flatten_event(true).with_current_span(false).with_span_list(false).boxed(),
    };
    let layer = layer.with_filter(quiet(level).with_target(ACCESS_TARGET, LevelFilter::OFF));
    let access = match access {
        AccessLog::Off => None,
        AccessLog::Stdout => Some(Log::to(io::stdout())),
        AccessLog::Stderr => Some(Log::to(io::stderr())),
        AccessLog::File(path) => Some(Log::to(appended(path)?)),
    };
    let access_layer = access.clone().map(|writer| {
        let layer = tracing_subscriber::fmt::layer().with_writer(writer).log_internal_errors(false);
        let layer = layer.json().flatten_event(true).with_current_span(false).with_span_list(false);
        let layer = layer.with_level(false).with_target(false);
        layer.with_filter(Targets::new().with_target(ACCESS_TARGET, LevelFilter::INFO))
    });
    // An earlier subscriber stays.
    drop(tracing_subscriber::registry().with(layer).with(access_layer).try_init());
    Ok(Logs { log, access })
}

/// Level of targets not named in `log_level`: below warn, the ZMTP library names connections by random bytes, and the
/// KV event reader logs the same with the rank.
fn quiet(level: Targets) -> Targets {
    const ZMTP: &str = "zeromq";
    let is_named = level.iter().any(|(target, _)| target.starts_with(ZMTP));
    let is_loud = level.default_level().is_some_and(|default| default == LevelFilter::INFO);
    if is_loud && !is_named { level.with_target(ZMTP, LevelFilter::WARN) } else { level }
}

/// The running logs.
pub(crate) struct Logs {
    log: Arc<Log>,
    access: Option<Arc<Log>>,
}

impl Logs {
    /// Waits at most one second per log until all lines so far are written. Blocking; not for async threads.
    pub(crate) fn flush(&self) {
        for log in self.access.iter().chain([&self.log]) {
            // Lines that could not be written in time have no reader.
            let _ = log.flush();
        }
    }
}

/// Writes startup problems to stderr, one per line, independent of log level and log state. A closed stderr does not
/// panic.
pub(crate) fn write_problems(format: LogFormat, problems: &str) {
    match format {
        LogFormat::Text => drop(writeln!(io::stderr(), "{}", problems.trim_end())),
        LogFormat::Json => {
            let layer = tracing_subscriber::fmt::layer().with_writer(io::stderr).log_internal_errors(false);
            let layer = layer.json().flatten_event(true).with_current_span(false).with_span_list(false);
            let subscriber = tracing_subscriber::registry().with(layer);
            tracing::subscriber::with_default(subscriber, || {
                problems.lines().for_each(|problem| tracing::error!("{problem}"));
            });
        }
    }
}

/// A running log, to which lines are written without waiting.
struct Log {
    shared: Arc<Shared>,
    dropped: Counter,
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    /// Notified after a line into an empty queue.
    added: Condvar,
    /// Notified after a write.
    written: Condvar,
}

/// Lines that are not written yet. The writer takes all of them at once.
#[derive(Default)]
struct Queue {
    text: Vec<u8>,
    /// Lines since the start.
    added: u64,
    written: u64,
}

impl Log {
    /// Starts a log that writes to `sink` on a thread of its own.
    fn to(sink: impl Write + Send + 'static) -> Arc<Self> {
        let (shared, dropped) = (Arc::<Shared>::default(), metrics::counter!(LOG_LINES_DROPPED.name));
        // Without the thread every line beyond the queue is dropped and counted.
        let (lines, lost) = (Arc::clone(&shared), dropped.clone());
        drop(std::thread::Builder::new().name("log".to_owned()).spawn(move || write(&lines, sink, &lost)));
        Arc::new(Self { shared, dropped })
    }

    /// Waits at most one second until all lines so far are written, and returns whether they are. Blocking; not for async
    /// threads.
    fn flush(&self) -> bool {
        let mut queue = self.shared.queue.lock();
        let added = queue.added;
        let is_late = |queue: &mut Queue| queue.written < added;
        !self.shared.written.wait_while_for(&mut queue, is_late, FLUSH_WAIT).timed_out()
    }
}

/// Writes the lines. A gateway without a reader of its log continues to serve.
fn write(shared: &Shared, mut sink: impl Write, lost: &Counter) {
    let mut text = Vec::new();
    let mut queue = shared.queue.lock();
    loop {
        shared.added.wait_while(&mut queue, |queue| queue.text.is_empty());
        std::mem::swap(&mut text, &mut queue.text);
        let added = queue.added;
        let lines = added - queue.written;
        MutexGuard::unlocked(&mut queue, || {
            if sink.write_all(&text).is_err() {
                lost.increment(lines);
            }
            text.clear();
        });
        queue.written = added;
        shared.written.notify_all();
    }
}

/// The formatter writes one line per call.
impl Write for &Log {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut queue = self.shared.queue.lock();
        if queue.added - queue.written >= LINES_MAX {
            self.dropped.increment(1);
            return Ok(line.len());
        }
        let is_first = queue.text.is_empty();
        queue.text.extend_from_slice(line);
        queue.added += 1;
        drop(queue);
        if is_first {
            self.shared.added.notify_one();
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);

    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_blocked_reader_does_not_block_writers() {
        let sink = Sink::default();
        let held = sink.0.lock(); // writers wait here
        let log = Log::to(sink.clone());
        for _ in 0..3 * LINES_MAX {
            (&*log).write_all(b"line\n").unwrap();
        }
        drop(held);
        // Queued lines are written once the reader is back, and no others.
        while !log.flush() {}
        assert_eq!(sink.0.lock().len() as u64 / 5, LINES_MAX);
    }
}
