//! Ledger of the transfers of one engine: prefill legs in progress, held blocks and their leases.
//!
//! A transfer is opened by its prefill leg, held after the prefill, and removed by a claim, by the expiry of its lease or
//! by a clear. Every held block is claimed, expired or lost exactly once. Pure: time is an argument in milliseconds, and
//! the caller drops the pin `P` of a removed transfer, which frees the blocks in the cache.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// Counters of an engine with disaggregated serving. They include earlier incarnations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HandoverCounters {
    /// Number of accepted prefill legs.
    pub legs_prefill: u64,
    /// Number of accepted decode legs.
    pub legs_decode: u64,
    /// Number of requests that one engine served alone.
    pub aggregated: u64,
    /// Number of requests rejected by a rule of the protocol.
    pub rejected: u64,
    /// Number of blocks ever held for a decode engine. The sum of `blocks_claimed_total`, `blocks_expired_total`,
    /// `blocks_lost_total` and `holding_now`.
    pub blocks_held_total: u64,
    /// Number of blocks transferred.
    pub blocks_claimed_total: u64,
    /// Number of blocks freed at the end of their lease.
    pub blocks_expired_total: u64,
    /// Number of blocks freed by a restart, a shutdown, a failed push, or a client that left its prefill leg.
    pub blocks_lost_total: u64,
    /// Number of blocks held now.
    pub holding_now: u64,
    /// Number of legs without their counterpart: a decode leg whose transfer is unknown, expired or unreachable, or a
    /// prefill leg whose decode engine did not connect in time.
    pub late_or_unknown: u64,
    /// Number of decode legs cancelled during the transfer or before their first token.
    pub torn: u64,
    /// Number of abort requests (`POST /abort_request`), also of requests that have ended.
    pub abort_requests: u64,
    /// Number of requests in progress, all kinds together.
    pub running_now: u64,
}

/// Result of a prefill, passed to the decode engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Grant {
    /// Data-parallel rank of the prefill.
    pub(crate) rank: u16,
    /// Number of prompt tokens.
    pub(crate) tokens: u64,
    /// Number of complete blocks of the prompt.
    pub(crate) blocks: u64,
    pub(crate) first_token: u32,
}

/// A decode engine's claim of a transfer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Claim {
    pub(crate) key: String,
    /// Fingerprint of the prompt and the adapter.
    pub(crate) prompt: u64,
    pub(crate) tokens: u64,
    /// Engine id of the prefill rank, if the protocol has one.
    pub(crate) engine_id: Option<String>,
    /// Rank of the prefill, if the router sent it.
    pub(crate) rank: Option<u16>,
    /// Whether the claim waits for a prefill leg that has not finished.
    pub(crate) waits: bool,
}

/// Reasons for a claim without a grant.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("transfer {0:?} is unknown or expired")]
    Unknown(String),
    /// The prefill leg is in progress.
    #[error("the prefill leg has not finished")]
    Pending,
    /// The claim contradicts the prefill leg. The transfer stays held.
    #[error("{0}")]
    Mismatch(String),
}

pub(crate) struct Ledger<P> {
    transfers: BTreeMap<String, Transfer<P>>,
    pub(crate) counters: HandoverCounters,
}

struct Transfer<P> {
    /// Shared with the claims that wait.
    connections: Arc<()>,
    held: Option<Held<P>>,
}

struct Held<P> {
    grant: Grant,
    prompt: u64,
    engine_id: String,
    deadline_ms: u64,
    pin: P,
}

impl<P> Default for Ledger<P> {
    fn default() -> Self {
        Self { transfers: BTreeMap::new(), counters: HandoverCounters::default() }
    }
}

impl<P> Ledger<P> {
    /// Opens a transfer when its prefill leg begins. Returns false if the key is in use.
    pub(crate) fn open(&mut self, key: &str) -> bool {
        if self.transfers.contains_key(key) {
            return false;
        }
        self.transfers.insert(key.to_owned(), Transfer { connections: Arc::default(), held: None });
        true
    }

    /// Holds the result of an open transfer. Returns the pin if the transfer was removed meanwhile.
    pub(crate) fn hold(
        &mut self,
        key: &str,
        grant: Grant,
        prompt: u64,
        engine_id: String,
        deadline_ms: u64,
        pin: P,
    ) -> Result<(), P> {
        let Some(transfer) = self.transfers.get_mut(key) else { return Err(pin) };
        debug_assert!(transfer.held.is_none(), "a prefill leg ends once");
        transfer.held = Some(Held { grant, prompt, engine_id, deadline_ms, pin });
        self.counters.blocks_held_total += grant.blocks;
        self.counters.holding_now += grant.blocks;
        self.check_invariants();
        Ok(())
    }

