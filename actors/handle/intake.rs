//! Admission of requests at the handle: the waiting room, the request directory, and the inputs of preparation.

use std::sync::Arc;

use tokio::sync::OwnedSemaphorePermit;

use crate::actors::delivery::gate::Gate;
use crate::actors::delivery::strand::Strand;
use crate::actors::scheduler::Scheduler;
use crate::config::RouterConfig;
use crate::directory::Directory;
use crate::error::RouteError;
use crate::load::OutputLengths;
use crate::predict::SpeculationModel;

/// Admission state of a request before it is sent to an actor.
pub(super) struct Intake {
    pub(super) directory: Arc<Directory>,
    /// One permit per request without a reply.
    pub(super) waiting_room: Arc<Gate>,
    /// Mean output lengths, by session and tenant.
    pub(super) output_lengths: Arc<OutputLengths>,
    /// Whether any class queues requests.
    pub(super) queueing: bool,
    /// Whether decisions create speculative entries.
    pub(super) speculates: bool,
}

impl Intake {
    pub(super) fn new(config: &RouterConfig, directory: Arc<Directory>, output_lengths: Arc<OutputLengths>) -> Self {
        Self {
            directory,
            waiting_room: Arc::new(Gate::new(config.queue.requests_max)),
            output_lengths,
            queueing: config.queue.is_enabled(),
            speculates: SpeculationModel::of(config).is_some(),
        }
    }

    /// Takes a permit of the waiting room.
    pub(super) fn admit(&self, scheduler: &Strand<Scheduler>) -> Result<OwnedSemaphorePermit, RouteError> {
        let room = Arc::clone(self.waiting_room.room(scheduler));
        let overloaded = || RouteError::Overloaded { requests_max: self.waiting_room.permits_max() };
        room.try_acquire_owned().map_err(|_| overloaded())
    }
}
