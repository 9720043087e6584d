//! State of a mock engine: addresses, faults, and the current incarnation of all ranks.
//!
//! A restart discards the state that a restarted process loses (cache, sequence numbers, ring, running requests) and keeps
//! addresses and faults. [`super::http`] serves the requests, [`super::process`] is the running whole.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use thiserror::Error;
use tokio::sync::{Mutex, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::sleep;

use super::config::MockConfig;
use super::faults::{FaultBoard, Faults};
use super::handover::{EngineFacts, HandoverBoard};
use super::rank::{Pace, RankDriver};
use super::sockets::{EventSocket, ReplaySocket, listen};
use crate::kv_events::{Encoder, EventFormat};

/// Maximum number of attempts of a restart to bind its previous ports, and the delay between attempts.
const LISTEN_TRIES_MAX: u32 = 200;
const LISTEN_TRY: Duration = Duration::from_millis(10);

/// Uses of an address, with the flag that selects it.
const FOR_HTTP: &str = "for HTTP (--port)";
const FOR_EVENTS: &str = "for KV events (--event-port, by default the HTTP port + 1000)";
const FOR_REPLAYS: &str = "for replays (--replay-port, by default the event port + 100)";
const FOR_BOOTSTRAP: &str = "for the bootstrap server (--bootstrap-port)";

/// Default port of the bootstrap server.
pub(crate) const BOOTSTRAP_PORT: u16 = 8998;

/// Errors of starting or restarting an engine.
#[derive(Debug, Error)]
pub enum MockError {
    /// A setting is invalid.
    #[error("{0}")]
    Config(String),
    /// Listening on an address failed.
    #[error("cannot listen on {address} {purpose}: {reason}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// Use of the address, and the flag that selects it.
        purpose: &'static str,
        /// Reason from the operating system.
        reason: String,
    },
    /// A bound socket could not be served.
    #[error("cannot serve: {0}")]
    Serve(String),
}

/// Engine state shared by all requests.
pub(crate) struct Engine {
    pub(crate) config: MockConfig,
    pub(crate) faults: Arc<FaultBoard>,
    lora_ids: Arc<BTreeMap<String, u32>>,
    incarnation: RwLock<Arc<Incarnation>>,
    /// Held while an incarnation is being stopped.
    restarting: Mutex<()>,
    request_next: AtomicU64,
    /// Level of the engine's sleep.
    pub(crate) sleep: watch::Sender<Option<u8>>,
    /// Disaggregated serving, if configured.
    pub(crate) handover: Option<Arc<HandoverBoard>>,
}

/// All ranks between two starts.
struct Incarnation {
    format: EventFormat,
    /// Event and replay port of each rank.
    ports: Vec<(u16, u16)>,
    ranks: Arc<[Arc<RankDriver>]>,
    tasks: Mutex<Vec<Task>>,
}

/// A task and its stop signal; dropping the sender stops the task too.
struct Task {
    stop: oneshot::Sender<()>,
    handle: JoinHandle<()>,
}

