//! What a request sees of the gateway.

use std::sync::Arc;
use std::time::Duration;

use pointsman::{RequestOptions, Router};

use super::hints::EngineSessions;
use super::ids::Ids;
use crate::admission::admit::Admission;
use crate::net::upstream::Upstream;
use crate::observe::otlp::Tracing;
use crate::observe::requests::Meters;
use crate::pools::models::Models;
use crate::settings::Settings;

/// State for requests. A reload replaces it; a request keeps that of its start until the end of its response.
#[derive(Clone)]
pub(crate) struct RequestContext {
    pub(crate) settings: Arc<Settings>,
    pub(crate) models: Arc<Models>,
    pub(crate) admission: Admission,
    pub(crate) upstream: Upstream,
    pub(crate) meters: Arc<Meters>,
    /// Exporter of traces; `None` without `gateway.otlp_endpoint`.
    pub(crate) tracing: Option<Arc<Tracing>>,
    pub(crate) ids: Arc<Ids>,
    pub(crate) engine_sessions: Arc<EngineSessions>,
}

impl RequestContext {
    /// Longest wait for a placement: `queue_timeout_ms`, and the hold of a program.
    pub(crate) fn placement_timeout(&self, router: &Router, options: &RequestOptions) -> Duration {
        let hold = options.session_id.as_ref().map(|_| router.config().queue.hold_of(options.policy_class.as_deref()));
        Duration::from_millis(self.settings.gateway.queue_timeout_ms) + hold.unwrap_or_default()
    }
}
