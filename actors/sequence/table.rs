//! Addresses of the sequence actors, with their ranks' entries.

use std::sync::Arc;

use super::{Sequence, SequenceMsg};
use crate::actors::delivery::strand::Strand;
use crate::actors::views::rank::RankEntry;
use crate::actors::views::slot_table::SlotTable;
use crate::directory::Lease;

/// One rank's sequence actor, by slot and generation. The supervisor writes the table.
pub(crate) type SequenceTable = SlotTable<SequenceAddress>;

/// A rank's entry and its sequence actor.
pub(crate) struct SequenceAddress {
    pub(crate) entry: Arc<RankEntry>,
    pub(crate) strand: Arc<Strand<Sequence>>,
}

impl SequenceAddress {
    /// Has the actor reconcile a lease that has changed, unless such a message is under way already.
    pub(crate) fn reconcile(&self, lease: &Arc<Lease>) {
        if lease.mark_dirty() {
            self.strand.tell(SequenceMsg::Reconcile(Arc::clone(lease)));
        }
    }

    /// Reports that the lease's prefill has been computed.
    pub(crate) fn prefill_completed(&self, lease: &Arc<Lease>) {
        if lease.prompt().block_count() > 0 {
            self.entry.source.prompt_served();
        }
        self.reconcile(lease);
    }
}
