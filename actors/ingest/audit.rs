//! Audits of a reader's rank: requests to the engine, queries to the shard, and corrections.
//!
//! [`Audit`] decides. Replies arrive on a connection of their own, beside the subscription and replays.

use std::collections::BTreeSet;

use bytes::Bytes;

use super::reader::Reader;
use crate::actors::radix::RadixMsg;
use crate::actors::views::kv_source::{KvAuditStatus, KvDifferenceStatus};
use crate::index::BlockDigest;
use crate::ingest::{AuditCause, AuditResult, AuditStep, BlockName, Difference, Heal, IngestInput, StreamState};
use crate::protocol::{KvEvent, Timestamp};

/// Maximum number of blocks of a difference in logs and reports.
const EXAMPLES_MAX: usize = 8;

impl Reader {
    /// Records an applied message in a running audit.
    pub(super) async fn audit_applied(&mut self, sequence: u64, events: &[crate::protocol::RouterEvent]) {
        self.auditor.next = sequence + 1;
        if self.auditor.audit.is_running() {
            let digest = if self.auditor.audit.samples() { self.index_digest().await } else { None };
            self.auditor.audit.applied(sequence + 1, events, digest);
        }
    }

    /// Begins an audit that is due, and performs the steps of a running one. Returns an input if the stream must be
    /// replayed.
    pub(super) async fn audit(&mut self) -> Option<IngestInput<Bytes>> {
        let now = self.dependencies.clock.now();
        if !self.auditor.audit.is_running() {
            if self.auditor.audit.due().is_none_or(|due| due > now) {
                return None;
            }
            let is_comparable = self.shell.source().state() == StreamState::Live && self.shell.source().is_caught_up();
            let is_comparable = is_comparable && !self.is_emptied;
            let position = self.shell.source().position().filter(|_| is_comparable);
            let (Some(position), Some(digest)) = (position, self.index_digest().await) else {
                self.auditor.audit.postpone(now);
                return None;
            };
            self.auditor.next = position.next;
            match self.auditor.audit.begin(now, position.next, digest) {
                // The names of the engine are those of parts of blocks.
                AuditStep::Request(_) if self.shell.is_folding() => self.auditor.read_ring(now),
                AuditStep::Request(number) => self.auditor.ask(number),
                AuditStep::Wait | AuditStep::QueryNames | AuditStep::Ended(_) => {}
            }
        }
        loop {
            match self.auditor.audit.step(now, self.auditor.next) {
                AuditStep::Wait => return None,
                AuditStep::Request(number) => self.auditor.ask(number),
                AuditStep::QueryNames => match self.index_names().await {
                    Some(names) => {
                        let result = self.auditor.audit.compare(now, &names);
                        return self.audit_ended(result, names.len(), now);
                    }
                    None => self.auditor.abort(),
                },
                AuditStep::Ended(result) => return self.audit_ended(result, 0, now),
            }
        }
    }

    fn audit_ended(&mut self, result: AuditResult, index_blocks: usize, now: Timestamp) -> Option<IngestInput<Bytes>> {
        self.dependencies.meters.ingest.audited(&result);
        let (worker, rank) = (&*self.entry.endpoint, self.entry.rank.rank);
        let mut input = None;
        match &result {
            AuditResult::Different(difference) => {
                let heal = self.auditor.audit.heal(now, difference, index_blocks);
                self.show_difference(difference, &heal, now);
                match heal {
                    Heal::Forget(names) => self.forget(names),
                    Heal::Resync => input = Some(IngestInput::Resync),
                    Heal::Wait => {}
                }
            }
            AuditResult::Equal => {
                if let Some(since) = self.auditor.different_since.take() {
                    let seconds = now.since(since).as_secs_f64();
                    tracing::info!(worker, rank, seconds, "index equals the cache of the engine again");
                }
            }
            AuditResult::Inconclusive(cause) if self.auditor.audit.is_notice_due() => {
                tracing::warn!(worker, rank, cause = cause.name(), "index not verified: audits are inconclusive");
            }
            AuditResult::Inconclusive(_) | AuditResult::Unsupported => {}
        }
        let record = KvAuditStatus {
            result: result.name(),
            cause: result.cause().map(AuditCause::name),
            at: now,
            equal_at: self.auditor.audit.last_equal(),
            difference: self.auditor.last.clone(),
        };
        self.entry.source.facts().audit = Some(record);
        input
    }

    fn show_difference(&mut self, difference: &Difference, heal: &Heal, now: Timestamp) {
        let Difference { stale, missing, since } = difference;
        let heal = match heal {
            Heal::Forget(_) => "forget",
            Heal::Resync => "resync",
            Heal::Wait => "wait",
        };
        let examples: Vec<BlockName> = stale.iter().chain(missing).take(EXAMPLES_MAX).copied().collect();
        let shown: Vec<String> = examples.iter().map(|(_, name)| format!("{:016x}", name.0)).collect();
        let (worker, rank, blocks) = (&*self.entry.endpoint, self.entry.rank.rank, shown.join(" "));
        let (stale_blocks, missing_blocks) = (stale.len(), missing.len());
        let since_seconds = since.map(|since| now.since(since).as_secs_f64());
        tracing::warn!(
            worker,
            rank,
            stale_blocks,
            missing_blocks,
            since_seconds,
            blocks,
            heal,
            "index differs from the cache of the engine"
        );
        let record = KvDifferenceStatus { at: now, since: *since, stale_blocks, missing_blocks, examples, heal };
        self.auditor.last = Some(record);
        self.auditor.different_since.get_or_insert(now);
    }

    fn forget(&self, names: Vec<BlockName>) {
        let (rank, generation) = (self.entry.rank, self.entry.generation);
        if let Some(shard) = self.dependencies.shards.of(rank) {
            shard.tell(RadixMsg::Forget { rank, generation, names });
        }
    }

    /// Digest of the rank's index contents after every applied message.
    async fn index_digest(&self) -> Option<BlockDigest> {
        let (rank, generation) = (self.entry.rank, self.entry.generation);
        let before = self.dependencies.status.state();
        let shard = self.dependencies.shards.of(rank)?;
        let digest = shard.ask(move |shard| shard.shell.digest(rank, generation));
        self.dependencies.status.reply_of(digest, before).await.flatten()
    }

    async fn index_names(&self) -> Option<BTreeSet<BlockName>> {
        let (rank, generation) = (self.entry.rank, self.entry.generation);
        let before = self.dependencies.status.state();
        let shard = self.dependencies.shards.of(rank)?;
        let names = shard.ask(move |shard| shard.shell.names(rank, generation));
        let names = self.dependencies.status.reply_of(names, before).await.flatten()?;
        Some(names.into_iter().collect())
    }

    /// Drops the rank's blocks, for a replay of the stream.
    pub(super) async fn drop_blocks(&mut self) {
        self.auditor.abort();
        self.shell.forget();
        self.apply(vec![self.event(KvEvent::Cleared)]).await; // the index contains only events from here on
    }
}
