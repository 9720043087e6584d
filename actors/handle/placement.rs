//! The caller's handle for its booking.

use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::lease_guard::LeaseGuard;
use crate::actors::sequence::table::SequenceAddress;
use crate::actors::telemetry::{Prediction, RoutePhases};
use crate::actors::views::rank::RankEntry;
use crate::error::RequestError;
use crate::health::Outcome;
use crate::ingest::StreamState;
use crate::load::{TokenPace, Weight};
use crate::protocol::{BlockHash, Timestamp};
use crate::schedule::{Decision, ResolvedTargets};

/// Minimum number of tokens after the first from which a mean time between tokens is compared with its prediction.
const INTERVALS_MIN: u32 = 8;

/// Placement of a request on a rank. The booking lasts as long as this value. Dereferences to the [`Decision`].
///
/// Report the progress of the request, and drop the placement at its end, for whatever reason. A placement does not
/// keep its router alive and may outlive it.
#[must_use = "dropping a placement frees its booking"]
pub struct Placement {
    guard: LeaseGuard,
    phases: Option<RoutePhases>,
    address: Arc<SequenceAddress>,
    decision: Decision,
    prediction: Prediction,
    /// Blocks of the prompt, if a report can prove that they are cached.
    prompt: Option<Arc<[BlockHash]>>,
    targets: Option<ResolvedTargets>,
    /// Pace of the output, for a prediction or a target of it.
    pace: Mutex<TokenPace>,
    /// Whether an outcome has been reported.
    told_outcome: AtomicBool,
}

impl Placement {
    pub(super) fn new(
        (guard, phases): (LeaseGuard, Option<RoutePhases>),
        address: Arc<SequenceAddress>,
        decision: Decision,
        (prediction, prompt): (Prediction, Option<Arc<[BlockHash]>>),
        targets: Option<ResolvedTargets>,
    ) -> Self {
        let (pace, told_outcome) = (Mutex::default(), AtomicBool::new(false));
        Self { guard, phases, address, decision, prediction, prompt, targets, pace, told_outcome }
    }

    /// Endpoint of the rank's worker, from its configuration.
    #[must_use]
    pub fn endpoint(&self) -> &str {
        &self.address.entry.endpoint
    }

    /// Number of the rank at its engine: its index among the ranks of the worker, from 0, regardless of its number in a
    /// larger group. vLLM and SGLang read it from `X-data-parallel-rank`. `None` for a worker with a single rank, which
    /// needs no header.
    #[must_use]
    pub fn rank_at_worker(&self) -> Option<u32> {
        Some(self.address.entry.number_at_worker.load(Ordering::Relaxed)).filter(|number| *number != RankEntry::ALONE)
    }

    #[cfg(feature = "tower")]
    pub(super) fn endpoint_shared(&self) -> Arc<str> {
        Arc::clone(&self.address.entry.endpoint)
    }

    pub(super) fn block_size(&self) -> u32 {
        self.guard.edge.block_size.tokens()
    }

    /// Request id of the booking.
    #[must_use]
    pub fn request_id(&self) -> &str {
        self.guard.lease.request_id()
    }

    /// Durations of the phases, for requests with [`RequestOptions::phases`](crate::RequestOptions::phases) and a sample
    /// of the others. The last one ended when the router returned this placement.
    #[must_use]
    pub fn phases(&self) -> Option<RoutePhases> {
        self.phases
    }

    /// Reports the first token: the rank has no prefill left for this request. Repeated calls have no effect.
    pub fn prefill_completed(&self) {
        let (edge, lease) = (&self.guard.edge, &self.guard.lease);
        if lease.complete_prefill() {
            if let Some(predicted) = self.predicted_ttft() {
                let elapsed = edge.clock.now().since(lease.booked_at());
                edge.meters.predictions.first_token(predicted, elapsed);
            }
            if let Some(due) = self.targets.and_then(|targets| targets.ttft_due) {
                edge.meters.targets.ttft.count(edge.clock.now() <= due);
            }
            self.follow_pace(|pace, now| pace.first_token(1, now));
            self.address.prefill_completed(lease);
        }
    }

