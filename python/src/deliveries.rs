//! Delivery of results to Python event loops.
//!
//! A separate thread calls `call_soon_threadsafe`, so that threads of the runtime never wait for the interpreter lock. A
//! result without a waiting caller is dropped there: for a placement this frees the booking.

use std::io;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

/// Conversion of a result into its Python value, on the thread of the event loop.
pub(crate) type Finish = Box<dyn FnOnce(Python<'_>) -> PyResult<Py<PyAny>> + Send>;

/// The result of a call on its way to an event loop.
pub(crate) struct Delivery {
    pub(crate) event_loop: Py<PyAny>,
    pub(crate) future: Py<PyAny>,
    pub(crate) finish: Option<Finish>,
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

    pub(crate) fn sender(&self) -> Sender<Option<Delivery>> {
        self.sender.clone()
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
