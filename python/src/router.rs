//! The running router.

use std::sync::Arc;
use std::time::Duration;

use pointsman::error::{Down, RouteError};
use pointsman::protocol::{RouterEvent, WorkerId};
use pointsman::{Health, PotentialLoad, RankReport, Router, RouterConfig};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use pythonize::pythonize;
use serde::Serialize;

use crate::bridge;
use crate::discovery::{self, Source};
use crate::errors::Failure;
use crate::extensions::{Callable, PythonFilter, PythonPolicy, PythonScorer};
use crate::inputs::{booking_id, from_dict, rank, request, worker_config, workers};
use crate::logs;
use crate::placement::Placement;
use crate::process::{Owned, Process};
use crate::startup::Expected;

/// Workers of the embedder, with their ids if given.
type GivenWorkers<'py> = Vec<(Option<Bound<'py, PyAny>>, Bound<'py, PyAny>)>;

/// Starts a router: a [`NativeRouter`], or a pending one. It does not wait for workers.
#[pyfunction]
#[pyo3(signature = (config, given_workers, sources, policy, scorers, filters))]
pub(crate) fn start(
    py: Python<'_>,
    config: &Bound<'_, PyDict>,
    given_workers: GivenWorkers<'_>,
    sources: Vec<Bound<'_, PyAny>>,
    policy: Option<&Bound<'_, PyAny>>,
    scorers: Vec<Py<PyAny>>,
    filters: Vec<Py<PyAny>>,
) -> PyResult<Py<PyAny>> {
    let refused = |error: PyErr| {
        let message = error.value(py).to_string();
        Failure::new("ConfigError", "config", message.as_str()).with_problems(vec![message]).raise(py)
    };
    let mut config: RouterConfig = from_dict(config, "config").map_err(refused)?;
    let workers = workers(&given_workers)?;
    let sources = sources.iter().map(|source| from_dict(source, "discovery")).collect::<PyResult<Vec<Source>>>()?;
    let expected = Expected {
        workers: std::mem::take(&mut config.min_initial_workers),
        sources: sources.iter().map(Source::described).collect(),
    };
    let policy = policy.map(PythonPolicy::new).transpose()?;
    let is_detached = policy.is_some() || !scorers.is_empty() || !filters.is_empty();
    let process = Process::start(py)?;
    logs::follow_level(py)?;
    let owner = Arc::clone(&process);
    let mut builder = Router::builder(config.clone());
    {
        let _runtime = process.enter();
        for source in sources {
            builder = source
                .add(builder, &config)
                .map_err(|error| Failure::new("StartError", "discovery", error.to_string()).raise(py))?;
        }
    }
    for (worker, config) in workers {
        builder = builder.worker(worker, config);
    }
    if let Some(policy) = policy {
        builder = builder.policy(Arc::new(policy));
    }
    for scorer in scorers {
        builder = builder.scorer(Arc::new(PythonScorer(Callable(scorer))));
    }
    for filter in filters {
        builder = builder.filter(Arc::new(PythonFilter(Callable(filter))));
    }
    bridge::run(py, &process, is_detached, builder.start(), move |py, started| {
        let router = started.map_err(|error| Failure::from(error).raise(py))?;
        let router = NativeRouter { router: Owned::new(router, &owner), process: owner, expected, is_detached };
        Ok(Py::new(py, router)?.into_any())
    })
}

/// A running router. Calls that may wait return their value, or a [`bridge::Pending`].
#[pyclass(frozen, module = "pointsman._native")]
pub(crate) struct NativeRouter {
    router: Owned<Router>,
    process: Arc<Process>,
    expected: Expected,
    /// Whether calls release the interpreter lock, because the router calls Python.
    is_detached: bool,
}

impl NativeRouter {
    fn run<T: Send + 'static>(
        &self,
        py: Python<'_>,
        future: impl Future<Output = T> + Send + 'static,
        finish: impl FnOnce(Python<'_>, T) -> PyResult<Py<PyAny>> + Send + 'static,
    ) -> PyResult<Py<PyAny>> {
        self.process.check(py)?;
        bridge::run(py, &self.process, self.is_detached, future, finish)
    }