impl Engine {
    /// Starts the ranks. Returns the listeners for HTTP and of the bootstrap server, if the engine has one.
    pub(super) async fn start(mut config: MockConfig) -> Result<(Self, Vec<TcpListener>), MockError> {
        config.validate().map_err(MockError::Config)?;
        let count = config.data_parallel_size;
        let mut listeners = listen_all(config.host, (config.port != 0).then_some(config.port), 1, FOR_HTTP)?;
        let chosen = config.port == 0;
        config.port = port_of(&listeners)?;
        let offset = |base: u16, offset: u16| {
            let too_high = || MockError::Config(format!("port {base} leaves no room for a port {offset} above it"));
            base.checked_add(offset).ok_or_else(too_high)
        };
        let event_port = match config.event_port {
            None if !chosen => Some(offset(config.port, 1_000)?),
            given => given,
        };
        let events = listen_all(config.host, event_port, count, FOR_EVENTS)?;
        let replay_port = match config.replay_port {
            None if event_port == Some(0) => event_port,
            None if !chosen => Some(offset(port_of(&events)?, 100)?),
            given => given,
        };
        let replays = listen_all(config.host, replay_port, count, FOR_REPLAYS)?;
        // Assigned ports are others after a restart.
        config.event_port = event_port.filter(|port| *port == 0).or(Some(port_of(&events)?));
        config.replay_port = replay_port.filter(|port| *port == 0).or(Some(port_of(&replays)?));

        if config.has_bootstrap_server() {
            let port = config.bootstrap_port.or((!chosen).then_some(BOOTSTRAP_PORT)).filter(|port| *port != 0);
            let bootstrap = listen_all(config.host, port, 1, FOR_BOOTSTRAP)?;
            config.bootstrap_port = Some(port_of(&bootstrap)?);
            listeners.extend(bootstrap);
        }
        let handover = config.handover.map(|protocol| {
            let address = SocketAddr::new(config.host, config.port);
            let facts = EngineFacts { protocol, role: config.role, address, ranks: config.data_parallel_size };
            HandoverBoard::new(facts, config.handover_failure, Duration::from_millis(config.block_lease_ms))
        });

        let faults = Arc::new(FaultBoard::new(config.seed, config.faults.clone()));
        let lora_ids: Arc<BTreeMap<_, _>> = Arc::new(config.loras.iter().cloned().zip(1..).collect());
        let incarnation =
            Incarnation::start(&config, config.events(), &faults, &lora_ids, events.into_iter().zip(replays)).await?;
        let engine = Self {
            incarnation: RwLock::new(Arc::new(incarnation)),
            restarting: Mutex::new(()),
            request_next: AtomicU64::new(0),
            sleep: watch::Sender::new(None),
            handover,
            config,
            faults,
            lora_ids,
        };
        Ok((engine, listeners))
    }

    /// Stops the ranks for good.
    pub(super) async fn shutdown(&self) {
        let _exclusive = self.restarting.lock().await;
        self.stop().await;
    }

    /// Stops the ranks and returns when their ports are free.
    async fn stop(&self) {
        let incarnation = self.incarnation();
        incarnation.stop().await;
        if let Some(board) = &self.handover {
            board.restart();
        }
    }

    /// Runs on its own task: a cancelled caller must not leave the engine stopped.
    pub(crate) async fn restart(self: &Arc<Self>, format: EventFormat) -> Result<(), MockError> {
        format.validate().map_err(MockError::Config)?;
        let engine = Arc::clone(self);
        let restarted = tokio::spawn(async move { engine.restart_in(format).await }).await;
        restarted.unwrap_or_else(|error| Err(MockError::Serve(error.to_string())))
    }

    async fn restart_in(&self, format: EventFormat) -> Result<(), MockError> {
        let _exclusive = self.restarting.lock().await;
        self.stop().await;
        let count = self.config.data_parallel_size;
        let events = self.listen_again(self.config.event_port, count, FOR_EVENTS).await?;
        let replays = self.listen_again(self.config.replay_port, count, FOR_REPLAYS).await?;
        let sockets = events.into_iter().zip(replays);
        let after = Incarnation::start(&self.config, format, &self.faults, &self.lora_ids, sockets).await?;
        *self.incarnation.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(after);
        Ok(())
    }

    async fn listen_again(
        &self,
        first: Option<u16>,
        count: u16,
        purpose: &'static str,
    ) -> Result<Vec<TcpListener>, MockError> {
        let mut tries = 1;
        loop {
            match listen_all(self.config.host, first, count, purpose) {
                Err(_) if tries < LISTEN_TRIES_MAX => tries += 1,
                answer => return answer,
            }
            sleep(LISTEN_TRY).await;
        }
    }

    pub(crate) fn set_faults(&self, faults: Faults) -> Result<(), MockError> {
        faults.validate().map_err(MockError::Config)?;
        self.faults.replace(faults);
        Ok(())
    }

    pub(crate) fn ranks(&self) -> Arc<[Arc<RankDriver>]> {
        Arc::clone(&self.incarnation().ranks)
    }

