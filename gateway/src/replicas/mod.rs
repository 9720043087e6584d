//! Transports between the replicas of a gateway.
//!
//! [`Replicas`] starts the transport of the `[replicas]` settings, whose [`ReplicaBus`] the routers of all models share.
//! Transports authenticate replicas; a message of others changes nothing and is counted.

mod bus;
mod direct;
mod lives;
pub(crate) mod meters;
mod nats;
mod tls;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use pointsman::{ReplicaBus, ReplicaId, ReplicaLife};
use ring::digest;
use ring::rand::{SecureRandom as _, SystemRandom};
use tokio::net::TcpListener;

use crate::net::listener::{PassedSockets, Reserved};
use crate::observe::clock::unix_ms;
use crate::settings::{ReplicasSettings, Secret};
use bus::Transport;
use direct::{DirectBus, Peers};
use nats::NatsBus;
use tls::MutualTls;

/// Why a transport cannot start.
pub type ReplicasError = Box<dyn std::error::Error + Send + Sync>;

/// The running transport of a gateway. Dropping it closes its connections; [`Replicas::leave`] also sends what is
/// queued.
#[derive(Debug)]
pub struct Replicas {
    transport: Arc<dyn Transport>,
    address: Option<SocketAddr>,
}

impl Replicas {
    /// Starts the transport of valid settings, with the content of `key_file`, on the current runtime. Peers are
    /// connected in the background, so no failure of theirs is an error. `reuse_port` shares the listen address.
    ///
    /// # Errors
    /// The address cannot be used, a file of TLS cannot be read, or the system has no random bytes.
    pub fn start(settings: &ReplicasSettings, reuse_port: bool, key: Option<Secret>) -> Result<Self, ReplicasError> {
        let Some(url) = &settings.nats else {
            let address = settings.listen.ok_or("replicas.listen is absent, must be an address")?;
            let passed = &mut PassedSockets::default();
            let listener = Reserved::of(address, "replicas.listen", reuse_port, passed)?.listen()?;
            return Self::start_on(listener, settings, key);
        };
        // Unreadable files are detected before anything runs.
        mutual_tls(settings)?;
        let (life, tls) = (life(settings)?, tls_files(settings).map(|files| files.map(PathBuf::clone)));
        tracing::info!(replica = %life.replica, incarnation = life.incarnation, url, "replicas started");
        Ok(Self { transport: Arc::new(NatsBus::start(life, url.clone(), key, tls)), address: None })
    }

    /// Like [`Replicas::start`], with a bound socket in place of `listen`.
    ///
    /// # Errors
    /// As [`Replicas::start`].
    pub fn start_on(
        listener: TcpListener,
        settings: &ReplicasSettings,
        key: Option<Secret>,
    ) -> Result<Self, ReplicasError> {
        let tls = mutual_tls(settings)?;
        let (life, address, peers) = (life(settings)?, listener.local_addr().ok(), peers_of(settings));
        let listen = address.map(tracing::field::display);
        tracing::info!(replica = %life.replica, incarnation = life.incarnation, address = listen, "replicas started");
        Ok(Self { transport: Arc::new(DirectBus::start(listener, life, peers, key, tls)), address })
    }

    /// The bus of all models.
    pub fn bus(&self) -> Arc<dyn ReplicaBus> {
        self.transport.clone()
    }

    /// Listen address for other replicas.
    pub fn address(&self) -> Option<SocketAddr> {
        self.address
    }

    /// Sends queued messages for at most one second, then leaves the other replicas.
    pub async fn leave(self) {
        self.transport.leave().await;
    }
}

fn mutual_tls(settings: &ReplicasSettings) -> Result<Option<MutualTls>, String> {
    tls_files(settings).map(MutualTls::read).transpose().map_err(|error| format!("replicas: {error}"))
}

/// Certificate chain, key and authority, if all are given.
fn tls_files(settings: &ReplicasSettings) -> Option<[&PathBuf; 3]> {
    let ReplicasSettings { tls_certificate_file, tls_key_file, tls_ca_file, .. } = settings;
    Some([tls_certificate_file.as_ref()?, tls_key_file.as_ref()?, tls_ca_file.as_ref()?])
}

fn life(settings: &ReplicasSettings) -> Result<ReplicaLife, ReplicasError> {
    Ok(ReplicaLife { replica: replica_id(settings.id.as_deref())?, incarnation: unix_ms() << 20 | random()? >> 44 })
}

fn peers_of(settings: &ReplicasSettings) -> Peers {
    match &settings.dns {
        Some(name) => Peers::Dns(name.clone()),
        None => Peers::List(settings.peers.clone()),
    }
}

/// Id from the configured name; random without a name, because names of machines need not be unique.
fn replica_id(name: Option<&str>) -> Result<ReplicaId, ReplicasError> {
    let mut id = [0; 8];
    match name {
        Some(name) => id.copy_from_slice(&digest::digest(&digest::SHA256, name.as_bytes()).as_ref()[..8]),
        None => return random().map(ReplicaId),
    }
    Ok(ReplicaId(u64::from_le_bytes(id)))
}

fn random() -> Result<u64, ReplicasError> {
    let mut bytes = [0; 8];
    SystemRandom::new().fill(&mut bytes).map_err(|_| "replicas: the system has no random bytes")?;
    Ok(u64::from_le_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_stable_by_name_and_random_without() {
        let id = |name| replica_id(name).expect("an id");
        assert_eq!(id(Some("gateway-0")), id(Some("gateway-0")));
        assert_ne!(id(Some("gateway-0")), id(Some("gateway-1")));
        assert_ne!(id(None), id(None));
    }
}
