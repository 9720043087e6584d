//! What a request sees of the gateway.

use std::sync::Arc;

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
}
