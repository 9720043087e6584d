//! Limits of tenants against a slow model, and examples.

use std::collections::BTreeMap;
use std::time::Duration;

use pointsman::protocol::Timestamp;
use proptest::prelude::*;

use super::*;

const SECOND_NS: u64 = 1_000_000_000;
const MINUTE_NS: u64 = 60 * SECOND_NS;
const DAY_NS: u64 = 24 * 60 * MINUTE_NS;

fn at(seconds: f64) -> Timestamp {
    Timestamp::default() + Duration::from_secs_f64(seconds)
}

fn key(n: u8) -> KeyId {
    [n; 32]
}

fn limits(requests: u64, tokens: u64) -> QuotaLimits {
    QuotaLimits { requests_per_minute: Some(requests), tokens_per_minute: Some(tokens), ..QuotaLimits::default() }
}

#[test]
fn a_new_limit_keeps_the_use() {
    let mut limiter = Limiter::new(limits(100, 1_000), QuotaLimits::default(), at(0.0));
    let mut charge = limiter.admit(key(1), at(0.0)).expect("unused");
    limiter.charge(&mut charge, 900, at(0.0)).expect("within the limit");
    let remaining = |limiter: &mut Limiter| limiter.remaining(key(1), at(0.0)).tokens.map(|tokens| tokens.remaining);
    limiter.set(limits(100, 2_000), QuotaLimits::default(), at(0.0));
    assert_eq!(remaining(&mut limiter), Some(1_100));
    limiter.set(limits(100, 500), QuotaLimits::default(), at(0.0));
    assert_eq!(remaining(&mut limiter), Some(0));
    limiter.set(QuotaLimits::default(), QuotaLimits::default(), at(0.0));
    assert_eq!(remaining(&mut limiter), None);
    limiter.end(charge, 900, at(0.0));
    assert_eq!(limiter.in_flight(), 0);
}

/// The generic cell rate algorithm: the time at which the limit is unused again, multiplied by the limit, so that it is
/// an integer.
#[derive(Clone, Copy)]
struct ModelLimit {
    limit: u64,
    window_ns: u64,
    unused_at: i128,
}

impl ModelLimit {
    fn scaled(&self, ns: u64) -> i128 {
        i128::from(ns) * i128::from(self.limit)
    }

    /// Earliest time for `units`, in nanoseconds, rounded up.
    fn earliest(&self, units: u64, now: u64) -> u64 {
        let units = units.min(self.limit);
        let end = self.unused_at.max(self.scaled(now)) + i128::from(units) * i128::from(self.window_ns);
        let due = end - self.scaled(self.window_ns);
        let due = due.max(self.scaled(now));
        let limit = i128::from(self.limit);
        u64::try_from(due.div_euclid(limit) + i128::from(due.rem_euclid(limit) > 0)).expect("small")
    }

    fn take(&mut self, units: i128, now: u64) {
        let now = self.scaled(now);
        self.unused_at = (self.unused_at.max(now) + units * i128::from(self.window_ns)).max(now);
    }

    /// Units that can be taken now, counted one by one.
    fn remaining(&self, now: u64) -> u64 {
        (1..=self.limit).take_while(|units| self.earliest(*units, now) == now).count() as u64
    }
}

/// Limits of a tenant or key.
#[derive(Clone, Default)]
struct ModelCounters {
    requests: Option<ModelLimit>,
    tokens: Vec<(Limit, ModelLimit)>,
    in_flight_max: Option<u32>,
    in_flight: u32,
}

impl ModelCounters {
    fn of(settings: &QuotaLimits) -> Self {
        let model = |limit, window_ns| ModelLimit { limit, window_ns, unused_at: 0 };
        let minute = settings.tokens_per_minute.map(|limit| (Limit::TokensPerMinute, model(limit, MINUTE_NS)));
        let day = settings.tokens_per_day.map(|limit| (Limit::TokensPerDay, model(limit, DAY_NS)));
        Self {
            requests: settings.requests_per_minute.map(|limit| model(limit, MINUTE_NS)),
            tokens: minute.into_iter().chain(day).collect(),
            in_flight_max: settings.requests_in_flight_max,
            in_flight: 0,
        }
    }

    fn wait_for_tokens(&self, tokens: u64, now: u64) -> u64 {
        self.tokens.iter().map(|(_, limit)| limit.earliest(tokens, now) - now).max().unwrap_or(0)
    }

    fn wait_for_request(&self, now: u64) -> u64 {
        let request = self.requests.map_or(0, |limit| limit.earliest(1, now) - now);
        let is_full = self.in_flight_max.is_some_and(|max| self.in_flight >= max);
        request.max(self.wait_for_tokens(1, now)).max(if is_full { SECOND_NS } else { 0 })
    }

    fn take_tokens(&mut self, tokens: i128, now: u64) {
        self.tokens.iter_mut().for_each(|(_, limit)| limit.take(tokens, now));
    }

    fn remaining(&self, now: u64) -> (Option<u64>, Option<u64>) {
        let tokens = self.tokens.iter().map(|(_, limit)| limit.remaining(now)).min();
        (self.requests.map(|limit| limit.remaining(now)), tokens)
    }
}

