//! Workers named by a source.

use super::hosts::reach;
use super::{HttpUrl, HttpUrlError};
use crate::protocol::{KvEventsConfig, WorkerConfig, WorkerId};

/// A worker from a source, before it is probed.
#[derive(Clone, Debug, PartialEq)]
pub struct NamedWorker {
    /// Its id, if the source has one.
    pub id: Option<WorkerId>,
    /// Its known configuration.
    pub config: WorkerConfig,
    /// Whether to probe the engine for the missing configuration.
    pub probe: bool,
}

/// KV event endpoints of the first rank of an engine, whatever the number of that rank.
#[derive(Clone, Debug, PartialEq)]
pub enum FirstRankEvents {
    /// Configured endpoints.
    Given(KvEventsConfig),
    /// Endpoints of a vLLM engine that has a ZeroMQ publisher there.
    IfPublished(KvEventsConfig),
}

impl NamedWorker {
    /// A worker at the canonical spelling of `url`, with the configuration `given` apart from the endpoint. Wildcard
    /// hosts of its sockets, such as `*`, are replaced by its own host.
    ///
    /// ```
    /// use pointsman::NamedWorker;
    /// use pointsman::protocol::{LoadSource, WorkerConfig};
    ///
    /// let given = WorkerConfig { load: Some(LoadSource::Socket("tcp://*:5600".to_owned())), ..WorkerConfig::at("") };
    /// let worker = NamedWorker::at("http://10.0.0.7:8000", &given)?;
    /// assert_eq!(worker.config.load, Some(LoadSource::Socket("tcp://10.0.0.7:5600".to_owned())));
    /// # Ok::<(), pointsman::internals::discovery::HttpUrlError>(())
    /// ```
    ///
    /// # Errors
    /// An invalid address.
    pub fn at(url: &str, given: &WorkerConfig) -> Result<Self, HttpUrlError> {
        let parsed = HttpUrl::parse(url)?;
        let mut config = WorkerConfig { endpoint: parsed.endpoint(), ..given.clone() };
        reach(&mut config, &parsed);
        Ok(Self { id: None, config, probe: false })
    }

    /// The same worker, to be probed.
    #[must_use]
    pub fn probed(self) -> Self {
        Self { probe: true, ..self }
    }
}