    /// Runs a call whose result is `None` or an error.
    fn run_unit<E: Into<Failure> + Send + 'static>(
        &self,
        py: Python<'_>,
        future: impl Future<Output = Result<(), E>> + Send + 'static,
    ) -> PyResult<Py<PyAny>> {
        self.run(py, future, |py, result| match result {
            Ok(()) => Ok(py.None()),
            Err(error) => Err(error.into().raise(py)),
        })
    }

    /// Runs a call whose result becomes dictionaries.
    fn run_dict<T: Serialize + Send + 'static>(
        &self,
        py: Python<'_>,
        future: impl Future<Output = Result<T, RouteError>> + Send + 'static,
    ) -> PyResult<Py<PyAny>> {
        self.run(py, future, |py, result| match result {
            Ok(value) => Ok(pythonize(py, &value)?.unbind()),
            Err(error) => Err(Failure::from(error).raise(py)),
        })
    }

    /// Reads published state.
    fn read<R: Send>(&self, py: Python<'_>, read: impl FnOnce(&Router) -> R + Send) -> PyResult<R> {
        self.process.check(py)?;
        let call = || {
            let _runtime = self.process.enter();
            read(&self.router)
        };
        Ok(if self.is_detached { py.detach(call) } else { call() })
    }
}

#[pymethods]
impl NativeRouter {
    #[getter]
    fn block_size(&self) -> u32 {
        self.router.block_size()
    }

