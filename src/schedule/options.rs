//! Request options as the scheduler reads them: times resolved, tenant names hashed. Most requests have none.

use std::sync::Arc;
use std::time::Duration;

use crate::config::RouterConfigOverride;
use crate::protocol::Timestamp;
use crate::queue::TenantKey;
use crate::select::Constraints;
use crate::session::SessionId;

/// Options of one request, resolved against clock and configuration. The default sets none.
///
/// ```
/// use pointsman::internals::schedule::ResolvedOptions;
///
/// let urgent = ResolvedOptions { strict_priority: 1, do_not_queue: true, ..ResolvedOptions::default() };
/// assert!(urgent.due.is_none());
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ResolvedOptions {
    /// Tenant key for fair queueing.
    pub tenant: TenantKey,
    /// Strict priority, higher first.
    pub strict_priority: u32,
    /// Head start in seconds before other requests of its tenant; at least 0.
    pub priority_jump: f64,
    /// Deadline of the placement, and of a first token that must not be late; the request then expires.
    pub due: Option<Timestamp>,
    /// Queue class or family; the default class if absent.
    pub policy_class: Option<Arc<str>>,
    /// Whether the request is rejected instead of queued.
    pub do_not_queue: bool,
    /// Constraints on the rank.
    pub constraints: Constraints,
    /// LoRA adapter.
    pub lora_name: Option<Arc<str>>,
    /// Session.
    pub session_id: Option<SessionId>,
    /// Key of its program.
    pub program: u64,
    /// Output tokens expected by the caller.
    pub expected_output_tokens: Option<u32>,
    /// Mean output tokens of its session or tenant, if known.
    pub usual_output_tokens: Option<f64>,
    /// Maximum output tokens: a cap of the expected length, not an estimate.
    pub output_tokens_max: Option<u32>,
    /// Whether the response is not streamed, so that no first token is reported.
    pub not_streamed: bool,
    /// Latency targets, if any.
    pub targets: Option<ResolvedTargets>,
    /// Overrides of the configuration.
    pub overrides: RouterConfigOverride,
}

/// Latency targets of one request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResolvedTargets {
    /// Longest time from the request to its first token.
    pub ttft: Option<Duration>,
    /// The same as a time.
    pub ttft_due: Option<Timestamp>,
    /// Longest mean time between two tokens.
    pub itl: Option<Duration>,
    /// Whether the request is rejected if no rank is predicted to meet them.
    pub rejects: bool,
}

impl ResolvedOptions {
    /// Whether the request may exclude or prefer ranks by itself.
    pub(super) fn restricts_ranks(&self) -> bool {
        !self.constraints.is_empty() || self.lora_name.is_some() || self.targets.is_some()
    }
}
