//! Arguments of calls: requests, ranks and configurations from Python values.

use std::borrow::Cow;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering};

use pointsman::error::RouteError;
use pointsman::hashing::{HashScheme, HashedPrompt};
use pointsman::protocol::{WorkerConfig, WorkerId, WorkerMap, WorkerRank};
use pointsman::{HttpUrl, Prompt, RequestOptions, RouteRequest, Router, StaticList};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};
use pythonize::Depythonizer;
use serde::Deserialize;

use crate::buffer::with_tokens;
use crate::errors::Failure;

/// Requests without an id of the caller so far.
static UNNAMED: AtomicU64 = AtomicU64::new(0);

/// Id of a booking: the given one, or a new one.
pub(crate) fn booking_id(given: Option<String>) -> String {
    given.unwrap_or_else(|| format!("python-{}", UNNAMED.fetch_add(1, Ordering::Relaxed)))
}

/// A request with a hashed prompt. The tokens are hashed here, with the interpreter lock held, and never copied for another
/// thread: 12,000 tokens take about 5 microseconds.
pub(crate) fn request(
    router: &Router,
    request_id: Option<String>,
    tokens: &Bound<'_, PyAny>,
    options: Option<&Bound<'_, PyDict>>,
) -> PyResult<RouteRequest<'static>> {
    let options = match options {
        Some(options) if !options.is_empty() => from_dict::<RequestOptions>(options, "options")?,
        Some(_) | None => RequestOptions::default(),
    };
    let config = router.config();
    let block_size = NonZeroU32::new(router.block_size()).unwrap_or(NonZeroU32::MIN); // never 0
    let scheme = HashScheme {
        block_size,
        lora_name: options.lora_name.as_deref(),
        cache_salt: options.cache_salt.as_deref(),
        is_eagle: config.is_eagle,
    };
    let hashed =
        with_tokens(tokens, |tokens| Ok::<_, RouteError>(HashedPrompt::hash(scheme, tokens, &options.mm_spans)?))?;
    let hashed = hashed.map_err(|error| Failure::from(error).raise(tokens.py()))?;
    Ok(RouteRequest { request_id: request_id.map(Cow::Owned), prompt: Prompt::Hashed(hashed), options })
}

/// A value of the library from a dictionary. Unknown keys are errors. Errors name the key.
pub(crate) fn from_dict<T: for<'de> Deserialize<'de>>(dict: &Bound<'_, PyAny>, what: &str) -> PyResult<T> {
    serde_path_to_error::deserialize(&mut Depythonizer::from_object(dict)).map_err(|error| {
        let path = error.path().to_string();
        let place = if path == "." { String::new() } else { format!("{path}: ") };
        PyValueError::new_err(format!("{what}: {place}{}", error.inner()))
    })
}

/// A rank: `(worker, rank)`, a dictionary with these keys, or the id of a worker with a single rank.
pub(crate) fn rank(value: &Bound<'_, PyAny>) -> PyResult<WorkerRank> {
    if let Ok((worker, rank)) = value.extract::<(u64, u32)>() {
        return Ok(WorkerRank::new(WorkerId(worker), rank));
    }
    if let Ok(worker) = value.extract::<u64>() {
        return Ok(WorkerRank::new(WorkerId(worker), 0));
    }
    from_dict(value, "rank must be (worker, rank)")
}

/// A worker's configuration: its endpoint, or a dictionary of its fields.
pub(crate) fn worker_config(value: &Bound<'_, PyAny>) -> PyResult<WorkerConfig> {
    let config = match value.cast::<PyString>() {
        Ok(endpoint) => WorkerConfig::at(endpoint.to_str()?),
        Err(_) => from_dict(value, "worker")?,
    };
    if config.endpoint.split_once("://").is_none_or(|(scheme, host)| scheme.is_empty() || host.is_empty()) {
        let endpoint = HttpUrl::without_password(&config.endpoint);
        let rule = "must begin with a scheme, such as http://";
        return Err(PyValueError::new_err(format!("endpoint of a worker is {endpoint:?}, {rule}")));
    }
    Ok(config)
}

/// Workers with their ids; `None` for the id that discovery derives from the endpoint.
pub(crate) fn workers(given: &[(Option<Bound<'_, PyAny>>, Bound<'_, PyAny>)]) -> PyResult<WorkerMap> {
    let worker = |(id, config): &(Option<Bound<'_, PyAny>>, Bound<'_, PyAny>)| {
        let integer = |id: &Bound<'_, PyAny>| {
            id.extract()
                .map_err(|_| PyTypeError::new_err(format!("worker id {id} must be an integer of 0 to 2**64 - 1")))
        };
        Ok((id.as_ref().map(integer).transpose()?.map(WorkerId), worker_config(config)?))
    };
    let workers: PyResult<Vec<_>> = given.iter().map(worker).collect();
    let list = StaticList::new(workers?).map_err(|error| PyValueError::new_err(format!("workers: {error}")))?;
    Ok(list.into_workers())
}

/// Hashes of the complete blocks of a prompt, as events name them.
#[pyfunction]
#[pyo3(signature = (tokens, block_size, *, lora_name=None, cache_salt=None, is_eagle=false))]
pub(crate) fn block_hashes(
    tokens: &Bound<'_, PyAny>,
    block_size: u32,
    lora_name: Option<&str>,
    cache_salt: Option<&str>,
    is_eagle: bool,
) -> PyResult<Vec<u64>> {
    let block_size =
        NonZeroU32::new(block_size).ok_or_else(|| PyValueError::new_err("block_size is 0, must be positive"))?;
    let scheme = HashScheme { block_size, lora_name, cache_salt, is_eagle };
    let hashed = with_tokens(tokens, |tokens| HashedPrompt::hash(scheme, tokens, &[]))?;
    let hashed = hashed.map_err(|error| Failure::from(RouteError::from(error)).raise(tokens.py()))?;
    Ok(hashed.block_hashes().iter().map(|hash| hash.0).collect())
}
