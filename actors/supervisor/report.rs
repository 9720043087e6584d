//! Log lines of membership changes.

use super::state::SupervisorState;
use crate::membership::MembershipReport;
use crate::protocol::{BlockSizeOrigin, PoolBlockSize};

impl SupervisorState {
    pub(super) fn report(&self, report: MembershipReport) {
        let pool = self.dependencies.config.pool.as_str();
        match report {
            MembershipReport::BlockSize { before, now } => report_block_size(pool, before, now),
            MembershipReport::Joined { worker, endpoint, ranks, source } => {
                tracing::info!(pool, worker = endpoint, worker_id = %worker, ranks, source, "worker joined");
            }
            MembershipReport::Left { worker, endpoint, ranks, source } => {
                tracing::info!(pool, worker = endpoint, worker_id = %worker, ranks, source, "worker left");
            }
            MembershipReport::Drains { worker, endpoint, source } => {
                tracing::info!(pool, worker = endpoint, worker_id = %worker, source, "worker drains");
            }
            MembershipReport::CutOff { worker, endpoint, bookings } => {
                tracing::warn!(pool, worker = endpoint, worker_id = %worker, bookings, "bookings cut off by a drain");
            }
            MembershipReport::CapacityUnstated { endpoint } => {
                let assumed = self.dependencies.config.queue.unstated_batched_tokens();
                tracing::info!(pool, worker = endpoint, assumed, "worker states no max_num_batched_tokens");
            }
            MembershipReport::Conflict { worker, endpoint, used, ignored } => {
                self.dependencies.meters.discovery_conflicts.increment(1);
                tracing::warn!(
                    worker = endpoint,
                    worker_id = %worker,
                    used,
                    ignored,
                    "a worker or its engine is named twice; the first source has precedence"
                );
            }
            MembershipReport::SourceFailed { source, error, workers: Some(workers) } => {
                tracing::warn!(
                    pool,
                    source,
                    error,
                    workers,
                    "discovery source failed; its last valid set of workers stays in force"
                );
            }
            MembershipReport::SourceFailed { source, error, workers: None } => {
                tracing::warn!(pool, source, error, "discovery source failed; it has not returned any workers yet");
            }
            MembershipReport::SourceRecovered { source, workers } => {
                tracing::info!(pool, source, workers, "discovery source recovered");
            }
            MembershipReport::WorkerRefused { worker, endpoint, error } => {
                tracing::warn!(
                    worker = endpoint,
                    worker_id = %worker,
                    error,
                    "discovered worker rejected"
                );
            }
            MembershipReport::ReaderRestarted { slot, reason } => {
                let entry = self.shell.rank(slot).map(|rank| &rank.entry);
                let (worker, rank) = (entry.map(|entry| &*entry.endpoint), entry.map(|entry| entry.rank.rank));
                tracing::warn!(worker, rank, reason, "KV event reader died, restarting");
            }
        }
    }
}

fn report_block_size(pool: &str, before: PoolBlockSize, now: PoolBlockSize) {
    let (tokens, replaced) = (now.tokens, before.tokens);
    match (before.origin, now.origin) {
        (_, BlockSizeOrigin::Assumed) => {
            tracing::info!(pool, tokens, "block size assumed: no worker reports one, and router.block_size is not set");
        }
        (BlockSizeOrigin::Awaited, _) => tracing::info!(pool, tokens, "block size taken from the engines"),
        _ if tokens == replaced => tracing::info!(pool, tokens, "block size confirmed by the engines"),
        _ => tracing::warn!(pool, tokens, replaced, "block size changed to the one that the engines report"),
    }
}
