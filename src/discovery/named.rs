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
    /// A worker at `url`, `http` or `https`, of which everything but the endpoint is `given`. Wildcard hosts of its sockets, such as `*`,
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
        let parsed = HttpUrl::parse_endpoint(url)?;
        let mut config = WorkerConfig { endpoint: url.to_owned(), ..given.clone() };
        reach(&mut config, &parsed);
        Ok(Self { id: None, config, probe: false })
    }

    /// The same, to be asked for the rest.
    ///
    /// # Errors
    /// An endpoint that is not plain `http`: engines are not asked over TLS.
    pub fn probed(self) -> Result<Self, HttpUrlError> {
        match HttpUrl::parse(&self.config.endpoint) {
            Ok(_) => Ok(Self { probe: true, ..self }),
            Err(HttpUrlError { url, rule }) => {
                Err(HttpUrlError { url, rule: format!("it is to be asked (probe) over plain HTTP, and {rule}") })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::KvEventsConfig;

    #[test]
    fn a_worker_behind_tls_is_taken_as_described_but_not_asked() {
        let (endpoint, replay_endpoint) = ("tcp://*:5557".to_owned(), None);
        let kv_events = Some(KvEventsConfig { endpoint, replay_endpoint, topic: String::new() });
        let given = WorkerConfig { kv_events, ..WorkerConfig::at("") };
        let worker = NamedWorker::at("https://engine/v1", &given).expect("an address");
        assert_eq!(worker.config.endpoint, "https://engine/v1");
        assert_eq!(worker.config.kv_events.as_ref().expect("given").endpoint, "tcp://engine:5557");
        let refused = worker.probed().expect_err("questions are plain HTTP").to_string();
        assert!(refused.contains("probe") && refused.contains("\"https\", must be http"), "{refused}");
        assert!(NamedWorker::at("http://engine", &given).and_then(NamedWorker::probed).expect("it can").probe);
        for (url, rule) in [("ftp://e", "must be http or https"), ("https://me:pw@e", "password"), ("https://", "host")]
        {
            let refused = NamedWorker::at(url, &given).expect_err("must be refused").to_string();
            assert!(refused.contains(rule), "{refused}");
        }
    }
}