    /// Event format since the last restart.
    pub(crate) fn format(&self) -> EventFormat {
        self.incarnation().format
    }

    /// Returns a unique request number.
    pub(crate) fn request_number(&self) -> u64 {
        self.request_next.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn event_port(&self, rank: u16) -> u16 {
        self.incarnation().ports[usize::from(rank)].0
    }

    pub(crate) fn replay_port(&self, rank: u16) -> u16 {
        self.incarnation().ports[usize::from(rank)].1
    }

    pub(super) fn rank(&self, rank: u16) -> Arc<RankDriver> {
        Arc::clone(&self.ranks()[usize::from(rank)])
    }

    fn incarnation(&self) -> Arc<Incarnation> {
        Arc::clone(&self.incarnation.read().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Incarnation {
    async fn start(
        config: &MockConfig,
        format: EventFormat,
        faults: &Arc<FaultBoard>,
        lora_ids: &Arc<BTreeMap<String, u32>>,
        listeners: impl Iterator<Item = (TcpListener, TcpListener)>,
    ) -> Result<Self, MockError> {
        let serve = |error: zeromq::ZmqError| MockError::Serve(error.to_string());
        let pace = Pace { time_scale: config.time_scale };
        let (mut ranks, mut tasks, mut ports) = (Vec::new(), Vec::new(), Vec::new());
        for (number, (events, replays)) in (0..config.data_parallel_size).zip(listeners) {
            let encoder =
                Encoder { format, block_size: config.block_size, rank: number.into(), lora_ids: Arc::clone(lora_ids) };
            let model = crate::engine::Rank::new(config.engine(number, format.dialect))
                .map_err(|error| MockError::Config(error.to_string()))?;
            let rank = Arc::new(RankDriver::new(model, encoder, config.replay_messages_max, Arc::clone(faults)));
            ports.push((port_of(std::slice::from_ref(&events))?, port_of(std::slice::from_ref(&replays))?));
            let events = EventSocket::open(events).await.map_err(serve)?;
            let replays = ReplaySocket::open(replays, format.dialect.replays_with_topic()).await.map_err(serve)?;
            let driven = Arc::clone(&rank);
            tasks.push(Task::spawn(|stop| async move { driven.drive(events, pace, stop).await.close().await }));
            let (replayed, faults) = (Arc::clone(&rank), Arc::clone(faults));
            let replay = move |sequence| replayed.replay(sequence);
            tasks.push(Task::spawn(|stop| replays.serve(replay, faults, stop)));
            ranks.push(rank);
        }
        Ok(Self { format, ports, ranks: ranks.into(), tasks: Mutex::new(tasks) })
    }

    /// Stops all ranks and returns when their ports are free. Idempotent.
    async fn stop(&self) {
        self.ranks.iter().for_each(|rank| rank.stop());
        let tasks = std::mem::take(&mut *self.tasks.lock().await);
        for Task { stop, handle } in tasks {
            // Both fail if the task has already ended.
            let _ = stop.send(());
            let _ = handle.await;
        }
    }
}

impl Task {
    fn spawn<F: Future<Output = ()> + Send + 'static>(task: impl FnOnce(oneshot::Receiver<()>) -> F) -> Self {
        let (stop, stopped) = oneshot::channel();
        Self { stop, handle: tokio::spawn(task(stopped)) }
    }
}

fn listen_all(
    host: IpAddr,
    first: Option<u16>,
    count: u16,
    purpose: &'static str,
) -> Result<Vec<TcpListener>, MockError> {
    listen(host, first, count).map_err(|(address, reason)| MockError::Listen { address, purpose, reason })
}

fn port_of(listeners: &[TcpListener]) -> Result<u16, MockError> {
    let first = listeners.first().expect("at least one port is requested");
    first.local_addr().map(|address| address.port()).map_err(|error| MockError::Serve(error.to_string()))
}

pub(super) fn endpoint(host: IpAddr, port: u16) -> String {
    format!("tcp://{}", SocketAddr::new(host, port))
}
