//! Context of a request at the scheduler.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, oneshot};

use crate::actors::delivery::reply::Reply;
use crate::actors::telemetry::PhaseTimestamps;
use crate::directory::Lease;
use crate::predict::SpeculativePrompt;

/// Context of one request at the scheduler: its lease and its reply channel.
pub(crate) struct RequestContext {
    /// Present for a request that books.
    pub(crate) lease: Option<Arc<Lease>>,
    pub(crate) answer: oneshot::Sender<Reply>,
    /// Permit of the waiting room, released when the request has its reply or is lost.
    pub(crate) permit: OwnedSemaphorePermit,
    /// Speculative entry that the booking creates, if entries are speculative.
    pub(crate) speculative_prompt: Option<Box<SpeculativePrompt>>,
    /// Present if the phases of the request are measured.
    pub(crate) timestamps: Option<Arc<PhaseTimestamps>>,
}

impl RequestContext {
    /// Request id of a booking; empty for a query.
    pub(super) fn request_id(&self) -> &str {
        self.lease.as_ref().map_or("", |lease| lease.request_id())
    }
}
