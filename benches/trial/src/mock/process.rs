//! A running mock engine: start, inspection, restart, shutdown. Shutdown and drop end all tasks.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;

use super::config::MockConfig;
use super::engine::{Engine, MockError, endpoint};
use super::faults::{FaultBoard, Faults};
use super::handover::HandoverCounters;
use super::http::{self, Server};
use super::rank::RankCounters;
use crate::engine::{Block, Tier};
use crate::kv_events::EventFormat;

/// A running engine. Dropping it ends it too, slightly later than [`MockEngine::shutdown`].
///
/// ```
/// use pointsman_trial::mock::{MockConfig, MockEngine, Tier};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let engine = MockEngine::start(MockConfig { data_parallel_size: 2, ..MockConfig::default() }).await?;
/// engine.quiet().await;
/// assert!(engine.held(1, Tier::Device).is_empty());
/// assert!(engine.event_endpoint(1).starts_with("tcp://127.0.0.1:"));
/// engine.shutdown().await;
/// # Ok(())
/// # }
/// ```
pub struct MockEngine {
    engine: Arc<Engine>,
    /// That of the API, and the bootstrap server, if the engine has one.
    servers: Vec<Server>,
}

impl MockEngine {
    /// Starts an engine. It accepts requests and publishes events when this function returns.
    ///
    /// # Errors
    /// The configuration is invalid, or a port is taken.
    pub async fn start(config: MockConfig) -> Result<Self, MockError> {
        Self::start_boxed(config).await
    }

    /// Boxed, so that the future is compiled once in this crate and not again in every crate that polls `start`.
    fn start_boxed(config: MockConfig) -> Pin<Box<dyn Future<Output = Result<Self, MockError>> + Send>> {
        Box::pin(async {
            let (engine, listeners) = Engine::start(config).await?;
            let engine = Arc::new(engine);
            let routes = [http::routes(Arc::clone(&engine)), http::bootstrap_routes(Arc::clone(&engine))];
            let servers = routes.into_iter().zip(listeners).map(|(routes, listener)| Server::start(routes, listener));
            let servers = servers.collect::<Result<_, _>>().map_err(|error| MockError::Serve(error.to_string()))?;
            Ok(Self { engine, servers })
        })
    }

    /// The configuration with the actual port numbers. An engine started again with it has the same addresses.
    #[must_use]
    pub fn config(&self) -> &MockConfig {
        &self.engine.config
    }

    /// Address of the HTTP server.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        SocketAddr::new(self.engine.config.host, self.engine.config.port)
    }

    /// URL of the HTTP server, without a path.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.address())
    }

    /// ZMQ endpoint of a rank's events.
    #[must_use]
    pub fn event_endpoint(&self, rank: u16) -> String {
        endpoint(self.engine.config.host, self.engine.event_port(rank))
    }

    /// ZMQ endpoint of a rank's replay requests.
    #[must_use]
    pub fn replay_endpoint(&self, rank: u16) -> String {
        endpoint(self.engine.config.host, self.engine.replay_port(rank))
    }

    /// Blocks that a rank holds in a tier now, parents before children. The published events may lag by the current
    /// step, unless the engine is quiet.
    ///
    /// # Panics
    /// The rank does not exist; also for the methods below.
    #[must_use]
    pub fn held(&self, rank: u16, tier: Tier) -> Vec<Arc<Block>> {
        self.engine.rank(rank).held(tier)
    }

    /// Sequence number of a rank's next event message: the number of messages of this incarnation, including those
    /// dropped by a fault.
    #[must_use]
    pub fn sequence_next(&self, rank: u16) -> u64 {
        self.engine.rank(rank).sequence_next()
    }

    /// Number of events in a rank's messages of this incarnation, those of LMCache's chunks not included.
    #[must_use]
    pub fn events_published(&self, rank: u16) -> u64 {
        self.engine.rank(rank).events_published()
    }

    /// Counters of a rank since the last restart.
    #[must_use]
    pub fn counters(&self, rank: u16) -> RankCounters {
        self.engine.rank(rank).counters()
    }

    /// Returns whether no request is running and every event is published, including events held back by faults.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        self.engine.ranks().iter().all(|rank| rank.is_quiet())
    }

    /// Waits until [`MockEngine::is_quiet`].
    pub async fn quiet(&self) {
        while !self.is_quiet() {
            for rank in self.engine.ranks().iter() {
                rank.quiet().await;
            }
        }
    }

    /// Restarts all ranks, like a process that crashes and restarts: requests lose their connections, caches and rings
    /// are empty, and sequence numbers start at 0. Returns when the new incarnation publishes.
    ///
    /// # Errors
    /// An invalid format, in which case nothing restarts, or a port that another process took, in which case the engine
    /// stays stopped.
    pub async fn restart(&self, format: impl Into<EventFormat>) -> Result<(), MockError> {
        self.engine.restart(format.into()).await
    }

    /// Current faults and their counters.
    #[must_use]
    pub fn faults(&self) -> &FaultBoard {
        &self.engine.faults
    }

    /// Counters of disaggregated serving, all zero without [`MockConfig::handover`].
    #[must_use]
    pub fn handover(&self) -> HandoverCounters {
        self.engine.handover.as_ref().map(|board| board.counters()).unwrap_or_default()
    }

    /// Replaces the current faults. The end of a pause sends the messages that were held back.
    ///
    /// # Errors
    /// An invalid value; the faults stay unchanged.
    pub fn set_faults(&self, faults: Faults) -> Result<(), MockError> {
        self.engine.set_faults(faults)
    }

    /// Stops all tasks and returns when all ports are free.
    pub async fn shutdown(self) {
        for server in self.servers {
            server.shutdown().await;
        }
        self.engine.shutdown().await;
    }
}
