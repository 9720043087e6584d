//! Addresses of the sequence actors, with the rank entries.

use std::sync::Arc;

use super::{Sequence, SequenceMsg};
use crate::actors::delivery::strand::Strand;
use crate::actors::views::rank::RankEntry;
use crate::actors::views::slot_table::SlotTable;
use crate::directory::Lease;

/// Sequence actors by slot and generation. The supervisor writes the table.
pub(crate) type SequenceTable = SlotTable<SequenceAddress>;

/// A rank entry and the strand of its sequence actor.
pub(crate) struct SequenceAddress {
    pub(crate) entry: Arc<RankEntry>,
    pub(crate) strand: Arc<Strand<Sequence>>,
}

impl SequenceAddress {
    /// Sends a request to reconcile a changed lease, unless one is queued already.
    pub(crate) fn reconcile(&self, lease: &Arc<Lease>) {
        if lease.mark_dirty() {
            self.strand.tell(SequenceMsg::Reconcile(Arc::clone(lease)));
        }
    }

    /// Reports the completed prefill of a lease.
    pub(crate) fn prefill_completed(&self, lease: &Arc<Lease>) {
        if lease.prompt().block_count() > 0 {
            self.entry.source.prompt_served();
        }
        self.reconcile(lease);
    }
}
