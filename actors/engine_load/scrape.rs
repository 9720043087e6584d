//! Polls of engine metrics: one task per worker reads the engine's metrics page periodically.
//!
//! A request ends before its load report would be stale, and an unresponsive engine delays no other. Unusable values
//! are counted and not replaced.

use std::path::PathBuf;
use std::time::Duration;

use super::{EngineLoadMsg, EngineLoadSources};
use crate::actors::io::http::EngineGet;
use crate::actors::views::worker::WorkerEntry;
use crate::actors::worker_tasks::{self, first_delay};
use crate::engine_load::{EngineReading, PAGE_BYTES_MAX, read_page};
use crate::protocol::{LoadSource, WorkerId};

/// Inputs of a worker's task; a change restarts it.
#[derive(Clone, Debug, PartialEq)]
struct PageQuery {
    url: String,
    api_key_file: Option<PathBuf>,
    start_rank: u32,
    ranks: u32,
}

/// Starts the polls of the workers, if enabled. They end with the router.
pub(super) fn watch(sources: &EngineLoadSources) {
    if sources.config.engine_load.interval_ms > 0 {
        worker_tasks::watch(&sources.fleet, &sources.status, sources.clone(), page_query_of, ask);
    }
}

fn page_query_of(worker: &WorkerEntry) -> Option<PageQuery> {
    let config = &worker.config;
    match config.load.as_ref()? {
        LoadSource::Metrics(url) => Some(PageQuery {
            url: url.clone(),
            api_key_file: config.api_key_file.clone(),
            start_rank: config.data_parallel_start_rank,
            ranks: config.data_parallel_size,
        }),
        LoadSource::Socket(_) => None, // a socket needs no polls
    }
}

async fn ask(sources: EngineLoadSources, worker: WorkerId, _: u64, asked: PageQuery) {
    let EngineLoadSources { config, client, clock, meters, engine_loads, .. } = sources;
    let [interval, timeout] = [config.engine_load.interval_ms, config.engine_load.stale_ms].map(Duration::from_millis);
    let PageQuery { url, api_key_file, start_rank, ranks } = asked;
    let request = EngineGet { url, api_key_file, timeout, bytes_max: PAGE_BYTES_MAX };
    tokio::time::sleep(first_delay(worker, interval)).await;
    loop {
        let polled_at = clock.now();
        let page = client.get(request.clone()).await;
        let errors = &meters.engine_load_errors;
        match page {
            Ok(text) => {
                let page = read_page(&String::from_utf8_lossy(&text));
                let readings: Vec<(u32, EngineReading)> = page.of_ranks(start_rank, ranks).collect();
                errors.add("value", u64::from(page.refused));
                if readings.is_empty() {
                    errors.add("empty", 1);
                } else {
                    engine_loads.tell(EngineLoadMsg::Reported { worker, readings, polled_at });
                }
            }
            Err(error) => {
                errors.add("request", 1);
                tracing::debug!(%worker, %error, "engine load report unusable");
            }
        }
        tokio::time::sleep(interval).await;
    }
}
