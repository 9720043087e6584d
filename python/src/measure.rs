//! Native side of the latency measurement in `python/tests/measure.py`.

use std::sync::Arc;

use pointsman::{Prompt, RequestOptions, RouteRequest, Router};
use pyo3::prelude::*;
use tokio::time::Instant;

use crate::buffer::with_tokens;
use crate::errors::Failure;
use crate::inputs::booking_id;
use crate::router::NativeRouter;

/// Durations of `requests` calls of `Router::route` in nanoseconds, without Python: in sequence on the calling thread with
/// one task, else by concurrent tasks on the threads of the router.
#[pyfunction]
pub(crate) fn route_times(
    py: Python<'_>,
    router: &NativeRouter,
    tokens: &Bound<'_, PyAny>,
    requests: usize,
    tasks: usize,
) -> PyResult<Vec<u64>> {
    let tokens: Arc<[u32]> = with_tokens(tokens, |tokens| Arc::from(tokens))?;
    let handle = router.process(py)?.handle().clone();
    let router = router.library().clone();
    let times = py.detach(|| {
        handle.block_on(async {
            if tasks == 1 {
                return calls(router, tokens, requests).await.map_err(Failure::from);
            }
            let running: Vec<_> = (0..tasks)
                .map(|_| tokio::spawn(calls(router.clone(), Arc::clone(&tokens), requests / tasks)))
                .collect();
            let mut times = Vec::with_capacity(requests);
            for task in running {
                let ended = task.await.map_err(|error| Failure::new("Internal", "task", error.to_string()))?;
                times.extend(ended?);
            }
            Ok(times)
        })
    });
    times.map_err(|failure: Failure| failure.raise(py))
}

async fn calls(router: Router, tokens: Arc<[u32]>, requests: usize) -> Result<Vec<u64>, pointsman::error::RouteError> {
    let mut times = Vec::with_capacity(requests);
    for _ in 0..requests {
        let began = Instant::now();
        let request = RouteRequest {
            request_id: Some(booking_id(None).into()),
            prompt: Prompt::Tokens(&tokens),
            options: RequestOptions::default(),
        };
        let placement = router.route(request).await?;
        times.push(u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX));
        placement.prefill_completed();
        drop(placement);
        tokio::task::yield_now().await;
    }
    Ok(times)
}
