//! Views: plain data that one owner publishes and other actors and the handle read without a message.

pub(crate) mod block_size;
pub(crate) mod decisions;
pub(crate) mod fleet;
pub(crate) mod kv_source;
pub(crate) mod published;
pub(crate) mod rank;
pub(crate) mod rank_counts;
pub(crate) mod rank_report;
#[cfg(feature = "zmq")]
pub(crate) mod restores;
pub(crate) mod shadows;
pub(crate) mod slot_table;
pub(crate) mod status;
pub(crate) mod wake_flag;
pub(crate) mod worker;

use std::collections::BTreeSet;
use std::sync::Arc;

use tokio::sync::watch;

use crate::config::RouterConfig;
use crate::health::Exclusions;
use crate::membership::{DiscoveryStatus, WatchedActor, initial_block_size};
use crate::protocol::{Timestamp, WorkerRank};
use crate::replica::PeerStatus;
use crate::select::RankConditions;
use block_size::BlockSizeCell;
use decisions::DecisionRecords;
use fleet::Fleet;
use published::Published;
use rank::RankEntries;
use shadows::ShadowTotals;
use status::RouterStatus;
use wake_flag::WakeFlag;

/// Other replicas at one time.
#[derive(Default)]
pub(crate) struct ReplicaPeers {
    pub(crate) at: Timestamp,
    pub(crate) statuses: Vec<PeerStatus>,
}

/// The views of one router, for the supervisor and the handle. An actor gets only the ones that it reads or writes.
#[derive(Clone)]
pub(crate) struct Views {
    /// Block size in force. Written by the supervisor.
    pub(crate) block_size: Arc<BlockSizeCell>,
    pub(crate) status: Arc<RouterStatus>,
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) ranks: Arc<RankEntries>,
    /// Ranks whose index contents were lost and must be sent again. Written by the supervisor.
    pub(crate) cold: watch::Sender<BTreeSet<WorkerRank>>,
    /// By source, in the order given. Written by the supervisor.
    pub(crate) discovery: watch::Sender<Vec<DiscoveryStatus>>,
    /// Rank conditions as the embedder reports them.
    pub(crate) conditions: Arc<Published<RankConditions>>,
    /// Ranks excluded for their health. Written by the health actor.
    pub(crate) exclusions: Arc<Published<Exclusions>>,
    pub(crate) wake: Arc<WakeFlag>,
    /// Actors that hang now. Written by the watchdog.
    pub(crate) hung: Arc<Published<Vec<WatchedActor>>>,
    /// The last recorded decisions. Written by the scheduler.
    pub(crate) decisions: Arc<DecisionRecords>,
    /// Totals of shadow policies. Written by the scheduler.
    pub(crate) shadows: Arc<Published<Vec<ShadowTotals>>>,
    /// Other replicas. Written by the replica actor.
    pub(crate) replica_peers: Arc<Published<ReplicaPeers>>,
    /// Contents of snapshots. Written by the handle, taken by the readers of KV events.
    #[cfg(feature = "zmq")]
    pub(crate) restores: Arc<restores::PendingRestores>,
}

impl Views {
    /// The views of a router that has not started, with this configuration.
    pub(crate) fn new(config: &RouterConfig) -> Self {
        Self {
            block_size: Arc::new(BlockSizeCell::new(initial_block_size(config))),
            status: Arc::default(),
            fleet: Arc::default(),
            ranks: Arc::default(),
            cold: watch::Sender::default(),
            discovery: watch::Sender::default(),
            conditions: Arc::default(),
            exclusions: Arc::default(),
            wake: Arc::default(),
            hung: Arc::default(),
            decisions: Arc::new(DecisionRecords::new(&config.recorder)),
            shadows: Arc::default(),
            replica_peers: Arc::default(),
            #[cfg(feature = "zmq")]
            restores: Arc::default(),
        }
    }

    /// Ranks that can serve: registered, neither draining nor cordoned, reachable and not ejected; 0 when the router is
    /// down.
    pub(crate) fn eligible_ranks(&self) -> usize {
        if self.status.up().is_err() {
            return 0;
        }
        let (conditions, exclusions, workers) = (self.conditions.get(), self.exclusions.get(), self.fleet.workers());
        let members = workers.iter().filter(|worker| worker.takes_requests()).flat_map(|worker| &worker.ranks);
        let reachable =
            members.filter(|rank| !conditions.unavailable.contains(rank) && !exclusions.down.contains(rank));
        let reachable = reachable.filter(|rank| !exclusions.asleep.contains(rank));
        let healthy = reachable.clone().filter(|rank| !exclusions.ejected.contains(rank)).count();
        // If all reachable ranks are ejected they serve nevertheless.
        if healthy > 0 { healthy } else { reachable.count() }
    }
}
