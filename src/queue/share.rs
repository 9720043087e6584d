//! Waiting requests of one tenant in one class, ordered by lane.
//!
//! Holds the keys and the tenant's position among the tenants of its class ([`Class`](super::class::Class) documents
//! the order). A lane's head is always its smallest key. Each change costs O(log n), without an allocation per lane.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use super::ids::{LaneKey, TenantKey};
use super::key::OrderKey;

/// Position of a tenant among the tenants of its class; smaller positions go first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct TenantPosition {
    strict_priority: Reverse<u32>,
    /// The class's clock after the dispatch of the request.
    finish_tokens: u64,
    /// Breaks ties of equal finishes by insertion order.
    sequence: u64,
    pub(super) tenant: TenantKey,
}

#[derive(Debug)]
pub(super) struct Share {
    tenant: TenantKey,
    /// The class's clock at the tenant's last dispatch, or at the start of its wait.
    start_tokens: u64,
    /// Every request, by lane.
    keys: BTreeSet<(LaneKey, OrderKey)>,
    /// The first key of every non-empty lane.
    heads: BTreeSet<(OrderKey, LaneKey)>,
}

impl Share {
    pub(super) fn new(tenant: TenantKey, start_tokens: u64) -> Self {
        Self { tenant, start_tokens, keys: BTreeSet::new(), heads: BTreeSet::new() }
    }

    pub(super) fn insert(&mut self, lane: LaneKey, key: OrderKey) {
        let head = self.head(lane);
        if head.is_none_or(|head| key < head) {
            if let Some(head) = head {
                self.heads.remove(&(head, lane));
            }
            self.heads.insert((key, lane));
        }
        self.keys.insert((lane, key));
    }

    pub(super) fn remove(&mut self, lane: LaneKey, key: OrderKey) {
        self.keys.remove(&(lane, key));
        if self.heads.remove(&(key, lane))
            && let Some(head) = self.head(lane)
        {
            self.heads.insert((head, lane));
        }
    }

    fn head(&self, lane: LaneKey) -> Option<OrderKey> {
        self.lane(lane).next()
    }

    /// The requests of a lane, in order.
    pub(super) fn lane(&self, lane: LaneKey) -> impl Iterator<Item = OrderKey> {
        let from = self.keys.range((lane, OrderKey::FIRST)..);
        from.take_while(move |(of, _)| *of == lane).map(|&(_, key)| key)
    }

    /// The heads of all lanes, in order.
    pub(super) fn heads(&self) -> impl Iterator<Item = (LaneKey, OrderKey)> {
        self.heads.iter().map(|&(key, lane)| (lane, key))
    }

    /// Every request, by lane.
    pub(super) fn keys(&self) -> impl Iterator<Item = (LaneKey, OrderKey)> {
        self.keys.iter().copied()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Position by the tenant's first request; `None` without requests.
    pub(super) fn place(&self) -> Option<TenantPosition> {
        self.heads.first().map(|&(key, _)| self.place_of(key))
    }

    /// Position of the tenant if `key` is its next request.
    pub(super) fn place_of(&self, key: OrderKey) -> TenantPosition {
        TenantPosition {
            strict_priority: key.strict_priority,
            finish_tokens: self.finish_tokens(key),
            sequence: key.sequence,
            tenant: self.tenant,
        }
    }

    pub(super) fn finish_tokens(&self, key: OrderKey) -> u64 {
        self.start_tokens.saturating_add(u64::from(key.cost_tokens))
    }

    /// Records a dispatch at the given clock value.
    pub(super) fn start_at(&mut self, clock_tokens: u64) {
        self.start_tokens = clock_tokens;
    }

    /// Checks that `heads` are the first keys of each lane, and that no start is ahead of the class's clock.
    pub(super) fn check_invariants(&self, clock_tokens: u64) {
        let (mut heads, mut lane_before) = (BTreeSet::new(), None);
        for &(lane, key) in &self.keys {
            if lane_before.replace(lane) != Some(lane) {
                heads.insert((key, lane));
            }
        }
        assert_eq!(self.heads, heads, "heads are the first keys of each lane");
        assert!(self.start_tokens <= clock_tokens, "{} is ahead of the clock, {clock_tokens}", self.start_tokens);
        assert!(!self.is_empty(), "a tenant without requests is removed");
    }
}
