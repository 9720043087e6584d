//! Decisions on their way to the shards that keep speculative entries.
//!
//! The chosen rank's shard learns of a decision before the Book is sent, so the next overlap query finds it. A booking held
//! by a modelled cache is released whatever becomes of its Book.

use std::sync::Arc;

use super::shards::Shards;
use super::{Radix, RadixMsg, RadixReply};
use crate::actors::delivery::strand::{DeferredReplies, Strand};
use crate::config::RouterConfig;
use crate::predict::{SpeculationModel, SpeculativePrompt};
use crate::protocol::BookingId;
use crate::schedule::Decision;

/// Reports decisions to the shards; to none where nothing is speculative.
pub(crate) struct SpeculationSender {
    shards: Option<Arc<Shards>>,
    /// Whether bookings are held until they end.
    holds_bookings: bool,
}

impl SpeculationSender {
    pub(crate) fn new(config: &RouterConfig, shards: &Arc<Shards>) -> Self {
        let kind = SpeculationModel::of(config);
        let holds_bookings = matches!(kind, Some(SpeculationModel::Lru { .. }));
        Self { shards: kind.map(|_| Arc::clone(shards)), holds_bookings }
    }

    /// Reports a decision to the chosen rank's shard. Replies of that shard to others wait in `deferred`.
    pub(crate) fn routed(
        &self,
        decision: &Decision,
        booking: BookingId,
        guess: SpeculativePrompt,
        deferred: &mut Vec<DeferredReplies<RadixReply>>,
    ) -> Option<SpeculationClaim> {
        let shard = self.shards.as_ref()?.of(decision.rank)?;
        let Decision { slot, generation, .. } = *decision;
        shard.send(RadixMsg::Routed { slot, generation, booking: Some(booking), guess }).keep_in(deferred);
        self.holds_bookings.then(|| SpeculationClaim { shard: Some(Arc::clone(shard)), booking })
    }
}

/// A modelled cache holds a booking that is still to be made: dropping the claim gives it back.
pub(crate) struct SpeculationClaim {
    shard: Option<Arc<Strand<Radix>>>,
    booking: BookingId,
}

impl SpeculationClaim {
    /// The booking is made: from here on, whoever ends its lease gives it back.
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
