//! The waiting requests of one class: tenants take turns, each with its own requests in order.
//!
//! Tenants share the class by self-clocked fair queueing, which is deficit round robin with equal quanta as a sorted set:
//! the class keeps a clock in tokens. A tenant's request finishes at the clock's value when the tenant last sent (or began
//! to wait) plus what the request costs. Of the tenants with the highest strict priority the one that finishes first
//! sends, and the clock moves on to that finish. Nothing is kept of a tenant without requests: the clock is never behind
//! what it has finished, so that leaving and coming back gains nothing.
//!
//! Owns the tenants' order and what the requests add up to. Promises that the sums are those of the requests that wait
//! now. Each change costs O(log n). Leaves the requests themselves to the queue.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ahash::AHashMap;

use crate::config::QueueClass;
use crate::protocol::Timestamp;

use super::key::{Key, QueueEntry};
use super::limits::{Backpressure, Drain, LimitKind};
use super::share::{Place, Share};
use super::{Depth, LaneKey, TenantKey};

#[derive(Debug)]
pub(super) struct Class {
    pub(super) name: Arc<str>,
    pub(super) drain: Drain,
    /// Every tenant with requests.
    shares: BTreeMap<TenantKey, Share>,
    /// Their places.
    order: BTreeSet<Place>,
    /// The latest finish of a request that was sent.
    clock_tokens: u64,
    /// Requests in every lane that has any.
    lanes: BTreeMap<LaneKey, usize>,
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
            shares: BTreeMap::new(),
            order: BTreeSet::new(),
            clock_tokens: 0,
            lanes: BTreeMap::new(),
            arrivals: BTreeSet::new(),
            raw_tokens: 0,
            cached_tokens: 0,
        }
    }

    pub(super) fn insert(&mut self, lane: LaneKey, key: Key, entry: &QueueEntry) {
        self.change(entry.tenant, |share| share.insert(lane, key));
        *self.lanes.entry(lane).or_default() += 1;
        self.arrivals.insert((entry.arrival, key.sequence));
        self.raw_tokens += u64::from(entry.isl_tokens);
        self.cached_tokens += u64::from(entry.cached_tokens);
    }

    pub(super) fn remove(&mut self, lane: LaneKey, key: Key, entry: &QueueEntry) {
        self.change(entry.tenant, |share| share.remove(lane, key));
        if let Some(requests) = self.lanes.get_mut(&lane) {
            *requests -= 1;
            if *requests == 0 {
                self.lanes.remove(&lane);
            }
        }
        self.arrivals.remove(&(entry.arrival, key.sequence));
        self.raw_tokens -= u64::from(entry.isl_tokens);
        self.cached_tokens -= u64::from(entry.cached_tokens);
    }

    /// A request's cached tokens are others than before, and so are its key and its cost.
    pub(super) fn replace(
        &mut self,
        lane: LaneKey,
        (old, new): (Key, Key),
        (before, after): (&QueueEntry, &QueueEntry),
    ) {
        self.change(before.tenant, |share| {
            share.remove(lane, old);
            share.insert(lane, new);
        });
        self.cached_tokens = self.cached_tokens - u64::from(before.cached_tokens) + u64::from(after.cached_tokens);
    }

    /// A request is sent: its tenant's next one counts from its finish. To be followed by its removal.
    pub(super) fn sent(&mut self, key: Key, entry: &QueueEntry) {
        if let Some(share) = self.shares.get(&entry.tenant) {
            self.clock_tokens = self.clock_tokens.max(share.finish_tokens(key));
        }
        let clock_tokens = self.clock_tokens;
        self.change(entry.tenant, |share| share.start_at(clock_tokens));
    }

    /// Changes a tenant's requests, and its place with them.
    fn change(&mut self, tenant: TenantKey, change: impl FnOnce(&mut Share)) {
        let share = self.shares.entry(tenant).or_insert_with(|| Share::new(tenant, self.clock_tokens));
        let before = share.place();
        change(share);
        let after = share.place();
        if share.is_empty() {
            self.shares.remove(&tenant);
        }
        if before != after {
            before.map(|place| self.order.remove(&place));
            self.order.extend(after);
        }
    }

    /// The request that goes next of those in lanes that are free. A tenant ranks by its first request, or by its first
    /// one in a free lane where that ranks later.
    ///
    /// `is_free` is asked at most once for each lane; `answers` is kept for its allocation only. Where the first tenant's
    /// first lane is free, no other is asked about.
    pub(super) fn next(
        &self,
        answers: &mut AHashMap<LaneKey, bool>,
        mut is_free: impl FnMut(LaneKey, Key) -> bool,
    ) -> Option<Key> {
        answers.clear();
        let (mut best, mut any_free): (Option<(Place, Key)>, bool) = (None, false);
        for first in &self.order {
            if best.is_some_and(|(place, _)| place < *first) {
                break;
            }
            let share = self.shares.get(&first.tenant)?;
            let key = share.heads().find(|&(lane, key)| *answers.entry(lane).or_insert_with(|| is_free(lane, key)));
            any_free |= key.is_some();
            if let Some((_, key)) = key {
                let place = share.place_of(key).max(*first);
                if best.is_none_or(|(least, _)| place < least) {
                    best = Some((place, key));
                }
            } else if !any_free && answers.len() == self.lanes.len() {
                break;
            }
        }
        best.map(|(_, key)| key)
    }

    /// The requests of a lane, of all tenants, in order.
    pub(super) fn lane(&self, lane: LaneKey) -> Vec<Key> {
        let mut keys: Vec<Key> = self.shares.values().flat_map(|share| share.lane(lane)).collect();
        keys.sort_unstable();
        keys
    }

    pub(super) fn has_lane(&self, lane: LaneKey) -> bool {
        self.lanes.contains_key(&lane)
    }

    /// Every lane with its first request, of whichever tenant, in the order of these. Visits every tenant's lanes.
    pub(super) fn heads(&self) -> Vec<(LaneKey, Key)> {
        let mut heads: Vec<_> = self.shares.values().flat_map(Share::heads).collect();
        heads.sort_unstable_by_key(|&(lane, key)| (lane, key));
        heads.dedup_by_key(|(lane, _)| *lane);
        heads.sort_unstable_by_key(|&(_, key)| key);
        heads
    }

    pub(super) fn is_empty(&self) -> bool {
        self.shares.is_empty()
    }

    pub(super) fn depth(&self) -> Depth {
        Depth {
            requests: self.arrivals.len() as u64,
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
    pub(super) fn check_invariants<'a>(&self, waiting: impl Fn(LaneKey, Key) -> &'a QueueEntry) {
        let (mut requests, mut raw_tokens, mut cached_tokens) = (0, 0, 0);
        let mut lanes: BTreeMap<LaneKey, usize> = BTreeMap::new();
        for (&tenant, share) in &self.shares {
            share.check_invariants(self.clock_tokens);
            for (lane, key) in share.keys() {
                let entry = waiting(lane, key);
                assert_eq!(entry.tenant, tenant);
                requests += 1;
                *lanes.entry(lane).or_default() += 1;
                raw_tokens += u64::from(entry.isl_tokens);
                cached_tokens += u64::from(entry.cached_tokens);
                assert!(self.arrivals.contains(&(entry.arrival, key.sequence)), "{key:?} has no arrival");
            }
        }
        assert!(self.order.iter().copied().eq(self.shares.values().filter_map(Share::place).collect::<BTreeSet<_>>()));
        assert_eq!(self.lanes, lanes, "requests of each lane");
        assert_eq!(self.arrivals.len(), requests, "one arrival for each");
        assert_eq!((self.raw_tokens, self.cached_tokens), (raw_tokens, cached_tokens), "sums");
    }
}
