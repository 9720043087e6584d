//! Ends leases: the directory entry, and the messages to the actors that count the lease.
//!
//! The actors are notified exactly once, whichever of placement, free by id, expiry or rank removal ends the lease.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::actors::delivery::strand::Strand;
use crate::actors::radix::RadixMsg;
use crate::actors::radix::shards::Shards;
use crate::actors::scheduler::{Scheduler, SchedulerMsg};
use crate::actors::sequence::table::SequenceTable;
use crate::actors::strands::Strands;
use crate::actors::views::block_size::BlockSizeCell;
use crate::config::RouterConfig;
use crate::directory::{Directory, Ended, Lease};
use crate::load::OutputLengths;
use crate::predict::SpeculationModel;
use crate::protocol::WorkerRank;
use crate::schedule::Input;

/// Ends leases.
pub(crate) struct LeaseEnder {
    directory: Arc<Directory>,
    sequences: Arc<SequenceTable>,
    /// Present if requests can be queued.
    scheduler: Option<Arc<Strand<Scheduler>>>,
    /// Whether the scheduler holds calls while other programs fill the caches.
    holds_programs: bool,
    /// Present if shards model caches that hold bookings.
    shards: Option<Arc<Shards>>,
    output_lengths: Arc<OutputLengths>,
    track_output_blocks: bool,
    block_size: Arc<BlockSizeCell>,
}

impl LeaseEnder {
    pub(crate) fn new(
        config: &RouterConfig,
        block_size: &Arc<BlockSizeCell>,
        directory: &Arc<Directory>,
        strands: &Strands,
        output_lengths: &Arc<OutputLengths>,
    ) -> Self {
        let holds_bookings = matches!(SpeculationModel::of(config), Some(SpeculationModel::Lru(_)));
        Self {
            directory: Arc::clone(directory),
            sequences: Arc::clone(&strands.sequences),
            scheduler: config.queue.is_enabled().then(|| Arc::clone(&strands.scheduler)),
            holds_programs: config.queue.holds_programs(),
            shards: holds_bookings.then(|| Arc::clone(&strands.shards)),
            output_lengths: Arc::clone(output_lengths),
            track_output_blocks: config.load.track_output_blocks,
            block_size: Arc::clone(block_size),
        }
    }

    /// Ends a lease, frees its booking and releases its request id.
    pub(crate) fn end(&self, lease: &Arc<Lease>) {
        self.end_as(lease, true);
    }

    /// As [`LeaseEnder::end`]; `may_wait` unless the request is known not to be in the queue.
    pub(crate) fn end_as(&self, lease: &Arc<Lease>, may_wait: bool) {
        let ended = lease.end();
        self.directory.leave(lease);
        match ended {
            Ended::Booked(slot, generation) => {
                self.learn_output_length(lease);
                if let Some(address) = self.sequences.get(slot, generation) {
                    address.reconcile(lease);
                    self.release(address.entry.rank, lease);
                }
                self.end_call(lease);
            }
            // The request may be queued: a cancelled request stops counting immediately.
            Ended::Pending if may_wait => {
                if let Some(scheduler) = &self.scheduler {
                    scheduler.tell(SchedulerMsg::Input(Input::Cancel(lease.booking())));
                }
            }
            Ended::Pending | Ended::Already => {}
        }
    }

    /// Reports the end of a call of a program, whose claim on the cache then ends in time.
    fn end_call(&self, lease: &Lease) {
        let has_program = || lease.request_keys.get().is_some_and(|keys| keys.program != 0);
        if let Some(scheduler) = self.scheduler.as_ref().filter(|_| self.holds_programs && has_program()) {
            let (booking, is_stop) = (lease.booking(), lease.has_stopped.load(Ordering::Relaxed));
            scheduler.tell(SchedulerMsg::Input(Input::Ended { booking, is_stop }));
        }
    }

    /// Records the length of an output for later expectations. A request without output gives no sample.
    fn learn_output_length(&self, lease: &Lease) {
        let keys = lease.request_keys.get().copied().unwrap_or_default();
        if keys.is_empty() {
            return;
        }
        let progress = lease.progress();
        let blocks = progress.output.block_count();
        if blocks > 0 || progress.prefill_completed && self.track_output_blocks {
            self.output_lengths.observe(keys, (f64::from(blocks) + 0.5) * f64::from(self.block_size.tokens()));
        }
    }

    /// Reports the end of a booking to the rank's shard, if a modelled cache holds it. A rank that has left the table
    /// has also left the shard.
    fn release(&self, rank: WorkerRank, lease: &Lease) {
        if let Some(shard) = self.shards.as_ref().and_then(|shards| shards.of(rank)) {
            let output_blocks = lease.progress().output.block_count();
            shard.tell(RadixMsg::Released { booking: lease.booking(), output_blocks });
        }
    }
}
