//! Sources of workers, declared as dictionaries.

use std::path::PathBuf;
use std::time::Duration;

use pointsman::protocol::WorkerConfig;
use pointsman::{
    DiscoveryError, DiscoveryStatus, DnsNames, HttpUrl, ProbeOptions, ProbedUrls, Router, RouterBuilder, RouterConfig,
    WatchedFile,
};
use serde::Deserialize;

/// A source of workers. `pointsman.discovery` has a class for each.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Source {
    /// A file of workers, read every second.
    File { path: PathBuf, model: Option<String> },
    /// Engines at known addresses, probed for their configuration.
    Urls { urls: Vec<String>, model: Option<String>, worker: Option<WorkerConfig> },
    /// Names that resolve to several engines.
    Dns { names: Vec<String>, model: Option<String>, worker: Option<WorkerConfig>, probe: bool, interval_seconds: f64 },
}

impl Source {
    /// The source in messages.
    pub(crate) fn described(&self) -> String {
        match self {
            Self::File { path, .. } => path.display().to_string(),
            Self::Urls { urls, .. } => {
                urls.iter().map(|url| HttpUrl::without_password(url)).collect::<Vec<_>>().join(", ")
            }
            Self::Dns { names, .. } => names.join(", "),
        }
    }

    /// Adds the source to a router. Must be called in the runtime.
    pub(crate) fn add(self, builder: RouterBuilder, config: &RouterConfig) -> Result<RouterBuilder, DiscoveryError> {
        let options = |model: Option<String>| {
            let options = ProbeOptions::of(config);
            match model {
                Some(model) => options.model(model),
                None => options,
            }
        };
        Ok(match self {
            Self::File { path, model } => builder.discovery(WatchedFile::new(path, options(model))?),
            Self::Urls { urls, model, worker } => {
                let source = ProbedUrls::new(urls, options(model))?;
                builder.discovery(match worker {
                    Some(worker) => source.given(&worker),
                    None => source,
                })
            }
            Self::Dns { names, model, worker, probe, interval_seconds } => {
                let interval = Duration::try_from_secs_f64(interval_seconds).unwrap_or(Duration::from_secs(5));
                let mut source = DnsNames::new(names)?.every(interval);
                if let Some(worker) = worker {
                    source = source.given(&worker);
                }
                builder.discovery(if probe { source.probing(options(model)) } else { source })
            }
        })
    }
}

/// Errors of discovery: engines that do not respond or do not fit.
pub(crate) fn problems(router: &Router) -> Vec<String> {
    let of_source = |source: DiscoveryStatus| {
        let failed = source.last_error.map(|error| format!("discovery source {}: {error}", source.source));
        failed.into_iter().chain(source.refused.into_values())
    };
    router.discovery().into_iter().flat_map(of_source).collect()
}
