//! Waiting requests of one class: limits, fair tenant shares.
//!
//! Tenants share the class by self-clocked fair queueing, which is deficit round robin with equal quanta as a sorted
//! set. The class keeps a clock in tokens. The finish of a tenant's next request is the clock value at the tenant's
//! previous dispatch (or at the start of its wait) plus the cost of the request. Among the tenants with the highest
//! strict priority, the one with the earliest finish dispatches next, and the clock advances to that finish. No state
//! is kept for a tenant without requests: the clock is never behind its last finish, so leaving and returning gains
//! nothing.
//!
//! Maintains the order of tenants and the sums over all waiting requests. Each change costs O(log n). The queue holds
//! the requests themselves.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ahash::AHashMap;

use crate::config::QueueClass;
use crate::protocol::Timestamp;

use super::ids::{Depth, LaneKey, TenantKey};
use super::key::{OrderKey, QueueEntry};
use super::limits::{Backpressure, Drain, LimitKind};
use super::share::{Share, TenantPosition};

#[derive(Debug, Default)]
pub(super) struct Class {
    pub(super) name: Arc<str>,
    pub(super) drain: Drain,
    /// Every tenant with waiting requests.
    shares: BTreeMap<TenantKey, Share>,
    /// The order of these tenants.
    order: BTreeSet<TenantPosition>,
    /// The latest finish of a dispatched request.
    clock_tokens: u64,
    /// Number of requests of each tenant in each lane, and the number of lanes.
    lanes: BTreeMap<(LaneKey, TenantKey), usize>,
    lane_count: usize,
    /// Every request by arrival, to find the oldest.
    arrivals: BTreeSet<(Timestamp, u64)>,
    raw_tokens: u64,
    cached_tokens: u64,
}

impl Class {
    pub(super) fn new(settings: &QueueClass) -> Self {
        Self { name: settings.name.as_str().into(), ..Self::default() }
    }

    pub(super) fn insert(&mut self, lane: LaneKey, key: OrderKey, entry: &QueueEntry) {
        self.change(entry.tenant, |share| share.insert(lane, key));
        self.lane_count += usize::from(!self.has_lane(lane));
        *self.lanes.entry((lane, entry.tenant)).or_default() += 1;
        self.arrivals.insert((entry.arrival, key.sequence));
        self.raw_tokens += u64::from(entry.prompt_tokens);
        self.cached_tokens += u64::from(entry.cached_tokens);
    }

    pub(super) fn remove(&mut self, lane: LaneKey, key: OrderKey, entry: &QueueEntry) {
        self.change(entry.tenant, |share| share.remove(lane, key));
        if let Some(requests) = self.lanes.get_mut(&(lane, entry.tenant)) {
            *requests -= 1;
            if *requests == 0 {
                self.lanes.remove(&(lane, entry.tenant));
                self.lane_count -= usize::from(!self.has_lane(lane));
            }
        }
        self.arrivals.remove(&(entry.arrival, key.sequence));
        self.raw_tokens -= u64::from(entry.prompt_tokens);
        self.cached_tokens -= u64::from(entry.cached_tokens);
    }

    /// Updates a request whose cached tokens, and therefore key and cost, changed.
    pub(super) fn replace(
        &mut self,
        lane: LaneKey,
        (old, new): (OrderKey, OrderKey),
        (before, after): (&QueueEntry, &QueueEntry),
    ) {
        self.change(before.tenant, |share| {
            share.remove(lane, old);
            share.insert(lane, new);
        });
        self.cached_tokens = self.cached_tokens - u64::from(before.cached_tokens) + u64::from(after.cached_tokens);
    }

    /// Records a dispatch: the tenant's next request starts at this finish. The caller then removes the request.
    pub(super) fn sent(&mut self, key: OrderKey, entry: &QueueEntry) {
        if let Some(share) = self.shares.get(&entry.tenant) {
            self.clock_tokens = self.clock_tokens.max(share.finish_tokens(key));
        }
        let clock_tokens = self.clock_tokens;
        self.change(entry.tenant, |share| share.start_at(clock_tokens));
    }

