//! A placement: the booking of one request.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use pointsman::error::RequestError;
use pointsman::{Decision, Outcome};
use pyo3::exceptions::{PyStopIteration, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use pythonize::pythonize;

use crate::errors::Failure;
use crate::process::{Owned, Process};

/// A booked request. The booking ends with `free()`, with the end of a `with` or `async with` block, or when the object is
/// collected, whichever is first. The facts stay readable afterwards.
#[pyclass(frozen, module = "pointsman")]
pub(crate) struct Placement {
    booking: Mutex<Option<Arc<Owned<pointsman::Placement>>>>,
    process: Arc<Process>,
    is_detached: bool,
    decision: Decision,
    endpoint: String,
    request_id: String,
    rank_at_worker: Option<u32>,
}

impl Placement {
    /// `is_detached`: whether calls release the interpreter lock, because the router calls Python.
    pub(crate) fn new(placement: Owned<pointsman::Placement>, is_detached: bool) -> Self {
        Self {
            process: Arc::clone(placement.process()),
            is_detached,
            decision: (**placement).clone(),
            endpoint: placement.endpoint().to_owned(),
            request_id: placement.request_id().to_owned(),
            rank_at_worker: placement.rank_at_worker(),
            booking: Mutex::new(Some(Arc::new(placement))),
        }
    }

    /// Calls the library with the booking; `None` after its end.
    pub(crate) fn report<R: Send>(
        &self,
        py: Python<'_>,
        report: impl FnOnce(&pointsman::Placement) -> R + Send,
    ) -> PyResult<Option<R>> {
        self.process.check(py)?;
        // Not called under the lock: a thread with the interpreter lock may wait for it.
        let booking = self.booking.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let call = || {
            let _runtime = self.process.enter();
            booking.map(|booking| report(&booking))
        };
        Ok(if self.is_detached { py.detach(call) } else { call() })
    }
}

/// Collection of the object frees the booking, without the interpreter lock if the router calls Python.
impl Drop for Placement {
    fn drop(&mut self) {
        let booking = self.booking.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if booking.is_some() && self.is_detached {
            Python::attach(|py| py.detach(|| drop(booking)));
        }
    }
}

#[pymethods]
impl Placement {
    /// Endpoint of the worker, from its configuration.
    #[getter]
    fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// The rank, as `(worker, rank)`.
    #[getter]
    fn rank(&self) -> (u64, u32) {
        let rank = self.decision.rank();
        (rank.worker.0, rank.rank)
    }

    /// Id of the worker.
    #[getter]
    fn worker(&self) -> u64 {
        self.decision.rank().worker.0
    }

    /// Number of the rank at its engine, for `X-data-parallel-rank`; `None` for a worker with a single rank.
    #[getter]
    fn rank_at_worker(&self) -> Option<u32> {
        self.rank_at_worker
    }

    /// Prompt tokens that the prefill is expected to skip.
    #[getter]
    fn cached_tokens(&self) -> u32 {
        self.decision.cached_tokens()
    }

    /// Number of the decision.
    #[getter]
    fn decision(&self) -> u64 {
        self.decision.number()
    }

    /// Id of the booking.
    #[getter]
    fn request_id(&self) -> &str {
        &self.request_id
    }

    /// Predicted time to first token in seconds, if the policy predicts it.
    #[getter]
    fn predicted_ttft_seconds(&self) -> Option<f64> {
        self.decision.predicted_ttft().as_ref().map(Duration::as_secs_f64)
    }

    /// Whether the booking has ended.
    #[getter]
    fn is_freed(&self) -> bool {
        self.booking.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    /// All facts of the decision.
    fn facts(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        Ok(pythonize(py, &self.decision)?.unbind())
    }

    /// Reports the first token. Repeated calls have no effect.
    fn prefill_completed(&self, py: Python<'_>) -> PyResult<()> {
        self.report(py, pointsman::Placement::prefill_completed).map(drop)
    }

    /// Reports one more output block; `decay` is the remaining share of the output, in [0, 1].
    #[pyo3(signature = (decay=None))]
    fn output_block(&self, py: Python<'_>, decay: Option<f64>) -> PyResult<()> {
        let reported = self.report(py, |placement| placement.output_block(decay))?;
        reported.unwrap_or(Ok(())).map_err(|error: RequestError| Failure::from(error).raise(py))
    }

    /// Reports the prompt tokens that the engine found in its cache.
    fn delivered_cached_tokens(&self, py: Python<'_>, tokens: u32) -> PyResult<()> {
        self.report(py, |placement| placement.delivered_cached_tokens(tokens)).map(drop)
    }

    /// Reports the outcome of the request for the health of the rank. Only the first report counts.
    #[pyo3(signature = (outcome, *, retry_after=None))]
    fn outcome(&self, py: Python<'_>, outcome: &str, retry_after: Option<f64>) -> PyResult<()> {
        let outcome = outcome_of(outcome, retry_after)?;
        self.report(py, |placement| placement.outcome(outcome)).map(drop)
    }

    /// Ends the booking. Repeated calls have no effect.
    pub(crate) fn free(&self, py: Python<'_>) -> PyResult<()> {
        self.process.check(py)?;
        let booking = self.booking.lock().unwrap_or_else(PoisonError::into_inner).take();
        if self.is_detached {
            py.detach(|| drop(booking))
        } else {
            drop(booking)
        }
        Ok(())
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.free(py)
    }

    fn __aenter__(this: Py<Self>) -> Ready {
        Ready(Mutex::new(Some(this.into_any())))
    }

    #[pyo3(signature = (*_exception))]
    fn __aexit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) -> PyResult<Ready> {
        self.free(py)?;
        Ok(Ready(Mutex::new(None)))
    }

    fn __repr__(&self) -> String {
        let (worker, rank) = self.rank();
        let state = if self.is_freed() { ", freed" } else { "" };
        format!(
            "<Placement {:?} at {:?}, rank ({worker}, {rank}), {} cached tokens{state}>",
            self.request_id,
            self.endpoint,
            self.cached_tokens()
        )
    }
}

/// An awaitable that is ready.
#[pyclass(frozen)]
struct Ready(Mutex<Option<Py<PyAny>>>);

#[pymethods]
impl Ready {
    fn __await__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __iter__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __next__(&self) -> PyResult<()> {
        Err(PyStopIteration::new_err((self.0.lock().unwrap_or_else(PoisonError::into_inner).take(),)))
    }
}

/// An outcome by its name.
pub(crate) fn outcome_of(name: &str, retry_after: Option<f64>) -> PyResult<Outcome> {
    let retry_after = retry_after.map(Duration::try_from_secs_f64).transpose();
    let retry_after = retry_after.map_err(|error| PyValueError::new_err(format!("retry_after: {error}")))?;
    Ok(match name {
        "ok" => Outcome::Ok,
        "connect_failed" => Outcome::ConnectFailed,
        "timeout" => Outcome::Timeout,
        "server_error" => Outcome::ServerError,
        "reset" => Outcome::Reset,
        "refused" => Outcome::Refused { retry_after },
        "misconfigured" => Outcome::Misconfigured,
        "invalid_answer" => Outcome::InvalidAnswer,
        other => {
            let names = "ok, connect_failed, timeout, server_error, reset, refused, misconfigured, invalid_answer";
            return Err(PyValueError::new_err(format!("outcome is {other:?}, must be one of {names}")));
        }
    })
}
