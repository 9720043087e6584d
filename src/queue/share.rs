//! The waiting requests of one tenant in one class, in order, lane by lane.
//!
//! Owns their keys, and the tenant's place among the tenants of its class ([`Class`](super::class::Class) says how they
//! take turns). Promises that a lane's head is always its smallest key. Each change costs O(log n), and nothing is
//! allocated for a lane.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use super::key::Key;
use super::{LaneKey, TenantKey};

/// A tenant's place among the tenants of its class: the smaller sends first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    strict_priority: Reverse<u32>,
    /// The class's clock once the request has been sent.
    finish_tokens: u64,
    /// Of two that would finish alike the earlier one goes first.
    sequence: u64,
    pub(super) tenant: TenantKey,
}

#[derive(Debug)]
pub(super) struct Share {
    tenant: TenantKey,
    /// The class's clock when the tenant last sent a request, or began to wait.
    start_tokens: u64,
    /// Every request, lane after lane.
    keys: BTreeSet<(LaneKey, Key)>,
    /// The first key of every lane that has one.
    heads: BTreeSet<(Key, LaneKey)>,
}

impl Share {
    pub(super) fn new(tenant: TenantKey, start_tokens: u64) -> Self {
        Self { tenant, start_tokens, keys: BTreeSet::new(), heads: BTreeSet::new() }
    }

    pub(super) fn insert(&mut self, lane: LaneKey, key: Key) {
        let head = self.head(lane);
        if head.is_none_or(|head| key < head) {
            if let Some(head) = head {
                self.heads.remove(&(head, lane));
            }
            self.heads.insert((key, lane));
        }
        self.keys.insert((lane, key));
    }

    pub(super) fn remove(&mut self, lane: LaneKey, key: Key) {
        self.keys.remove(&(lane, key));
        if self.heads.remove(&(key, lane))
            && let Some(head) = self.head(lane)
        {
            self.heads.insert((head, lane));
        }
    }

    fn head(&self, lane: LaneKey) -> Option<Key> {
        self.lane(lane).next()
    }

    /// The requests of a lane, in order.
    pub(super) fn lane(&self, lane: LaneKey) -> impl Iterator<Item = Key> {
        let from = self.keys.range((lane, Key::FIRST)..);
        from.take_while(move |(of, _)| *of == lane).map(|&(_, key)| key)
    }

    /// The heads of all lanes, in order.
    pub(super) fn heads(&self) -> impl Iterator<Item = (LaneKey, Key)> {
        self.heads.iter().map(|&(key, lane)| (lane, key))
    }

    /// Every request, lane after lane.
    pub(super) fn keys(&self) -> impl Iterator<Item = (LaneKey, Key)> {
        self.keys.iter().copied()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// The place of the tenant's first request; `None` without requests.
    pub(super) fn place(&self) -> Option<Place> {
        self.heads.first().map(|&(key, _)| self.place_of(key))
    }

    /// The place that the tenant has if `key` is the request that it sends next.
    pub(super) fn place_of(&self, key: Key) -> Place {
        Place {
            strict_priority: key.strict_priority,
            finish_tokens: self.finish_tokens(key),
            sequence: key.sequence,
            tenant: self.tenant,
        }
    }

    pub(super) fn finish_tokens(&self, key: Key) -> u64 {
        self.start_tokens.saturating_add(u64::from(key.cost_tokens))
    }

    /// The tenant has sent a request.
    pub(super) fn start_at(&mut self, clock_tokens: u64) {
        self.start_tokens = clock_tokens;
    }

    /// Checks that `heads` are the first of each lane, and that no start lies ahead of the class's clock.
    pub(super) fn check_invariants(&self, clock_tokens: u64) {
        let (mut heads, mut lane_before) = (BTreeSet::new(), None);
        for &(lane, key) in &self.keys {
            if lane_before.replace(lane) != Some(lane) {
                heads.insert((key, lane));
            }
        }
        assert_eq!(self.heads, heads, "the first of each lane");
        assert!(self.start_tokens <= clock_tokens, "{} is ahead of the clock, {clock_tokens}", self.start_tokens);
        assert!(!self.is_empty(), "a tenant without requests is forgotten");
    }
}
