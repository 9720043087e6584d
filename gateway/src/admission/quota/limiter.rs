//! State of the limits of one tenant.

use std::collections::BTreeMap;
use std::time::Duration;

use pointsman::protocol::Timestamp;

use super::bucket::Bucket;
use super::{Limit, QuotaLimits};

const MINUTE: Duration = Duration::from_secs(60);
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// Retry time of a request above a limit of requests in flight: their ends cannot be predicted.
const IN_FLIGHT_RETRY: Duration = Duration::from_secs(1);

/// SHA-256 of a key.
pub(crate) type KeyId = [u8; 32];

/// A request above a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Exceeded {
    /// The limit with the longest wait.
    pub(crate) limit: Limit,
    /// Its value.
    pub(crate) max: u64,
    /// Time until all limits allow the request, if nothing else is admitted.
    pub(crate) retry_after: Duration,
}

/// Use of one kind of limit, for response headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Allowance {
    /// Units per window.
    pub(crate) limit: u64,
    /// Units left now.
    pub(crate) remaining: u64,
    /// Time until the limit is unused.
    pub(crate) reset: Duration,
}

/// Use of the limits with the fewest units left, of the tenant or the key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Remaining {
    pub(crate) requests: Option<Allowance>,
    pub(crate) tokens: Option<Allowance>,
}

/// An admitted request: its key, and the tokens charged so far. Ends with [`Limiter::end`].
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub(crate) struct Charge {
    key: KeyId,
    tokens: u64,
}

/// Limits of one tenant or key, with their state.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Counters {
    requests: Option<Bucket>,
    /// Per minute, then per day.
    tokens: [Option<Bucket>; 2],
    in_flight_max: Option<u32>,
    in_flight: u32,
}

const TOKEN_LIMITS: [Limit; 2] = [Limit::TokensPerMinute, Limit::TokensPerDay];

impl Counters {
    fn of(settings: &QuotaLimits, now: Timestamp) -> Self {
        Self::default().under(settings, now)
    }

    /// The same use under other limits.
    fn under(self, settings: &QuotaLimits, now: Timestamp) -> Self {
        let bucket = |old: Option<Bucket>, limit: Option<u64>, window| match (old, limit) {
            (Some(old), Some(limit)) => Some(old.with_limit(limit, now)),
            (None, Some(limit)) => Some(Bucket::new(limit, window, now)),
            (_, None) => None,
        };
        let [per_minute, per_day] = self.tokens;
        Self {
            requests: bucket(self.requests, settings.requests_per_minute, MINUTE),
            tokens: [
                bucket(per_minute, settings.tokens_per_minute, MINUTE),
                bucket(per_day, settings.tokens_per_day, DAY),
            ],
            in_flight_max: settings.requests_in_flight_max,
            in_flight: self.in_flight,
        }
    }

    fn token_buckets(&mut self) -> impl Iterator<Item = (Limit, &mut Bucket)> {
        TOKEN_LIMITS.into_iter().zip(&mut self.tokens).filter_map(|(limit, bucket)| Some((limit, bucket.as_mut()?)))
    }

    /// Limits that a new request exceeds.
    fn exceeded_by_request(&mut self, now: Timestamp) -> Vec<Exceeded> {
        let mut exceeded = self.exceeded_by_tokens(1, now);
        if let Some(bucket) = &mut self.requests {
            exceeded.extend(wait(Limit::RequestsPerMinute, bucket, 1, now));
        }
        if let Some(max) = self.in_flight_max.filter(|max| self.in_flight >= *max) {
            let (limit, max) = (Limit::RequestsInFlight, u64::from(max));
            exceeded.push(Exceeded { limit, max, retry_after: IN_FLIGHT_RETRY });
        }
        exceeded
    }

    /// Limits that further tokens exceed.
    fn exceeded_by_tokens(&mut self, tokens: u64, now: Timestamp) -> Vec<Exceeded> {
        self.token_buckets().filter_map(|(limit, bucket)| wait(limit, bucket, tokens, now)).collect()
    }

    fn admit(&mut self, now: Timestamp) {
        self.requests.iter_mut().for_each(|bucket| bucket.take(1, now));
        self.in_flight += 1;
    }

    fn take_tokens(&mut self, tokens: u64, now: Timestamp) {
        self.token_buckets().for_each(|(_, bucket)| bucket.take(tokens, now));
    }

    fn give_back_tokens(&mut self, tokens: u64, now: Timestamp) {
        self.token_buckets().for_each(|(_, bucket)| bucket.give_back(tokens, now));
    }

    fn is_unused(&mut self, now: Timestamp) -> bool {
        let is_full = |bucket: &mut Bucket| bucket.full_in(now).is_zero();
        self.in_flight == 0
            && self.requests.iter_mut().all(is_full)
            && self.tokens.iter_mut().flatten().all(|bucket| bucket.full_in(now).is_zero())
    }
}

fn wait(limit: Limit, bucket: &mut Bucket, units: u64, now: Timestamp) -> Option<Exceeded> {
    let retry_after = bucket.wait(units, now);
    (!retry_after.is_zero()).then(|| Exceeded { limit, max: bucket.limit(), retry_after })
}

