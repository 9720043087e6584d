//! Engines, gateways and traffic of a drill.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use pointsman_trial::mock::{Faults, MockConfig, MockEngine};
use tokio::time::{Instant, sleep};

use super::Drill;
use super::gateway::Gateway;
use super::relay::Relay;
use super::traffic::{BLOCK_SIZE, Traffic};
use crate::Failed;

/// Limit of every wait. No result depends on it.
const PATIENCE: Duration = Duration::from_secs(120);

/// Directory that is removed when dropped.
#[derive(Debug)]
pub(super) struct Scratch(PathBuf);

impl Scratch {
    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    pub(super) fn create() -> Result<Self, Failed> {
        static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let n = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("pointsman-drill-{}-{n}", std::process::id()));
        fs::create_dir_all(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // What remains is a temporary file.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Connections between gateways.
#[derive(Clone, Copy, Debug)]
pub(super) enum Network {
    /// Direct ones by relays.
    Direct,
    /// A NATS server, by relays.
    NatsByRelays(SocketAddr),
    /// A NATS server.
    Nats(SocketAddr),
}

/// Relay from a gateway.
struct Link {
    from: usize,
    /// The other gateway; none with NATS.
    to: Option<usize>,
    relay: Relay,
}

/// A running deployment. The fields are dropped in this order.
pub(super) struct Fleet {
    pub(super) traffic: Traffic,
    pub(super) gateways: Vec<Gateway>,
    /// Relays between gateways, or from each of them to the NATS server.
    links: Vec<Link>,
    pub(super) engines: Vec<MockEngine>,
    _scratch: Scratch,
}

/// Waits until `holds` returns true.
pub(super) async fn until(
    what: &str,
    mut holds: impl AsyncFnMut() -> Result<bool, Failed>,
) -> Result<Duration, Failed> {
    let begun = Instant::now();
    while !holds().await? {
        if begun.elapsed() > PATIENCE {
            return Err(format!("timed out: {what}").into());
        }
        sleep(Duration::from_millis(10)).await;
    }
    Ok(begun.elapsed())
}

impl Fleet {
    /// Starts everything and sends each prompt once.
    pub(super) async fn start(drill: &Drill, program: &Path, network: Network) -> Result<Self, Failed> {
        let scratch = Scratch::create()?;
        let mut engines = Vec::new();
        for seed in 0..u64::from(drill.engines) {
            let config = MockConfig { block_size: BLOCK_SIZE, kv_blocks: 32_768, seed, ..MockConfig::default() };
            let engine = MockEngine::start(config).await;
            engines.push(engine.map_err(|error| format!("cannot start a mock engine: {error}"))?);
        }
        let count = drill.gateways as usize;
        let traffic = Traffic::start(count, drill.prompts, drill.rate.get())?;
        let (mut gateways, mut links) = (Vec::new(), Vec::new());
        for from in 0..count {
            let mut replicas = format!("[replicas]\nid = \"gateway-{from}\"\n");
            let first = links.len();
            match network {
                Network::Direct => {
                    for to in (0..count).filter(|to| *to != from) {
                        links.push(Link { from, to: Some(to), relay: Relay::start().await? });
                    }
                    let peers: Vec<_> = links[first..].iter().map(|link| link.relay.address().to_string()).collect();
                    replicas += &format!("listen = \"127.0.0.1:0\"\npeers = {peers:?}\n");
                }
                Network::NatsByRelays(server) => {
                    let relay = Relay::start().await?;
                    relay.set_target(server);
                    replicas += &format!("nats = \"nats://{}\"\n", relay.address());
                    links.push(Link { from, to: None, relay });
                }
                Network::Nats(server) => replicas += &format!("nats = \"nats://{server}\"\n"),
            }
            let urls = engines.iter().map(MockEngine::url).collect();
            gateways.push(Gateway::new(from, program, &scratch.0, urls, &replicas)?);
        }
        let mut fleet = Self { traffic, gateways, links, engines, _scratch: scratch };
        for n in 0..count {
            fleet.start_gateway(n).await?;
        }
        for n in 0..count {
            fleet.include(n).await?;
        }
        if !matches!(network, Network::Nats(_)) {
            fleet.until_connected().await?;
        }
        fleet.serve(u64::from(drill.prompts)).await?;
        fleet.pause().await?;
        Ok(fleet)
    }

    /// Starts a gateway and waits until it listens.
    pub(super) async fn start_gateway(&mut self, n: usize) -> Result<(), Failed> {
        let gateway = &mut self.gateways[n];
        gateway.start()?;
        if self.links.iter().any(|link| link.to == Some(n)) {
            let mut address = None;
            until("the listener for replicas", async || {
                address = gateway.replicas_address()?;
                Ok(address.is_some())
            })
            .await?;
            for link in self.links.iter().filter(|link| link.to == Some(n)) {
                address.into_iter().for_each(|address| link.relay.set_target(address));
            }
        }
        until("the listener for clients", async || gateway.listens()).await?;
        Ok(())
    }

    /// Waits until a gateway is ready and includes it in the traffic.
    pub(super) async fn include(&mut self, n: usize) -> Result<(), Failed> {
        let gateway = &self.gateways[n];
        until("a ready gateway", async || Ok(gateway.is_ready().await)).await?;
        self.traffic.set_gateway(n, gateway.address);
        Ok(())
    }

    /// Stops or resumes the connections between two gateways, with NATS those between the first one and the server.
    pub(super) fn set_connected(&self, one: usize, other: usize, is_connected: bool) {
        let is_between = |link: &&Link| {
            let (from, to) = (link.from, link.to);
            from == one && to.is_none_or(|to| to == other) || from == other && to == Some(one)
        };
        self.links.iter().filter(is_between).for_each(|link| link.relay.set_open(is_connected));
    }

    /// Sends requests until `count` have ended.
    pub(super) async fn serve(&self, count: u64) -> Result<(), Failed> {
        self.traffic.set_paused(false);
        let end = self.traffic.ended() + count;
        until("responses", async || Ok(self.traffic.ended() >= end)).await?;
        Ok(())
    }

    /// Sends no further request and waits for those in flight.
    pub(super) async fn pause(&self) -> Result<(), Failed> {
        self.traffic.set_paused(true);
        until("the end of all requests", async || Ok(self.traffic.is_quiet())).await?;
        Ok(())
    }

    fn running(&self) -> impl Iterator<Item = &Gateway> {
        self.gateways.iter().filter(|gateway| gateway.is_running())
    }

    /// Other replicas in a state, summed over the running gateways.
    pub(super) async fn peers(&self, state: &str) -> Result<f64, Failed> {
        self.sum(&format!("pointsman_replica_peers{{pool=\"mock\",state=\"{state}\"}}"), "").await
    }

    /// Waits until each running gateway receives the summaries of all others.
    pub(super) async fn until_connected(&self) -> Result<(), Failed> {
        let count = self.running().count();
        let all = (count * (count - 1)) as f64;
        until("summaries of all replicas", async || Ok(self.peers("live").await? >= all)).await?;
        Ok(())
    }

    /// Sum of the samples whose names begin with `name` and whose labels contain `label`, over the running gateways.
    pub(super) async fn sum(&self, name: &str, label: &str) -> Result<f64, Failed> {
        let mut sum = 0.0;
        for gateway in self.running() {
            let samples = gateway.metrics(name).await?;
            sum += samples.iter().filter(|(key, _)| key.contains(label)).map(|(_, value)| value).sum::<f64>();
        }
        Ok(sum)
    }

    /// Sets the faults of all engines.
    pub(super) fn set_faults(&self, faults: &Faults) -> Result<(), Failed> {
        Ok(self.engines.iter().try_for_each(|engine| engine.set_faults(faults.clone()))?)
    }

    /// Injected faults of all engines.
    pub(super) fn faults(&self) -> u64 {
        self.engines.iter().flat_map(|engine| engine.faults().done().into_values()).sum()
    }

    /// Active blocks that the running gateways count.
    pub(super) async fn active_blocks(&self) -> Result<u64, Failed> {
        let mut blocks = 0;
        for gateway in self.running() {
            blocks += gateway.active_blocks().await?;
        }
        Ok(blocks)
    }

    /// Waits until no running gateway counts load. The traffic must be paused.
    pub(super) async fn until_unloaded(&self) -> Result<(), Failed> {
        until("no counted load without requests", async || Ok(self.active_blocks().await? == 0)).await?;
        Ok(())
    }

    /// Failures since the last call.
    pub(super) fn take_failures(&self) -> Vec<String> {
        let failures = (0..self.gateways.len()).map(|n| (n, self.traffic.take_failures(n)));
        failures.flat_map(|(n, all)| all.into_iter().map(move |failure| format!("gateway {n}: {failure}"))).collect()
    }
}
