//! Bridge from futures of the router to Python event loops.
//!
//! A future is polled once on the calling thread. An idle router decides there, so most requests never change threads. A
//! future that waits moves to the runtime. Its result returns to the event loop through `call_soon_threadsafe`, which a
//! separate thread calls, so that threads of the runtime never wait for the interpreter lock. A result without a waiting
//! caller is dropped there: for a placement this frees the booking.

use std::io;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::thread::{Builder, JoinHandle};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyTuple;
use tokio::task::AbortHandle;

use crate::process::Process;

/// Conversion of a result into its Python value, on the thread of the event loop.
type Finish = Box<dyn FnOnce(Python<'_>) -> PyResult<Py<PyAny>> + Send>;

/// A call that waits: its `asyncio.Future`, and the task that computes the result.
#[pyclass(frozen, module = "pointsman._native")]
pub(crate) struct Pending {
    future: Py<PyAny>,
    task: AbortHandle,
}

#[pymethods]
impl Pending {
    /// The future of the running event loop.
    #[getter]
    fn future(&self, py: Python<'_>) -> Py<PyAny> {
        self.future.clone_ref(py)
    }

    /// Ends the call. A result that has arrived is freed if it is a placement.
    fn cancel(&self, py: Python<'_>) -> PyResult<()> {
        self.task.abort();
        let future = self.future.bind(py);
        let is_done: bool = future.call_method0("done")?.extract()?;
        let is_cancelled: bool = future.call_method0("cancelled")?.extract()?;
        if is_done
            && !is_cancelled
            && future.call_method0("exception")?.is_none()
            && let Ok(placement) = future.call_method0("result")?.cast::<crate::placement::Placement>()
        {
            placement.get().free(py)?;
        }
        Ok(())
    }
}

/// Runs a future of the router: its value if it is ready at once, else a [`Pending`]. With `is_detached` the interpreter
/// lock is released meanwhile, for routers that call Python themselves.
pub(crate) fn run<T: Send + 'static>(
    py: Python<'_>,
    process: &Arc<Process>,
    is_detached: bool,
    future: impl Future<Output = T> + Send + 'static,
    finish: impl FnOnce(Python<'_>, T) -> PyResult<Py<PyAny>> + Send + 'static,
) -> PyResult<Py<PyAny>> {
    let mut future = Box::pin(future);
    let mut poll = || {
        let _runtime = process.enter();
        future.as_mut().poll(&mut Context::from_waker(Waker::noop()))
    };
    // The waker of this poll is never needed: a task polls the future again.
    let polled = if is_detached { py.detach(poll) } else { poll() };
    match polled {
        Poll::Ready(value) => finish(py, value),
        Poll::Pending => {
            let (event_loop, future_of_loop) = new_future(py)?;
            let delivery = Delivery { event_loop, future: future_of_loop.clone_ref(py), finish: None };
            let deliveries = process.deliveries.sender.clone();
            let task = process.handle().spawn(async move {
                let value = future.await;
                let finish: Finish = Box::new(move |py| finish(py, value));
                // After the end of the deliveries nothing awaits the result.
                let _ = deliveries.send(Some(Delivery { finish: Some(finish), ..delivery }));
            });
            let pending = Pending { future: future_of_loop, task: task.abort_handle() };
            Ok(Py::new(py, pending)?.into_any())
        }
    }
}

/// The running event loop, and a new future of it.
fn new_future(py: Python<'_>) -> PyResult<(Py<PyAny>, Py<PyAny>)> {
    static RUNNING_LOOP: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let running_loop = RUNNING_LOOP.import(py, "asyncio", "get_running_loop")?;
    let event_loop = running_loop.call0()?;
    let future = event_loop.call_method0("create_future")?;
    Ok((event_loop.unbind(), future.unbind()))
}

/// The result of a call on its way to an event loop.
struct Delivery {
    event_loop: Py<PyAny>,
    future: Py<PyAny>,
    finish: Option<Finish>,
}

/// Sets the result of a future; called by its event loop.
#[pyclass(frozen)]
struct Completion {
    future: Py<PyAny>,
    finish: Mutex<Option<Finish>>,
}

#[pymethods]
impl Completion {
    fn __call__(&self, py: Python<'_>) -> PyResult<()> {
        let future = self.future.bind(py);
        let finish = self.finish.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(finish) = finish.filter(|_| !is_done(future)) else { return Ok(()) };
        match finish(py) {
            Ok(value) => future.call_method1("set_result", (value,))?,
            Err(error) => future.call_method1("set_exception", (error.into_value(py),))?,
        };
        Ok(())
    }
}

fn is_done(future: &Bound<'_, PyAny>) -> bool {
    future.call_method0("done").and_then(|is_done| is_done.extract()).unwrap_or(true)
}

/// The thread that passes results to event loops. `None` ends it.
pub(crate) struct Deliveries {
    sender: Sender<Option<Delivery>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Deliveries {
    pub(crate) fn start() -> io::Result<Self> {
        let (sender, receiver) = channel::<Option<Delivery>>();
        let thread = Builder::new().name("pointsman-deliver".to_owned()).spawn(move || {
            while let Ok(Some(first)) = receiver.recv() {
                // Results that arrived meanwhile share the interpreter lock.
                let attached = Python::try_attach(|py| {
                    deliver(py, first);
                    loop {
                        match receiver.try_recv() {
                            Ok(Some(next)) => deliver(py, next),
                            Ok(None) => break false,
                            Err(_) => break true,
                        }
                    }
                });
                if attached != Some(true) {
                    break;
                }
            }
        })?;
        Ok(Self { sender, thread: Mutex::new(Some(thread)) })
    }

    /// Ends the thread after its present deliveries. Must be called without the interpreter lock, which it may need.
    pub(crate) fn close(&self) {
        let _ = self.sender.send(None); // it has ended already
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(thread.map(JoinHandle::join));
    }
}

/// A closed event loop drops the result.
fn deliver(py: Python<'_>, delivery: Delivery) {
    let Delivery { event_loop, future, finish } = delivery;
    let completion = Completion { future, finish: Mutex::new(finish) };
    let scheduled = Py::new(py, completion).and_then(|completion| {
        let arguments = PyTuple::new(py, [completion])?;
        event_loop.bind(py).call_method1("call_soon_threadsafe", arguments)
    });
    if let Err(error) = scheduled
        && !error.is_instance_of::<PyRuntimeError>(py)
    {
        error.write_unraisable(py, Some(event_loop.bind(py)));
    }
}
