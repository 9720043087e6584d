//! The requests of one class that wait, in order, lane by lane.
//!
//! Owns their keys and what they add up to. Promises that a lane's head is always its smallest key, and that the sums
//! are those of the requests that wait now. Each change costs O(log n), and nothing is allocated for a lane. Leaves the
//! requests themselves to the queue.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::config::QueueClass;
use crate::protocol::Timestamp;

use super::key::{Key, Terms};
use super::limits::{Backpressure, Drain, LimitKind};
use super::{Depth, LaneKey};

#[derive(Debug)]
pub(super) struct Class {
    pub(super) name: Arc<str>,
    pub(super) drain: Drain,
    /// Every request, lane after lane.
    keys: BTreeSet<(LaneKey, Key)>,
    /// The first key of every lane that has one.
    heads: BTreeSet<(Key, LaneKey)>,
    /// Every request by arrival, for the oldest.
    arrivals: BTreeSet<(Timestamp, u64)>,
    raw_tokens: u64,
    cached_tokens: u64,
}

impl Class {
    pub(super) fn new(settings: &QueueClass) -> Self {
        Self {
            name: settings.name.as_str().into(),
            drain: Drain::default(),
            keys: BTreeSet::new(),
            heads: BTreeSet::new(),
            arrivals: BTreeSet::new(),
            raw_tokens: 0,
            cached_tokens: 0,
        }
    }

    pub(super) fn insert(&mut self, lane: LaneKey, key: Key, terms: &Terms) {
        let head = self.head(lane);
        if head.is_none_or(|head| key < head) {
            if let Some(head) = head {
                self.heads.remove(&(head, lane));
            }
            self.heads.insert((key, lane));
        }
        self.keys.insert((lane, key));
        self.arrivals.insert((terms.arrival, key.sequence));
        self.raw_tokens += u64::from(terms.isl_tokens);
        self.cached_tokens += u64::from(terms.cached_tokens);
    }

    pub(super) fn remove(&mut self, lane: LaneKey, key: Key, terms: &Terms) {
        self.keys.remove(&(lane, key));
        if self.heads.remove(&(key, lane))
            && let Some(head) = self.head(lane)
        {
            self.heads.insert((head, lane));
        }
        self.arrivals.remove(&(terms.arrival, key.sequence));
        self.raw_tokens -= u64::from(terms.isl_tokens);
        self.cached_tokens -= u64::from(terms.cached_tokens);
    }

    fn head(&self, lane: LaneKey) -> Option<Key> {
        self.lane(lane).next()
    }

    /// Everybody in a lane, in order.
    pub(super) fn lane(&self, lane: LaneKey) -> impl Iterator<Item = Key> {
        let from = self.keys.range((lane, Key::FIRST)..);
        from.take_while(move |(of, _)| *of == lane).map(|&(_, key)| key)
    }

    /// The heads of all lanes, in order.
    pub(super) fn heads(&self) -> impl Iterator<Item = (LaneKey, Key)> {
        self.heads.iter().map(|&(key, lane)| (lane, key))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    pub(super) fn depth(&self) -> Depth {
        Depth {
            requests: self.keys.len() as u64,
            raw_tokens: self.raw_tokens,
            cached_tokens: self.cached_tokens,
            oldest: self.arrivals.first().map(|&(arrival, _)| arrival),
        }
    }

    /// The first of the limits that is reached, in the order requests, tokens, cached tokens.
    pub(super) fn check_limits(&self, settings: &QueueClass, ranks: u32, now: Timestamp) -> Result<(), Backpressure> {
        let depth = self.depth();
        let limits = [
            (LimitKind::Requests, depth.requests, settings.requests_max_per_rank.map(u64::from)),
            (LimitKind::RawTokens, depth.raw_tokens, settings.raw_tokens_max_per_rank),
            (LimitKind::CachedTokens, depth.cached_tokens, settings.cached_tokens_max_per_rank),
        ];
        for (limit, current, max_per_rank) in limits {
            if let Some(max) = max_per_rank.map(|max| max.saturating_mul(u64::from(ranks)))
                && current >= max
            {
                return Err(self.refusal(limit, current, max, now));
            }
        }
        Ok(())
    }

    pub(super) fn refusal(&self, limit: LimitKind, current: u64, max: u64, now: Timestamp) -> Backpressure {
        let too_much = current.saturating_sub(max).saturating_add(1);
        let retry_after = self.drain.retry_after(now, limit, too_much);
        Backpressure { class: self.name.clone(), limit, current, max, retry_after }
    }

    /// Checks what [`Queue::check_invariants`](super::Queue::check_invariants) promises of one class. `waiting` says
    /// what is known of the request with a key.
    pub(super) fn check_invariants<'a>(&self, waiting: impl Fn(LaneKey, Key) -> &'a Terms) {
        let mut heads = BTreeSet::new();
        let (mut lane_before, mut raw_tokens, mut cached_tokens) = (None, 0, 0);
        for &(lane, key) in &self.keys {
            if lane_before.replace(lane) != Some(lane) {
                heads.insert((key, lane));
            }
            let terms = waiting(lane, key);
            raw_tokens += u64::from(terms.isl_tokens);
            cached_tokens += u64::from(terms.cached_tokens);
            assert!(self.arrivals.contains(&(terms.arrival, key.sequence)), "{key:?} has no arrival");
        }
        assert_eq!(self.heads, heads, "the first of each lane");
        assert_eq!(self.arrivals.len(), self.keys.len(), "one arrival for each");
        assert_eq!((self.raw_tokens, self.cached_tokens), (raw_tokens, cached_tokens), "sums");
    }
}
