//! Bridge from futures of the router to Python event loops.
//!
//! A future is polled once on the calling thread. An idle router decides there, so most requests never change threads. A
//! future that waits moves to the runtime. Its result returns through [`crate::deliveries`].

use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use tokio::task::AbortHandle;

use crate::deliveries::{Delivery, Finish};
use crate::placement::Placement;
use crate::process::Process;

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
            && let Ok(placement) = future.call_method0("result")?.cast::<Placement>()
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
            let deliveries = process.deliveries.sender();
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
