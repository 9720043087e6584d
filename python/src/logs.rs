//! Bridge from log events of the router to Python's `logging`.
//!
//! Threads that log write to a bounded queue and never wait or take the interpreter lock. A thread of its own passes the
//! events to the logger `pointsman`. Events beyond the queue are counted, and the count is logged.

use std::fmt::{Debug, Write as _};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread::{Builder, JoinHandle};

use pyo3::prelude::*;
use pyo3::types::PyDict;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// Events that wait for the interpreter.
const EVENTS_MAX: usize = 1024;

static LOG: OnceLock<Log> = OnceLock::new();

/// Most verbose level that the logger accepts, as its place in [`LEVELS`].
static LEVEL: AtomicUsize = AtomicUsize::new(0);

/// Levels with their numbers in `logging`. Python has no level below `DEBUG`; 5 is usual.
const LEVELS: [(Level, u8); 5] =
    [(Level::ERROR, 40), (Level::WARN, 30), (Level::INFO, 20), (Level::DEBUG, 10), (Level::TRACE, 5)];

struct Log {
    queue: SyncSender<Option<LogEvent>>,
    dropped: AtomicU64,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// An event on its way to the logger.
#[derive(Default)]
struct LogEvent {
    level: u8,
    message: String,
    fields: Vec<(&'static str, String)>,
    file: Option<&'static str>,
    line: Option<u32>,
}

/// Starts the bridge if it does not run, and takes over the present level of the logger.
pub(crate) fn follow_level(py: Python<'_>) -> PyResult<()> {
    if LOG.get().is_none() {
        let (queue, events) = sync_channel(EVENTS_MAX);
        let thread = Builder::new().name("pointsman-log".to_owned()).spawn(move || pass_on(&events))?;
        let log = Log { queue, dropped: AtomicU64::new(0), thread: Mutex::new(Some(thread)) };
        if LOG.set(log).is_ok() {
            // Nothing else in this library installs a subscriber.
            let _ = tracing::subscriber::set_global_default(Bridge);
        }
    }
    let level: u8 =
        logger_module(py)?.getattr("logger")?.call_method0("getEffectiveLevel")?.extract().unwrap_or(u8::MAX);
    let accepted = LEVELS.iter().filter(|(_, number)| *number >= level).count();
    if LEVEL.swap(accepted, Ordering::Relaxed) != accepted {
        tracing::callsite::rebuild_interest_cache();
    }
    Ok(())
}

/// Passes on the events so far and ends the bridge. Must be called without the interpreter lock.
pub(crate) fn close() {
    let Some(log) = LOG.get() else { return };
    let _ = log.queue.send(None); // it has ended already
    drop(log.thread.lock().unwrap_or_else(PoisonError::into_inner).take().map(JoinHandle::join));
}

fn pass_on(events: &Receiver<Option<LogEvent>>) {
    while let Ok(Some(first)) = events.recv() {
        // Events that arrived meanwhile share the interpreter lock.
        let attached = Python::try_attach(|py| {
            let mut next = Some(first);
            while let Some(event) = next {
                log(py, event);
                match events.try_recv() {
                    Ok(Some(event)) => next = Some(event),
                    Ok(None) => return false,
                    Err(_) => next = None,
                }
            }
            let dropped = LOG.get().map_or(0, |log| log.dropped.swap(0, Ordering::Relaxed));
            if dropped > 0 {
                let message = format!("{dropped} log events were dropped: the queue to logging was full");
                log(py, LogEvent { level: LEVELS[1].1, message, ..LogEvent::default() });
            }
            true
        });
        if attached != Some(true) {
            break;
        }
    }
}

fn logger_module(py: Python<'_>) -> PyResult<Bound<'_, PyModule>> {
    py.import("pointsman._logging")
}

fn log(py: Python<'_>, event: LogEvent) {
    let LogEvent { level, message, fields, file, line } = event;
    let logged = logger_module(py).and_then(|module| {
        let named = PyDict::new(py);
        fields.iter().try_for_each(|(name, value)| named.set_item(name, value))?;
        module.call_method1("log", (level, message, named, file.unwrap_or_default(), line.unwrap_or_default()))
    });
    if let Err(error) = logged {
        error.write_unraisable(py, None);
    }
}

/// The subscriber of the router's events. Spans are disabled.
struct Bridge;

impl Subscriber for Bridge {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        let accepted = &LEVELS[..LEVEL.load(Ordering::Relaxed).min(LEVELS.len())];
        // Events, and hints that ask for events.
        !metadata.is_span()
            && metadata.target().starts_with("pointsman")
            && accepted.iter().any(|(level, _)| level == metadata.level())
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        let accepted = LEVEL.load(Ordering::Relaxed).checked_sub(1).and_then(|last| LEVELS.get(last));
        Some(accepted.map_or(LevelFilter::OFF, |(level, _)| LevelFilter::from_level(*level)))
    }

    fn event(&self, event: &Event<'_>) {
        let Some(log) = LOG.get() else { return };
        let metadata = event.metadata();
        let level = LEVELS.iter().find(|(level, _)| level == metadata.level()).map_or(0, |(_, number)| *number);
        let mut read = LogEvent { level, file: metadata.file(), line: metadata.line(), ..LogEvent::default() };
        event.record(&mut read);
        if log.queue.try_send(Some(read)).is_err() {
            log.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1) // never enabled
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

impl Visit for LogEvent {
    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "message" => value.clone_into(&mut self.message),
            name => self.fields.push((name, value.to_owned())),
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        match field.name() {
            "message" => drop(write!(self.message, "{value:?}")),
            name => self.fields.push((name, format!("{value:?}"))),
        }
    }
}