fn allowance(bucket: &mut Bucket, now: Timestamp) -> Allowance {
    Allowance { limit: bucket.limit(), remaining: bucket.available(now), reset: bucket.full_in(now) }
}

/// The limits of a tenant and of its keys, with their state.
#[derive(Debug, Default)]
pub(crate) struct Limiter {
    settings: QuotaLimits,
    key_settings: QuotaLimits,
    tenant: Counters,
    /// State of the keys in use; a key without an entry has used nothing.
    keys: BTreeMap<KeyId, Counters>,
}

impl Limiter {
    /// Limits without use: of the tenant, and of each key.
    pub(crate) fn new(settings: QuotaLimits, key_settings: QuotaLimits, now: Timestamp) -> Self {
        Self { settings, key_settings, tenant: Counters::of(&settings, now), keys: BTreeMap::new() }
    }

    /// Replaces the limits. The use of the present windows stays.
    pub(crate) fn set(&mut self, settings: QuotaLimits, key_settings: QuotaLimits, now: Timestamp) {
        self.settings = settings;
        self.tenant = std::mem::take(&mut self.tenant).under(&settings, now);
        if self.key_settings != key_settings {
            self.key_settings = key_settings;
            for counters in self.keys.values_mut() {
                *counters = std::mem::take(counters).under(&key_settings, now);
            }
        }
    }

    fn both(&mut self, key: KeyId, now: Timestamp) -> [&mut Counters; 2] {
        let settings = self.key_settings;
        [&mut self.tenant, self.keys.entry(key).or_insert_with(|| Counters::of(&settings, now))]
    }

    /// Admits a request of this key: counts it as a request and as one in flight. Its tokens are charged later, but none
    /// may be overdrawn.
    ///
    /// # Errors
    /// A limit is exceeded; nothing has been counted.
    pub(crate) fn admit(&mut self, key: KeyId, now: Timestamp) -> Result<Charge, Exceeded> {
        let both = self.both(key, now);
        let exceeded = both.into_iter().flat_map(|counters| counters.exceeded_by_request(now));
        if let Some(longest) = exceeded.max_by_key(|exceeded| exceeded.retry_after) {
            self.forget_unused(key, now);
            return Err(longest);
        }
        self.both(key, now).into_iter().for_each(|counters| counters.admit(now));
        Ok(Charge { key, tokens: 0 })
    }

    /// Charges the tokens of the prompt.
    ///
    /// # Errors
    /// A limit is exceeded; no tokens have been charged.
    pub(crate) fn charge(&mut self, charge: &mut Charge, tokens: u64, now: Timestamp) -> Result<(), Exceeded> {
        let both = self.both(charge.key, now);
        let exceeded = both.into_iter().flat_map(|counters| counters.exceeded_by_tokens(tokens, now));
        if let Some(longest) = exceeded.max_by_key(|exceeded| exceeded.retry_after) {
            return Err(longest);
        }
        self.both(charge.key, now).into_iter().for_each(|counters| counters.take_tokens(tokens, now));
        charge.tokens += tokens;
        Ok(())
    }

    /// Ends a request that used `tokens` tokens in total, in place of the charged ones.
    pub(crate) fn end(&mut self, charge: Charge, tokens: u64, now: Timestamp) {
        for counters in self.both(charge.key, now) {
            counters.in_flight = counters.in_flight.saturating_sub(1);
            match tokens.checked_sub(charge.tokens) {
                Some(more) => counters.take_tokens(more, now),
                None => counters.give_back_tokens(charge.tokens - tokens, now),
            }
        }
        self.forget_unused(charge.key, now);
    }

    /// Ends a request that was rejected after its admission: it counts as none.
    pub(crate) fn cancel(&mut self, charge: Charge, now: Timestamp) {
        for counters in self.both(charge.key, now) {
            counters.requests.iter_mut().for_each(|bucket| bucket.give_back(1, now));
        }
        self.end(charge, 0, now);
    }

    /// Limits the memory to the keys in use.
    fn forget_unused(&mut self, key: KeyId, now: Timestamp) {
        if self.keys.get_mut(&key).is_some_and(|counters| counters.is_unused(now)) {
            self.keys.remove(&key);
        }
    }

    /// The limits of this key with the fewest units left.
    pub(crate) fn remaining(&mut self, key: KeyId, now: Timestamp) -> Remaining {
        let mut both = self.both(key, now);
        let fewest = |allowances: Vec<Allowance>| allowances.into_iter().min_by_key(|allowance| allowance.remaining);
        let requests = both.iter_mut().filter_map(|counters| counters.requests.as_mut());
        let requests = fewest(requests.map(|bucket| allowance(bucket, now)).collect());
        let tokens = both.iter_mut().flat_map(|counters| counters.tokens.iter_mut().flatten());
        let tokens = fewest(tokens.map(|bucket| allowance(bucket, now)).collect());
        self.forget_unused(key, now);
        Remaining { requests, tokens }
    }

    #[cfg(test)]
    pub(super) fn key_count(&self) -> usize {
        self.keys.len()
    }

    #[cfg(test)]
    pub(super) fn in_flight(&self) -> u32 {
        self.tenant.in_flight
    }
}
