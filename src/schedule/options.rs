//! Request options as the scheduler reads them: times resolved, tenant names hashed. Most requests have none.

use std::sync::Arc;

use crate::config::RouterConfigOverride;
use crate::protocol::Timestamp;
use crate::queue::TenantKey;
use crate::select::Constraints;
use crate::session::SessionId;

/// Options of one request, resolved against clock and configuration. The default sets none.
///
/// ```
/// use pointsman::schedule::ResolvedOptions;
///
/// let urgent = ResolvedOptions { strict_priority: 1, do_not_queue: true, ..ResolvedOptions::default() };
/// assert!(urgent.due.is_none());
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ResolvedOptions {
    /// Whose it is: tenants take turns in the queue.
    pub tenant: TenantKey,
    /// Higher leaves the queue first, whatever else.
    pub strict_priority: u32,
    /// Seconds by which it goes ahead of its tenant's other requests; at least 0.
    pub priority_jump: f64,
    /// When it is too late: it is then answered as expired.
    pub due: Option<Timestamp>,
    /// The class or family it waits in; the default one where absent.
    pub policy_class: Option<Arc<str>>,
    /// Whether it would rather be refused than wait.
    pub do_not_queue: bool,
    /// Who may serve it.
    pub constraints: Constraints,
    /// The LoRA adapter it runs under.
    pub lora_name: Option<Arc<str>>,
    /// Its session.
    pub session_id: Option<SessionId>,
    /// Output tokens that the caller expects.
    pub expected_output_tokens: Option<u32>,
    /// Output tokens that its session or tenant had on average, where that is known.
    pub usual_output_tokens: Option<f64>,
    /// Output tokens that it may have at most. A ceiling and no forecast: it only caps what is expected.
    pub output_tokens_max: Option<u32>,
    /// Whether its answer comes whole, so that nobody reports when its prefill is done.
    pub not_streamed: bool,
    /// Settings that are otherwise for it.
    pub overrides: RouterConfigOverride,
}
