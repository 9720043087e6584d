//! Policies, scorers and filters in Python.
//!
//! Each call takes the interpreter lock inside of the scheduler step: much slower than the policies of the library, and
//! all requests of the pool wait meanwhile. An exception goes to `sys.unraisablehook`, and counts as no choice, as an
//! invalid cost or as a refusal.

use pointsman::RankTraits;
use pointsman::policy::{Candidate, Needs, RankFilter, RankPolicy, RankScorer, RankTable, RequestFacts};
use pointsman::protocol::WorkerRank;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use pythonize::pythonize;

/// A callable of the embedder.
pub(crate) struct Callable(pub(crate) Py<PyAny>);

impl Callable {
    /// Calls it, and reports an exception. `None` after an exception, and at exit of the interpreter.
    fn call<T>(&self, call: impl FnOnce(Python<'_>, &Bound<'_, PyAny>) -> PyResult<T>) -> Option<T> {
        Python::try_attach(|py| {
            let callable = self.0.bind(py);
            call(py, callable).map_err(|error| error.write_unraisable(py, Some(callable))).ok()
        })
        .flatten()
    }
}

/// A policy `choose(request, candidates)`, which returns the index of a candidate or `None`.
pub(crate) struct PythonPolicy {
    choose: Callable,
    needs: Needs,
}

impl PythonPolicy {
    pub(crate) fn new(policy: &Bound<'_, PyAny>) -> PyResult<Self> {
        let needs = match policy.getattr_opt("needs")? {
            None => Needs::All,
            Some(needs) => match needs.extract::<&str>()? {
                "board" => Needs::Board,
                "two" => Needs::Two,
                "all" => Needs::All,
                other => {
                    return Err(PyValueError::new_err(format!("needs is {other:?}, must be board, two or all")));
                }
            },
        };
        Ok(Self { choose: Callable(policy.clone().unbind()), needs })
    }
}

impl RankPolicy for PythonPolicy {
    fn needs(&self) -> Needs {
        self.needs
    }

    fn choose(&self, request: &RequestFacts<'_>, ranks: &dyn RankTable) -> Option<usize> {
        self.choose.call(|py, choose| {
            let candidates = PyList::empty(py);
            for index in 0..ranks.len() {
                candidates.append(pythonize(py, &ranks.candidate(index))?)?;
            }
            choose.call1((facts(py, request)?, candidates))?.extract::<Option<usize>>()
        })?
    }
}

/// A scorer `cost(request, candidate)`, which returns a number.
pub(crate) struct PythonScorer(pub(crate) Callable);

impl RankScorer for PythonScorer {
    fn cost(&self, request: &RequestFacts<'_>, rank: &Candidate) -> f64 {
        let cost = self.0.call(|py, cost| cost.call1((facts(py, request)?, pythonize(py, rank)?))?.extract());
        cost.unwrap_or(f64::NAN)
    }
}

/// A filter `accepts(request, rank, traits)`, which returns a boolean.
pub(crate) struct PythonFilter(pub(crate) Callable);

impl RankFilter for PythonFilter {
    fn accepts(&self, request: &RequestFacts<'_>, rank: WorkerRank, traits: &RankTraits) -> bool {
        let accepted = self.0.call(|py, accepts| {
            let listed = PyDict::new(py);
            listed.set_item("taints", &traits.taints)?;
            listed.set_item("lora_adapters", &traits.lora_adapters)?;
            listed.set_item("max_num_batched_tokens", traits.max_num_batched_tokens)?;
            listed.set_item("total_kv_blocks", traits.total_kv_blocks)?;
            accepts.call1((facts(py, request)?, (rank.worker.0, rank.rank), listed))?.is_truthy()
        });
        accepted.unwrap_or(false)
    }
}

fn facts<'py>(py: Python<'py>, request: &RequestFacts<'_>) -> PyResult<Bound<'py, PyDict>> {
    let facts = PyDict::new(py);
    facts.set_item("request", request.request)?;
    facts.set_item("prompt_tokens", request.prompt_tokens)?;
    facts.set_item("block_size", request.block_size)?;
    facts.set_item("expected_output_tokens", request.expected_output_tokens)?;
    facts.set_item("lora_name", request.lora_name)?;
    facts.set_item("session_id", request.session_id)?;
    Ok(facts)
}
