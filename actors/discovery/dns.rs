//! Discovery of workers by DNS names, each of which resolves to several engines.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};

use super::prober::{ProbeOptions, Prober};
use super::source::DiscoverySource;
use crate::discovery::{Changes, DiscoveryError, HttpUrl, HttpUrlError, NamedWorker, worker_map};
use crate::protocol::{WorkerConfig, WorkerMap};

/// Default interval of resolution.
const INTERVAL: Duration = Duration::from_secs(5);

/// Timeout of one resolution.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum number of addresses of one name.
const ADDRESSES_MAX: usize = 4096;

/// Names with ports, such as those of headless services. Every address of a name is a worker. Names are resolved
/// periodically; if a resolution fails, the name keeps its previous addresses.
///
/// ```
/// use pointsman::DnsNames;
///
/// let source = DnsNames::new(["engines.llm.svc:8000"])?;
/// # Ok::<(), pointsman::DiscoveryError>(())
/// ```
#[derive(Debug)]
pub struct DnsNames {
    names: Vec<DnsName>,
    given: WorkerConfig,
    interval: Duration,
    prober: Option<Prober>,
    next_at: Instant,
    changes: Changes,
}

#[derive(Debug)]
struct DnsName {
    name: String,
    scheme: &'static str,
    host: String,
    port: u16,
    /// Addresses of the last successful resolution.
    addresses: BTreeSet<IpAddr>,
}

impl DnsNames {
    /// Follows names of the form `NAME:PORT`, or `https://NAME:PORT` for engines with TLS.
    ///
    /// # Errors
    /// A name of another form.
    pub fn new(names: impl IntoIterator<Item = impl Into<String>>) -> Result<Self, DiscoveryError> {
        let names = names.into_iter().map(|name| DnsName::new(name.into())).collect::<Result<_, _>>()?;
        Ok(Self {
            names,
            given: WorkerConfig::at(""),
            interval: INTERVAL,
            prober: None,
            next_at: Instant::now(),
            changes: Changes::default(),
        })
    }

    /// Replaces the names. Retained names keep their addresses, and all names are resolved at the next
    /// [`DiscoverySource::next`].
    ///
    /// # Errors
    /// A name of another form; the previous names stay.
    pub fn set(&mut self, names: impl IntoIterator<Item = impl Into<String>>) -> Result<(), DiscoveryError> {
        let names = names.into_iter().map(|name| DnsName::new(name.into())).collect::<Result<Vec<_>, _>>()?;
        let mut known = std::mem::replace(&mut self.names, names);
        for name in &mut self.names {
            if let Some(known) = known.iter_mut().find(|known| known.name == name.name) {
                name.addresses = std::mem::take(&mut known.addresses);
            }
        }
        self.next_at = Instant::now();
        Ok(())
    }

    /// Sets the configuration of all workers, except the endpoint. A `*` as the host of a socket address is replaced by
    /// the worker's host.
    #[must_use]
    pub fn given(mut self, given: &WorkerConfig) -> Self {
        self.given = given.clone();
        self
    }

    /// Probes the workers for configuration that is not given.
    #[must_use]
    pub fn probing(mut self, options: ProbeOptions) -> Self {
        self.prober = Some(Prober::new(options));
        self
    }

    /// Sets the interval of resolution and probes. Default 5 seconds.
    #[must_use]
    pub fn every(mut self, interval: Duration) -> Self {
        self.interval = interval;
        self
    }