    /// Changes a tenant's requests, and updates its position.
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

    /// The next request in a free lane. A tenant is ordered by its first request, or by its first request in a free
    /// lane if that is later.
    ///
    /// Calls `is_free` at most once per lane; `answers` is passed only to reuse its allocation. If the first lane of
    /// the first tenant is free, no other lane is checked.
    pub(super) fn next(
        &self,
        answers: &mut AHashMap<LaneKey, bool>,
        mut is_free: impl FnMut(LaneKey, OrderKey) -> bool,
    ) -> Option<OrderKey> {
        answers.clear();
        let (mut best, mut any_free): (Option<(TenantPosition, OrderKey)>, bool) = (None, false);
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
            } else if !any_free && answers.len() == self.lane_count {
                break;
            }
        }
        best.map(|(_, key)| key)
    }

    /// The requests of a lane of all tenants, in order.
    pub(super) fn lane(&self, lane: LaneKey) -> Vec<OrderKey> {
        let mut keys: Vec<OrderKey> =
            self.tenants_of(lane).flat_map(|tenant| self.shares[&tenant].lane(lane)).collect();
        keys.sort_unstable();
        keys
    }

    pub(super) fn has_lane(&self, lane: LaneKey) -> bool {
        self.tenants_of(lane).next().is_some()
    }

    /// The tenants with requests in a lane.
    fn tenants_of(&self, lane: LaneKey) -> impl Iterator<Item = TenantKey> {
        let of_lane = (lane, TenantKey(0))..=(lane, TenantKey(u64::MAX));
        self.lanes.range(of_lane).map(|((_, tenant), _)| *tenant)
    }

    /// Every lane with its first request of any tenant, ordered by these requests. Visits every tenant's lanes.
    pub(super) fn heads(&self) -> Vec<(LaneKey, OrderKey)> {
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

    /// Checks the limits in the order requests, tokens, cached tokens, and returns the first one reached.
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
        let excess = current.saturating_sub(max).saturating_add(1);
        let retry_after = self.drain.retry_after(now, limit, excess);
        Backpressure { class: self.name.clone(), limit, current, max, retry_after }
    }

    /// Checks the invariants of [`Queue::check_invariants`](super::Queue::check_invariants) for one class. `waiting`
    /// returns the queue entry for a key.
    pub(super) fn check_invariants<'a>(&self, waiting: impl Fn(LaneKey, OrderKey) -> &'a QueueEntry) {
        let (mut requests, mut raw_tokens, mut cached_tokens) = (0, 0, 0);
        let mut lanes: BTreeMap<(LaneKey, TenantKey), usize> = BTreeMap::new();
        for (&tenant, share) in &self.shares {
            share.check_invariants(self.clock_tokens);
            for (lane, key) in share.keys() {
                let entry = waiting(lane, key);
                assert_eq!(entry.tenant, tenant);
                requests += 1;
                *lanes.entry((lane, tenant)).or_default() += 1;
                raw_tokens += u64::from(entry.prompt_tokens);
                cached_tokens += u64::from(entry.cached_tokens);
                assert!(self.arrivals.contains(&(entry.arrival, key.sequence)), "{key:?} has no arrival");
            }
        }
        assert!(self.order.iter().copied().eq(self.shares.values().filter_map(Share::place).collect::<BTreeSet<_>>()));
        assert_eq!(self.lanes, lanes, "the number of requests per lane and tenant matches");
        let distinct: BTreeSet<LaneKey> = lanes.into_keys().map(|(lane, _)| lane).collect();
        assert_eq!(self.lane_count, distinct.len());
        assert_eq!(self.arrivals.len(), requests, "one arrival per request");
        assert_eq!((self.raw_tokens, self.cached_tokens), (raw_tokens, cached_tokens), "token sums match");
    }
}
