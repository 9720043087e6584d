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
/// periodically. A name keeps its previous workers if a resolution fails, or if no engine at the new addresses is usable.
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
    /// Of the last resolution with usable engines, their addresses.
    usable: BTreeSet<IpAddr>,
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
        let known = std::mem::replace(&mut self.names, names);
        for name in &mut self.names {
            if let Some(known) = known.iter().find(|known| known.name == name.name) {
                (name.addresses, name.usable) = (known.addresses.clone(), known.usable.clone());
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
        let complaint = self.resolve().await;
        self.look(complaint).await
    }

    /// Resolves the names. Returns the first error.
    async fn resolve(&mut self) -> Option<DiscoveryError> {
        let mut complaint: Option<DiscoveryError> = None;
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
        complaint
    }

    /// The workers at the addresses, if they have changed.
    async fn look(&mut self, mut complaint: Option<DiscoveryError>) -> Option<Result<WorkerMap, DiscoveryError>> {
        // Two names may share an address. A name that never had an address leaves its workers unknown.
        if complaint.is_some() && self.names.iter().all(|name| name.addresses.is_empty()) {
            return self.changes.look(None, complaint);
        }
        let urls: BTreeSet<String> = self.names.iter().flat_map(DnsName::urls).collect();
        let probe = self.prober.is_some();
        let named = urls.iter().filter_map(|url| NamedWorker::at(url, &self.given).ok());
        let workers: Vec<NamedWorker> = named.map(|worker| NamedWorker { probe, ..worker }).collect();
        let workers: Vec<_> = match &mut self.prober {
            None => workers.into_iter().map(|worker| (worker.id, worker.config)).collect(),
            Some(prober) => {
                let (complete, errors) = prober.ask(&workers).await;
                if !errors.is_empty() {
                    complaint.get_or_insert(DiscoveryError::Engines(errors));
                }
                let usable: BTreeSet<&str> = complete.iter().map(|(_, config)| config.endpoint.as_str()).collect();
                let kept: BTreeSet<String> = self.names.iter_mut().flat_map(|name| name.keep_usable(&usable)).collect();
                complete.into_iter().filter(|(_, config)| kept.contains(&config.endpoint)).collect()
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
        Ok(Self { name, scheme, host, port, addresses: BTreeSet::new(), usable: BTreeSet::new() })
    }

    fn url(&self, ip: IpAddr) -> String {
        format!("{}://{}", self.scheme, SocketAddr::new(ip, self.port))
    }

    /// The addresses, and the previous workers, which stay while none of the addresses is usable.
    fn urls(&self) -> impl Iterator<Item = String> {
        self.addresses.union(&self.usable).map(|ip| self.url(*ip))
    }

    /// Updates the usable addresses, of which `usable` has the engines, and returns their URLs.
    fn keep_usable(&mut self, usable: &BTreeSet<&str>) -> Vec<String> {
        let is_usable = |ip: &IpAddr| usable.contains(self.url(*ip).as_str());
        let present: BTreeSet<IpAddr> = self.addresses.iter().copied().filter(is_usable).collect();
        if !present.is_empty() {
            self.usable = present;
        }
        self.usable.iter().map(|ip| self.url(*ip)).collect()
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::RouterConfig;
    use crate::actors::io::BoxFuture;
    use crate::actors::io::http::{EngineClient, EngineGet, EngineHttpError};

    /// Engines at hosts below 10.0.0.5.
    #[derive(Debug)]
    struct LowHosts;

    impl EngineClient for LowHosts {
        fn get(&self, request: EngineGet) -> BoxFuture<'_, Result<Vec<u8>, EngineHttpError>> {
            let host = request.url.trim_start_matches("http://10.0.0.").split(':').next().map(str::to_owned);
            let is_engine = host.is_some_and(|host| ["1", "2", "3", "4"].contains(&host.as_str()));
            let is_page = request.url.ends_with("/metrics");
            let page = b"vllm:cache_config_info{block_size=\"16\",engine=\"0\",num_gpu_blocks=\"100\"} 1.0\n";
            let answer = match (is_engine, is_page) {
                (true, true) => Ok(page.to_vec()),
                (true, false) => Err(EngineHttpError::Status(404)),
                (false, _) => Err(EngineHttpError::Status(502)),
            };
            Box::pin(async move { answer })
        }
    }

    #[tokio::test]
    async fn addresses_without_a_usable_engine_replace_no_worker() {
        let options = ProbeOptions { client: Arc::new(LowHosts), ..ProbeOptions::of(&RouterConfig::default()) };
        let mut source = DnsNames::new(["engines:8000"]).expect("a name").probing(options);
        for (addresses, workers) in [
            (&[1, 2][..], &[1, 2][..]),
            (&[8, 9], &[1, 2]), // none is usable
            (&[2, 9], &[2]),
            (&[9], &[2]),
            (&[3, 4], &[3, 4]),
        ] {
            let address = |last: &u8| IpAddr::from([10, 0, 0, *last]);
            source.names[0].addresses = addresses.iter().map(address).collect();
            source.changes.forget();
            let map = source.look(None).await.expect("news").expect("a set of workers");
            let want: BTreeSet<String> = workers.iter().map(|last| format!("http://10.0.0.{last}:8000")).collect();
            let got: BTreeSet<String> = map.values().map(|config| config.endpoint.clone()).collect();
            assert_eq!(got, want, "addresses {addresses:?}");
        }
    }
}
