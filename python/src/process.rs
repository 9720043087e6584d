//! Tokio runtime of the process, its end, and the check for forks.
//!
//! The runtime starts with the first router and stops when the interpreter exits. A forked child has none of its threads,
//! and locks of the parent may be held forever there: in a child every call is an error, and nothing is dropped.

use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;
use tokio::runtime::{Builder, EnterGuard, Handle, Runtime};

use crate::deliveries::Deliveries;
use crate::errors::Failure;
use crate::logs;
use crate::metrics;

/// Threads of the runtime. Requests are mostly placed on the thread that calls; these serve waiting requests, event
/// streams and timers.
const THREADS: usize = 2;

/// Maximum wait for these threads at exit.
const EXIT_WAIT: Duration = Duration::from_secs(2);

/// The runtime and its delivery thread, until exit.
static RUNNING: Mutex<Option<Running>> = Mutex::new(None);

struct Running {
    runtime: Runtime,
    process: Arc<Process>,
}

/// Access to the runtime of this process.
pub(crate) struct Process {
    handle: Handle,
    pid: u32,
    pub(crate) deliveries: Deliveries,
}

impl Process {
    /// The process, whose runtime starts now if none runs.
    pub(crate) fn start(py: Python<'_>) -> PyResult<Arc<Self>> {
        let mut running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(running) = &*running {
            running.process.check(py)?;
            return Ok(Arc::clone(&running.process));
        }
        let failed = |error: std::io::Error| Failure::new("StartError", "runtime", error.to_string()).raise(py);
        let runtime = Builder::new_multi_thread()
            .worker_threads(THREADS)
            .thread_name("pointsman")
            .enable_all()
            .build()
            .map_err(failed)?;
        let deliveries = Deliveries::start().map_err(failed)?;
        metrics::install(runtime.handle());
        let process = Arc::new(Self { handle: runtime.handle().clone(), pid: std::process::id(), deliveries });
        *running = Some(Running { runtime, process: Arc::clone(&process) });
        Ok(process)
    }

    /// An error in a forked child.
    pub(crate) fn check(&self, py: Python<'_>) -> PyResult<()> {
        let pid = std::process::id();
        if pid == self.pid {
            return Ok(());
        }
        let message = format!(
            "process {pid} was forked from process {}, whose router it cannot use: fork before the first router starts, or \
             use the start method \"spawn\"",
            self.pid
        );
        Err(Failure::new("ForkError", "forked", message).with_number("parent_pid", self.pid.into()).raise(py))
    }

    /// Enters the runtime, for calls of the library.
    pub(crate) fn enter(&self) -> EnterGuard<'_> {
        self.handle.enter()
    }

    pub(crate) fn handle(&self) -> &Handle {
        &self.handle
    }
}

/// Stops the runtime. Called at exit of the interpreter, while its threads may still attach to it.
#[pyfunction]
pub(crate) fn shut_down(py: Python<'_>) {
    py.detach(|| {
        let Some(Running { runtime, process }) = RUNNING.lock().unwrap_or_else(PoisonError::into_inner).take() else {
            return;
        };
        if process.pid == std::process::id() {
            runtime.shutdown_timeout(EXIT_WAIT);
            process.deliveries.close();
            logs::close();
        } else {
            std::mem::forget(runtime);
        }
    });
}

/// A value that is dropped in its own process only, inside of the runtime.
pub(crate) struct Owned<T> {
    value: ManuallyDrop<T>,
    process: Arc<Process>,
}

impl<T> Owned<T> {
    pub(crate) fn new(value: T, process: &Arc<Process>) -> Self {
        Self { value: ManuallyDrop::new(value), process: Arc::clone(process) }
    }

    pub(crate) fn process(&self) -> &Arc<Process> {
        &self.process
    }
}

impl<T> Deref for Owned<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> Drop for Owned<T> {
    #[expect(unsafe_code, reason = "a value that a forked child must not drop")]
    fn drop(&mut self) {
        if self.process.pid == std::process::id() {
            let _runtime = self.process.handle.enter();
            // SAFETY: dropped once, here, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.value) }
        }
    }
}
