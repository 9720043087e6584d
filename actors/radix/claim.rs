//! Reports of decisions to the shards that keep speculative entries.
//!
//! The shard of the chosen rank receives the decision before the Book is sent, so the next overlap query finds it. A
//! booking held by a modelled cache is released even if its Book is lost.

use std::sync::Arc;

use super::shards::Shards;
use super::{Radix, RadixMsg, RadixReply};
use crate::actors::delivery::strand::{DeferredReplies, Strand};
use crate::config::RouterConfig;
use crate::predict::{SpeculationModel, SpeculativePrompt};
use crate::protocol::BookingId;
use crate::schedule::Decision;

/// Reports decisions to the shards; disabled if there are no speculative entries.
pub(crate) struct SpeculationSender {
    shards: Option<Arc<Shards>>,
    /// Whether modelled caches hold bookings until they end.
    holds_bookings: bool,
}

impl SpeculationSender {
    pub(crate) fn new(config: &RouterConfig, shards: &Arc<Shards>) -> Self {
        let kind = SpeculationModel::of(config);
        let holds_bookings = matches!(kind, Some(SpeculationModel::Lru(_)));
        Self { shards: kind.map(|_| Arc::clone(shards)), holds_bookings }
    }

    /// Reports a decision to the shard of the chosen rank. Replies of that shard to other callers go to `deferred`.
    pub(crate) fn routed(
        &self,
        decision: &Decision,
        booking: BookingId,
        speculative_prompt: SpeculativePrompt,
        deferred: &mut Vec<DeferredReplies<RadixReply>>,
    ) -> Option<SpeculationClaim> {
        let shard = self.shards.as_ref()?.of(decision.rank)?;
        let Decision { slot, generation, .. } = *decision;
        shard.send(RadixMsg::Routed { slot, generation, booking: Some(booking), speculative_prompt }).keep_in(deferred);
        self.holds_bookings.then(|| SpeculationClaim { shard: Some(Arc::clone(shard)), booking })
    }
}

/// Claim of a pending booking on a modelled cache. Dropping it releases the claim.
pub(crate) struct SpeculationClaim {
    shard: Option<Arc<Strand<Radix>>>,
    booking: BookingId,
}

impl SpeculationClaim {
    /// Transfers the claim to the lease of the booking, whose end releases it.
    pub(crate) fn leave_to_lease(mut self) {
        self.shard = None;
    }
}

impl Drop for SpeculationClaim {
    fn drop(&mut self) {
        if let Some(shard) = self.shard.take() {
            shard.tell(RadixMsg::Released { booking: self.booking, output_blocks: 0 });
        }
    }
}