#[derive(Clone, Debug)]
enum Step {
    Pass { ns: u64 },
    Admit { key: u8 },
    Charge { nth: usize, tokens: u64 },
    End { nth: usize, tokens: u64 },
    Cancel { nth: usize },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        2 => (0..20 * SECOND_NS).prop_map(|ns| Step::Pass { ns }),
        1 => (0..MINUTE_NS * 90).prop_map(|ns| Step::Pass { ns }),
        4 => (0_u8..3).prop_map(|key| Step::Admit { key }),
        3 => (any::<usize>(), 0_u64..40).prop_map(|(nth, tokens)| Step::Charge { nth, tokens }),
        3 => (any::<usize>(), 0_u64..60).prop_map(|(nth, tokens)| Step::End { nth, tokens }),
        1 => any::<usize>().prop_map(|nth| Step::Cancel { nth }),
    ];
    prop::collection::vec(step, 1..80)
}

fn some_limits() -> impl Strategy<Value = QuotaLimits> {
    let limit = || prop::option::of(1_u64..50);
    (limit(), limit(), prop::option::of(1_u64..200), prop::option::of(1_u32..5)).prop_map(
        |(requests_per_minute, tokens_per_minute, tokens_per_day, requests_in_flight_max)| QuotaLimits {
            requests_per_minute,
            tokens_per_minute,
            tokens_per_day,
            requests_in_flight_max,
        },
    )
}

proptest! {
    #[test]
    fn a_limiter_equals_the_model(tenant in some_limits(), per_key in some_limits(), steps in steps()) {
        let mut limiter = Limiter::new(tenant, per_key, Timestamp(0));
        let (mut model, mut model_keys) = (ModelCounters::of(&tenant), BTreeMap::new());
        let (mut now, mut running): (u64, Vec<(u8, Charge, u64)>) = (0, Vec::new());
        for step in steps {
            let time = Timestamp(now);
            match step {
                Step::Pass { ns } => now += ns,
                Step::Admit { key: n } => {
                    let of_key = model_keys.entry(n).or_insert_with(|| ModelCounters::of(&per_key));
                    let wait = model.wait_for_request(now).max(of_key.wait_for_request(now));
                    match limiter.admit(key(n), time) {
                        Ok(charge) => {
                            prop_assert_eq!(wait, 0);
                            for counters in [&mut model, of_key] {
                                counters.requests.iter_mut().for_each(|limit| limit.take(1, now));
                                counters.in_flight += 1;
                            }
                            running.push((n, charge, 0));
                        }
                        Err(exceeded) => prop_assert_eq!(exceeded.retry_after, Duration::from_nanos(wait)),
                    }
                }
                Step::Charge { nth, tokens } if !running.is_empty() => {
                    let nth = nth % running.len();
                    let (n, charge, charged) = &mut running[nth];
                    let of_key = model_keys.entry(*n).or_insert_with(|| ModelCounters::of(&per_key));
                    let wait = model.wait_for_tokens(tokens, now).max(of_key.wait_for_tokens(tokens, now));
                    match limiter.charge(charge, tokens, time) {
                        Ok(()) => {
                            prop_assert_eq!(wait, 0);
                            *charged += tokens;
                            [&mut model, of_key].into_iter().for_each(|one| one.take_tokens(tokens.into(), now));
                        }
                        Err(exceeded) => prop_assert_eq!(exceeded.retry_after, Duration::from_nanos(wait)),
                    }
                }
                Step::End { nth, .. } | Step::Cancel { nth } if !running.is_empty() => {
                    let (n, charge, charged) = running.swap_remove(nth % running.len());
                    let of_key = model_keys.entry(n).or_insert_with(|| ModelCounters::of(&per_key));
                    let (tokens, is_cancel) = match step {
                        Step::End { tokens, .. } => (tokens, false),
                        _ => (0, true),
                    };
                    for counters in [&mut model, of_key] {
                        counters.in_flight -= 1;
                        counters.take_tokens(i128::from(tokens) - i128::from(charged), now);
                        if is_cancel {
                            counters.requests.iter_mut().for_each(|limit| limit.take(-1, now));
                        }
                    }
                    match is_cancel {
                        true => limiter.cancel(charge, time),
                        false => limiter.end(charge, tokens, time),
                    }
                }
                Step::Charge { .. } | Step::End { .. } | Step::Cancel { .. } => {}
            }
            for n in 0..3 {
                let of_key = model_keys.entry(n).or_insert_with(|| ModelCounters::of(&per_key));
                let (shown, expected) = (limiter.remaining(key(n), Timestamp(now)), [model.remaining(now), of_key.remaining(now)]);
                let shown = (shown.requests.map(|one| one.remaining), shown.tokens.map(|one| one.remaining));
                let fewest = |both: [Option<u64>; 2]| both.into_iter().flatten().min();
                let expected = (fewest(expected.map(|one| one.0)), fewest(expected.map(|one| one.1)));
                prop_assert_eq!(shown, expected);
            }
            prop_assert_eq!(limiter.in_flight() as usize, running.len());
        }
        // At rest, after the longest window and all debts, nothing is left.
        for (_, charge, _) in running {
            limiter.end(charge, 0, Timestamp(now));
        }
        let later = Timestamp(now + 100_000 * DAY_NS);
        for n in 0..3 {
            let shown = limiter.remaining(key(n), later);
            let all = [shown.requests, shown.tokens];
            prop_assert!(all.into_iter().flatten().all(|one| one.reset.is_zero() && one.remaining == one.limit));
        }
        prop_assert_eq!((limiter.in_flight(), limiter.key_count()), (0, 0));
    }
}
