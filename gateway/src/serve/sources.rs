//! Where a model's workers come from.
//!
//! Owns which discovery source each setting means. Leaves asking, and what comes of it, to the library.

use pointsman::discovery::{DiscoveryError, NamedWorker};
use pointsman::protocol::WorkerConfig;
use pointsman::{DnsNames, ProbeOptions, ProbedUrls, RouterBuilder, StaticList, WatchedFile};

use crate::settings::ModelSettings;

/// Lets the router follow everything that the model's settings name.
pub(super) fn follow(mut builder: RouterBuilder, settings: &ModelSettings) -> Result<RouterBuilder, DiscoveryError> {
    let options = || ProbeOptions::of(&settings.router).model(settings.upstream_name());
    let given = settings.workers.iter().filter(|worker| !worker.probe).cloned();
    let given: Vec<_> = given.map(|worker| (worker.id, worker.config)).collect();
    if !given.is_empty() {
        builder = builder.discovery(StaticList::new(given)?);
    }
    let nothing_known = WorkerConfig::at("");
    let mut probed: Vec<_> = settings.workers.iter().filter(|worker| worker.probe).cloned().collect();
    for url in &settings.worker_urls {
        probed.push(NamedWorker { probe: true, ..NamedWorker::at(url, &nothing_known)? });
    }
    if !probed.is_empty() {
        builder = builder.discovery(ProbedUrls::named(probed, options())?);
    }
    if let Some(path) = &settings.workers_file {
        builder = builder.discovery(WatchedFile::new(path, options())?);
    }
    if !settings.worker_names.is_empty() {
        builder = builder.discovery(DnsNames::new(&settings.worker_names)?.probing(options()));
    }
    Ok(builder)
}
