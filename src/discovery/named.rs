//! A worker as a source names it.

use super::hosts::reach;
use super::{HttpUrl, HttpUrlError};
use crate::protocol::{WorkerConfig, WorkerId};

/// A worker that a source names, before it has been asked for the rest.
#[derive(Clone, Debug, PartialEq)]
pub struct NamedWorker {
    /// Its id, where it has been given one.
    pub id: Option<WorkerId>,
    /// What is known of it.
    pub config: WorkerConfig,
    /// Whether it is to be asked for the rest.
    pub probe: bool,
}

impl NamedWorker {
    /// A worker at `url`, of which everything but the endpoint is `given`. Wildcard hosts of its sockets, such as `*`,
    /// become its own.
    ///
    /// ```
    /// use pointsman::discovery::NamedWorker;
    /// use pointsman::protocol::{LoadSource, WorkerConfig};
    ///
    /// let given = WorkerConfig { load: Some(LoadSource::Socket("tcp://*:5600".to_owned())), ..WorkerConfig::at("") };
    /// let worker = NamedWorker::at("http://10.0.0.7:8000", &given)?;
    /// assert_eq!(worker.config.load, Some(LoadSource::Socket("tcp://10.0.0.7:5600".to_owned())));
    /// # Ok::<(), pointsman::discovery::HttpUrlError>(())
    /// ```
    ///
    /// # Errors
    /// An address that is none.
    pub fn at(url: &str, given: &WorkerConfig) -> Result<Self, HttpUrlError> {
        let parsed = HttpUrl::parse(url)?;
        let mut config = WorkerConfig { endpoint: url.to_owned(), ..given.clone() };
        reach(&mut config, &parsed);
        Ok(Self { id: None, config, probe: false })
    }
}