    /// Connects a claim, which waits as long as `connection` exists. Returns whether it was not connected to this transfer.
    pub(crate) fn connect(&self, key: &str, connection: &mut Option<Arc<()>>) -> bool {
        let Some(Transfer { connections, .. }) = self.transfers.get(key) else { return false };
        let is_new = connection.as_ref().is_none_or(|known| !Arc::ptr_eq(known, connections));
        *connection = Some(Arc::clone(connections));
        is_new
    }

    /// Whether a claim waits for an open transfer.
    pub(crate) fn is_connected(&self, key: &str) -> bool {
        self.transfers.get(key).is_some_and(|transfer| Arc::strong_count(&transfer.connections) > 1)
    }

    /// Claims a held transfer and removes it.
    ///
    /// # Errors
    /// The transfer is unknown, not held yet, or of another request. It stays as it is.
    pub(crate) fn claim(&mut self, claim: &Claim) -> Result<(Grant, P), Refusal> {
        let unknown = || Refusal::Unknown(claim.key.clone());
        let transfer = self.transfers.get(&claim.key).ok_or_else(unknown)?;
        let held = transfer.held.as_ref().ok_or(Refusal::Pending)?;
        let mismatch = |what: &str| Err(Refusal::Mismatch(format!("{what} differs from the prefill leg")));
        if claim.engine_id.as_ref().is_some_and(|id| *id != held.engine_id) {
            return mismatch("the engine id");
        }
        if let Some(rank) = claim.rank.filter(|rank| *rank != held.grant.rank) {
            return mismatch(&format!("prefill rank {rank}"));
        }
        if claim.tokens != held.grant.tokens || claim.prompt != held.prompt {
            return mismatch("the prompt");
        }
        let held = self.transfers.remove(&claim.key).and_then(|transfer| transfer.held).ok_or_else(unknown)?;
        self.counters.blocks_claimed_total += held.grant.blocks;
        self.counters.holding_now -= held.grant.blocks;
        self.check_invariants();
        Ok((held.grant, held.pin))
    }

    /// Ends a transfer whose prefill leg failed or was cancelled. Held blocks count as lost.
    #[must_use]
    pub(crate) fn close(&mut self, key: &str) -> Option<P> {
        let held = self.transfers.remove(key)?.held?;
        self.counters.blocks_lost_total += held.grant.blocks;
        self.counters.holding_now -= held.grant.blocks;
        self.check_invariants();
        Some(held.pin)
    }

    /// Removes the transfers whose lease has ended. Linear in the number of transfers.
    #[must_use]
    pub(crate) fn expire(&mut self, now_ms: u64) -> Vec<P> {
        let is_due = |transfer: &Transfer<P>| transfer.held.as_ref().is_some_and(|held| held.deadline_ms <= now_ms);
        let due = self.transfers.iter().filter(|(_, transfer)| is_due(transfer));
        let keys: Vec<String> = due.map(|(key, _)| key.clone()).collect();
        let expired: Vec<Held<P>> = keys.iter().filter_map(|key| self.transfers.remove(key)?.held).collect();
        let blocks: u64 = expired.iter().map(|held| held.grant.blocks).sum();
        self.counters.blocks_expired_total += blocks;
        self.counters.holding_now -= blocks;
        self.check_invariants();
        expired.into_iter().map(|held| held.pin).collect()
    }

    /// Removes all transfers, at a restart or shutdown. Held blocks count as lost.
    #[must_use]
    pub(crate) fn clear(&mut self) -> Vec<P> {
        self.counters.blocks_lost_total += self.counters.holding_now;
        self.counters.holding_now = 0;
        let transfers = std::mem::take(&mut self.transfers);
        self.check_invariants();
        transfers.into_values().filter_map(|transfer| transfer.held).map(|held| held.pin).collect()
    }

    /// Checks that every held block is counted once. Linear in the number of transfers; for debug builds.
    fn check_invariants(&self) {
        let counters = &self.counters;
        let ended = counters.blocks_claimed_total + counters.blocks_expired_total + counters.blocks_lost_total;
        debug_assert_eq!(ended + counters.holding_now, counters.blocks_held_total);
        debug_assert_eq!(
            self.transfers
                .values()
                .filter_map(|transfer| transfer.held.as_ref())
                .map(|held| held.grant.blocks)
                .sum::<u64>(),
            counters.holding_now
        );
    }
}