    /// Waits for `min_initial_workers`, at most `timeout` seconds.
    fn wait_for_workers(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Py<PyAny>> {
        let timeout = timeout.map(|timeout| seconds("timeout", timeout)).transpose()?;
        let (router, expected) = (self.router.clone(), self.expected.clone());
        self.run_unit(py, async move { expected.registered(&router, timeout).await })
    }

    fn route(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        request_id: Option<String>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Py<PyAny>> {
        let request = request(&self.router, Some(booking_id(request_id)), tokens, options)?;
        let (router, process, is_detached) = (self.router.clone(), Arc::clone(&self.process), self.is_detached);
        let placed = async move {
            let placed = router.route(request).await.map_err(|error| Failure::of_request(error, &router));
            placed.map(|placement| Owned::new(placement, &process))
        };
        self.run(py, placed, move |py, placed| {
            let placed = placed.map_err(|failure| failure.raise(py))?;
            Ok(Py::new(py, Placement::new(placed, is_detached))?.into_any())
        })
    }

    fn find_best_match(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Py<PyAny>> {
        let (router, request) = (self.router.clone(), request(&self.router, None, tokens, options)?);
        self.run_dict(py, async move { router.find_best_match(request).await })
    }

    fn explain(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Py<PyAny>> {
        let (router, request) = (self.router.clone(), request(&self.router, None, tokens, options)?);
        self.run_dict(py, async move { router.explain(request).await })
    }

    fn overlap_scores(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Py<PyAny>> {
        let (router, request) = (self.router.clone(), request(&self.router, None, tokens, options)?);
        self.run_dict(py, async move { router.overlap_scores(request, false).await })
    }

    fn potential_loads(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Py<PyAny>> {
        let (router, request) = (self.router.clone(), request(&self.router, None, tokens, options)?);
        self.run(py, async move { router.potential_loads(request).await }, |py, loads| {
            let loads = loads.map_err(|error| Failure::from(error).raise(py))?;
            let rows = loads.iter().map(|load| load_row(py, load)).collect::<PyResult<Vec<_>>>()?;
            Ok(PyList::new(py, rows)?.into_any().unbind())
        })
    }

    fn apply_events(&self, py: Python<'_>, events: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        let events: Vec<RouterEvent> = from_dict(events, "events")?;
        let router = self.router.clone();
        self.run_unit(py, async move { router.apply_events(events).await })
    }

    fn flush(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let router = self.router.clone();
        self.run_unit(py, async move { router.flush().await })
    }

    fn record_routing_decision(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        rank_of_prompt: &Bound<'_, PyAny>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Py<PyAny>> {
        let (router, rank) = (self.router.clone(), rank(rank_of_prompt)?);
        let request = request(&self.router, None, tokens, options)?;
        self.run_unit(py, async move { router.record_routing_decision(request, rank).await })
    }

    fn upsert_worker(&self, py: Python<'_>, worker: u64, config: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        let (router, config) = (self.router.clone(), worker_config(config)?);
        self.run_unit(py, async move { router.upsert_worker(WorkerId(worker), config).await })
    }

    fn remove_worker(&self, py: Python<'_>, worker: u64) -> PyResult<Py<PyAny>> {
        let router = self.router.clone();
        self.run_unit(py, async move { router.remove_worker(WorkerId(worker)).await })
    }

    fn drain_worker(&self, py: Python<'_>, worker: u64, deadline: f64) -> PyResult<Py<PyAny>> {
        let (router, deadline) = (self.router.clone(), seconds("deadline", deadline)?);
        self.run(py, async move { router.drain_worker(WorkerId(worker), deadline).await }, |py, ended| {
            let ended = ended.map_err(|error| Failure::from(error).raise(py))?;
            Ok(ended.into_pyobject(py)?.into_any().unbind())
        })
    }

    fn cordon_worker(&self, py: Python<'_>, worker: u64, is_cordoned: bool) -> PyResult<Py<PyAny>> {
        let router = self.router.clone();
        self.run_unit(py, async move {
            match is_cordoned {
                true => router.cordon_worker(WorkerId(worker)).await,
                false => router.uncordon_worker(WorkerId(worker)).await,
            }
        })
    }

    fn shutdown(&self, py: Python<'_>, deadline: f64) -> PyResult<Py<PyAny>> {
        let (router, deadline) = (self.router.clone(), seconds("deadline", deadline)?);
        self.run(py, async move { router.shutdown(deadline).await }, |py, left| {
            Ok(left.into_pyobject(py)?.into_any().unbind())
        })
    }

    /// Frees a booking by the id of its request.
    fn free(&self, py: Python<'_>, request_id: &str) -> PyResult<()> {
        self.read(py, |router| router.free(request_id))?.map_err(|error| Failure::from(error).raise(py))
    }

    fn eligible_ranks(&self, py: Python<'_>) -> PyResult<usize> {
        self.read(py, Router::eligible_ranks)
    }

    fn health(&self, py: Python<'_>) -> PyResult<Py<PyDict>> {
        let read = |router: &Router| (router.health(), discovery::problems(router));
        let (Health { state, ranks, cold, problems, hung, restarts, leases }, missing) = self.read(py, read)?;
        let health = PyDict::new(py);
        health.set_item(
            "state",
            match state {
                Ok(()) => "serving",
                Err(Down::Failed) => "failed",
                Err(Down::Stopped) => "stopped",
            },
        )?;
        health.set_item("ranks", ranks)?;
        let cold: Vec<(u64, u32)> = cold.iter().map(|rank| (rank.worker.0, rank.rank)).collect();
        health.set_item("cold", cold)?;
        health.set_item("problems", [missing, problems].concat())?;
        health.set_item("hung", hung.iter().map(ToString::to_string).collect::<Vec<_>>())?;
        health.set_item("restarts", restarts)?;
        health.set_item("leases", leases)?;
        Ok(health.unbind())
    }

    fn rank_reports(&self, py: Python<'_>) -> PyResult<Vec<Py<PyDict>>> {
        self.read(py, Router::rank_reports)?.iter().map(|report| report_row(py, report)).collect()
    }

    /// Workers with their ranks, by id.
    fn workers(&self, py: Python<'_>) -> PyResult<Py<PyDict>> {
        let workers = self.read(py, Router::workers)?;
        let by_id = PyDict::new(py);
        for worker in workers.iter() {
            let ranks: Vec<(u64, u32)> = worker.ranks.iter().map(|rank| (rank.worker.0, rank.rank)).collect();
            by_id.set_item(worker.worker.0, ranks)?;
        }
        Ok(by_id.unbind())
    }
}

fn seconds(name: &str, given: f64) -> PyResult<Duration> {
    let refused = |_| PyValueError::new_err(format!("{name} is {given}, must be a number of seconds of at least 0"));
    Duration::try_from_secs_f64(given).map_err(refused)
}

fn load_row(py: Python<'_>, load: &PotentialLoad) -> PyResult<Py<PyDict>> {
    let row = PyDict::new(py);
    row.set_item("rank", (load.rank.worker.0, load.rank.rank))?;
    row.set_item("potential_prefill_tokens", load.potential_prefill_tokens)?;
    row.set_item("potential_decode_blocks", load.potential_decode_blocks)?;
    row.set_item("active_requests", load.active_requests)?;
    Ok(row.unbind())
}

fn report_row(py: Python<'_>, report: &RankReport) -> PyResult<Py<PyDict>> {
    let row = PyDict::new(py);
    row.set_item("rank", (report.rank.worker.0, report.rank.rank))?;
    row.set_item("active_requests", report.active_requests)?;
    row.set_item("active_blocks", report.active_blocks)?;
    row.set_item("prefill_tokens", report.prefill_tokens)?;
    row.set_item("prefill_wait_seconds", report.prefill_wait.as_secs_f64())?;
    row.set_item("held_blocks", report.held_blocks)?;
    row.set_item("placements", report.placements)?;
    row.set_item("prompt_tokens", report.prompt_tokens)?;
    row.set_item("predicted_tokens", report.predicted_tokens)?;
    row.set_item("delivered_tokens", report.delivered_tokens)?;
    Ok(row.unbind())
}