    async fn refresh(&mut self) -> Option<Result<WorkerMap, DiscoveryError>> {
        let mut complaint = None;
        // Resolved concurrently: an unresponsive name does not delay the others.
        let mut lookups = JoinSet::new();
        for (position, name) in self.names.iter().enumerate() {
            let (host, port) = (name.host.clone(), name.port);
            lookups.spawn(async move { (position, resolve(&host, port).await) });
        }
        let mut answers: BTreeMap<usize, _> = BTreeMap::new();
        while let Some(answer) = lookups.join_next().await {
            answers.extend(answer.ok());
        }
        for (position, name) in self.names.iter_mut().enumerate() {
            match answers.remove(&position).unwrap_or_else(|| Err("the resolver task failed".to_owned())) {
                Ok(addresses) => name.addresses = addresses,
                Err(reason) => {
                    complaint.get_or_insert(DiscoveryError::Resolve { name: name.name.clone(), reason });
                }
            }
        }
        // Two names may share an address. A name that never had an address leaves its workers unknown.
        if complaint.is_some() && self.names.iter().all(|name| name.addresses.is_empty()) {
            return self.changes.look(None, complaint);
        }
        let urls: BTreeSet<String> = self.names.iter().flat_map(DnsName::urls).collect();
        let probe = self.prober.is_some();
        let named = urls.iter().filter_map(|url| NamedWorker::at(url, &self.given).ok());
        let workers: Vec<NamedWorker> = named.map(|worker| NamedWorker { probe, ..worker }).collect();
        let workers = match &mut self.prober {
            None => workers.into_iter().map(|worker| (worker.id, worker.config)).collect(),
            Some(prober) => {
                let (complete, errors) = prober.ask(&workers).await;
                if !errors.is_empty() {
                    complaint.get_or_insert(DiscoveryError::Engines(errors));
                }
                complete
            }
        };
        match worker_map(workers) {
            Ok(map) => self.changes.look(Some(map), complaint),
            Err(error) => self.changes.look(None, Some(error.into())),
        }
    }
}

impl DnsName {
    fn new(name: String) -> Result<Self, DiscoveryError> {
        let refused = |rule: &str| HttpUrlError { url: name.clone(), rule: rule.to_owned() };
        let is_plain = !name.starts_with("https://");
        let url = if is_plain { format!("http://{name}") } else { name.clone() };
        let url = HttpUrl::parse(&url).map_err(|error| refused(&error.rule))?;
        if url.path() != "/" || name.ends_with('/') || !name.ends_with(&format!(":{}", url.port())) {
            return Err(refused("must be NAME:PORT or https://NAME:PORT").into());
        }
        let (scheme, host, port) = (url.scheme(), url.host().to_owned(), url.port());
        Ok(Self { name, scheme, host, port, addresses: BTreeSet::new() })
    }

    fn urls(&self) -> impl Iterator<Item = String> {
        self.addresses.iter().map(|ip| format!("{}://{}", self.scheme, SocketAddr::new(*ip, self.port)))
    }
}

async fn resolve(host: &str, port: u16) -> Result<BTreeSet<IpAddr>, String> {
    let looked_up = timeout(TIMEOUT, tokio::net::lookup_host((host, port))).await;
    let found = looked_up.map_err(|_| format!("not resolved within {} s", TIMEOUT.as_secs()))?;
    let found = found.map_err(|error| error.to_string())?;
    let addresses: BTreeSet<IpAddr> = found.take(ADDRESSES_MAX).map(|address| address.ip().to_canonical()).collect();
    if addresses.is_empty() { Err("no addresses found".to_owned()) } else { Ok(addresses) }
}

impl DiscoverySource for DnsNames {
    fn name(&self) -> String {
        let names: Vec<&str> = self.names.iter().map(|name| name.name.as_str()).collect();
        format!("dns:{}", names.join(","))
    }

    async fn next(&mut self) -> Option<Result<WorkerMap, DiscoveryError>> {
        loop {
            if let Some(complaint) = self.changes.pending() {
                return Some(Err(complaint));
            }
            sleep_until(self.next_at).await;
            let news = self.refresh().await;
            self.next_at = Instant::now() + self.interval;
            if news.is_some() {
                return news;
            }
        }
    }

    fn rewind(&mut self) {
        self.changes.forget();
        self.next_at = Instant::now();
    }
}