    /// Reports the prompt tokens that the engine found in its cache, from the usage of a response. Only the first
    /// report counts. Metrics use it to compare predicted with delivered cached tokens, and to detect kinds of requests
    /// whose predictions always fail. The index uses it to learn of blocks whose events were missed.
    pub fn delivered_cached_tokens(&self, tokens: u32) {
        if !self.prediction.reported.swap(true, Ordering::Relaxed) {
            let _ = self.guard.lease.delivered_cached_tokens.set(tokens);
            let predicted = self.predicted_cached_tokens();
            self.guard.edge.meters.delivered(&self.prediction, predicted, tokens);
            if self.prediction.kind.is_some() {
                self.address.entry.counts.reported(self.prediction.prompt_tokens, predicted, tokens);
            }
            let entry = &self.address.entry;
            let is_cold = tokens > 0 && entry.source.state() == Some(StreamState::Cold);
            if let Some(prompt) = self.prompt.as_ref().filter(|_| tokens > predicted || is_cold) {
                self.guard.edge.shards.prove(entry, prompt, tokens / self.block_size(), is_cold);
            }
        }
    }

    /// Reports that the response ended with the finish reason `stop`: its program waits for a person or has ended, so that
    /// its context has no claim on the cache.
    pub fn stopped(&self) {
        self.guard.lease.has_stopped.store(true, Ordering::Relaxed);
    }

    /// Reports the outcome of the request for the health of the rank. After `health.outcome_failures_max` consecutive
    /// failures the rank is ejected for a while. Only the first report counts. Reports are optional, and a success
    /// costs almost nothing.
    pub fn outcome(&self, outcome: Outcome) {
        if !self.told_outcome.swap(true, Ordering::Relaxed) {
            let began = self.guard.lease.booked_at();
            self.guard.edge.report_outcome(&self.address.entry, outcome, Some(began));
        }
    }

    /// Reports one more output block. `decay`, about 1 − generated / expected output, is the new weight of all output
    /// blocks of the request and of its unshared prompt blocks: blocks that will be freed soon count less.
    ///
    /// # Errors
    /// A decay outside [0, 1].
    pub fn output_block(&self, decay: Option<f64>) -> Result<(), RequestError> {
        let decay = decay.map(Weight::new).transpose()?;
        if !self.guard.edge.config.load.track_output_blocks {
            return Ok(());
        }
        self.guard.lease.push_output_block(decay);
        let tokens = u64::from(self.guard.lease.progress().output.block_count()) * u64::from(self.block_size());
        self.follow_pace(|pace, now| pace.reported(tokens, now));
        self.address.reconcile(&self.guard.lease);
        Ok(())
    }

    /// Records the number of generated tokens of a streamed response.
    #[cfg(feature = "http")]
    pub(super) fn generated(&self, tokens: u64) {
        self.follow_pace(|pace, now| {
            pace.first_token(tokens, now);
            pace.reported(tokens, now);
        });
    }

    /// Changes the pace of the output, if anything is compared with it.
    fn follow_pace(&self, change: impl FnOnce(&mut TokenPace, Timestamp)) {
        if self.predicted_itl().is_some() || self.targets.is_some_and(|targets| targets.itl.is_some()) {
            let now = self.guard.edge.clock.now();
            change(&mut self.pace.lock().unwrap_or_else(PoisonError::into_inner), now);
        }
    }
}

/// The decision that the placement follows from.
impl Deref for Placement {
    type Target = Decision;

    fn deref(&self) -> &Decision {
        &self.decision
    }
}

/// Compares the pace of the output with its prediction and its target, before the lease ends.
impl Drop for Placement {
    fn drop(&mut self) {
        let pace = *self.pace.get_mut().unwrap_or_else(PoisonError::into_inner);
        let Some((itl, intervals)) = pace.mean() else { return };
        let (meters, lease) = (&self.guard.edge.meters, &self.guard.lease);
        if let Some(target) = self.targets.and_then(|targets| targets.itl) {
            meters.targets.itl.count(itl <= target);
        }
        if let Some(predicted) = self.decision.predicted_itl().filter(|_| intervals >= INTERVALS_MIN) {
            meters.predictions.itl_ratio(predicted, itl);
            let _ = lease.mean_itl.set(itl);
        }
    }
}

impl std::fmt::Debug for Placement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Placement")
            .field("request_id", &self.request_id())
            .field("decision", &self.decision)
            .field("endpoint", &self.endpoint())
            .finish()
    }
}
