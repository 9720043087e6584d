//! The router handle: cloned and dropped by embedders.

use std::collections::BTreeSet;
use std::sync::Arc;

use ractor::ActorRef;

use super::edge::Edge;
use super::intake::Intake;
use super::shared_cache::SharedCache;
use crate::actors::strands::Strands;
use crate::actors::supervisor::SupervisorMsg;
use crate::actors::views::Views;
use crate::error::Down;
use crate::membership::WatchedActor;
use crate::protocol::WorkerRank;

/// Health of a router.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Health {
    /// `Ok` while the router accepts requests.
    pub state: Result<(), Down>,
    /// Registered ranks.
    pub ranks: usize,
    /// Ranks whose index contents were lost and must be sent again. They are chosen by load alone.
    pub cold: BTreeSet<WorkerRank>,
    /// Problems with the router's view of the fleet, one sentence each; empty if there are none.
    pub problems: Vec<String>,
    /// Actors that hang now, in order. The router is not ready while one of them is essential.
    pub hung: Vec<WatchedActor>,
    /// Actors restarted since the start.
    pub restarts: u64,
    /// Bookings and requests that have not ended.
    pub leases: usize,
}

/// A running router of one pool: one model, one role, one block size.
///
/// Cheap to clone. Dropping the last handle stops every actor. Must be used inside a tokio runtime with time enabled.
#[derive(Clone)]
pub struct Router {
    pub(super) inner: Arc<Inner>,
}

pub(super) struct Inner {
    pub(super) edge: Arc<Edge>,
    pub(super) intake: Intake,
    pub(super) views: Views,
    pub(super) strands: Strands,
    pub(super) shared_cache: Option<Arc<dyn SharedCache>>,
    pub(super) supervisor: ActorRef<SupervisorMsg>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.supervisor.stop(None);
    }
}

impl std::fmt::Debug for Router {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Router").field("health", &self.health()).finish()
    }
}

impl Router {
    pub(super) fn edge(&self) -> &Arc<Edge> {
        &self.inner.edge
    }

    pub(super) fn intake(&self) -> &Intake {
        &self.inner.intake
    }

    pub(super) fn views(&self) -> &Views {
        &self.inner.views
    }

    pub(super) fn strands(&self) -> &Strands {
        &self.inner.strands
    }

    pub(super) fn shared_cache(&self) -> Option<&Arc<dyn SharedCache>> {
        self.inner.shared_cache.as_ref()
    }

    pub(super) fn supervisor(&self) -> &ActorRef<SupervisorMsg> {
        &self.inner.supervisor
    }
}
