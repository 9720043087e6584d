//! Limits and usage of tenants: clock, metrics and response headers.
//!
//! The state of a tenant survives reloads. A [`QuotaLease`] counts a request in flight and settles its tokens when it
//! is dropped, however the request ends. [`quota`](crate::admission::quota) decides.

use std::sync::Arc;
use std::time::Duration;

use axum::http::{HeaderName, HeaderValue};
use metrics::Counter;
use parking_lot::Mutex;
use pointsman::protocol::Timestamp;
use tokio::time::Instant;

use crate::admission::quota::{Allowance, Charge, Exceeded, KeyId, Limit, Limiter, QuotaLimits};
use crate::formats::openai::ApiError;
use crate::observe::access::TokenUse;
use crate::observe::metric::metric_table;

metric_table! {
    TENANT_REQUESTS: counter "pointsman_gateway_tenant_requests_total" ["tenant"] =
        "Requests of a tenant that no limit rejected, counted at their end.";
    TENANT_TOKENS: counter "pointsman_gateway_tenant_tokens_total" ["tenant", "kind"] =
        "Tokens of a tenant: `prompt`, `cached` ones among them, and `completion`.";
    TENANT_REFUSALS: counter "pointsman_gateway_tenant_refusals_total" ["tenant", "limit"] =
        "Requests rejected because of a limit of the tenant or of its key.";
}

/// Maximum tenants with a label of their own, in the order of the configuration.
const LABELS_MAX: usize = 1_000;

/// Label of further tenants. Tenants of this name share it.
const OTHER: &str = "other";

/// Bytes of a prompt per token, to estimate its length if its tokens are unknown.
const BYTES_PER_TOKEN: u64 = 4;

/// Limits of one tenant, with their state and metrics.
pub(crate) struct TenantQuota {
    started: Instant,
    limiter: Mutex<Limiter>,
    requests: Counter,
    /// Prompt, cached and completion tokens.
    tokens: [Counter; 3],
    refusals: [Counter; Limit::ALL.len()],
}

impl TenantQuota {
    /// State without use. `n` is the position of the tenant in the configuration.
    pub(crate) fn new(n: usize, tenant: &str, limits: QuotaLimits, key_limits: QuotaLimits) -> Self {
        let label = || if n < LABELS_MAX { tenant.to_owned() } else { OTHER.to_owned() };
        let tokens = |kind: &'static str| metrics::counter!(TENANT_TOKENS.name, "tenant" => label(), "kind" => kind);
        let refusals =
            |limit: Limit| metrics::counter!(TENANT_REFUSALS.name, "tenant" => label(), "limit" => limit.name());
        Self {
            started: Instant::now(),
            limiter: Mutex::new(Limiter::new(limits, key_limits, Timestamp::default())),
            requests: metrics::counter!(TENANT_REQUESTS.name, "tenant" => label()),
            tokens: ["prompt", "cached", "completion"].map(tokens),
            refusals: Limit::ALL.map(refusals),
        }
    }

    /// Replaces the limits; the use of the present windows stays.
    pub(crate) fn set(&self, limits: QuotaLimits, key_limits: QuotaLimits) {
        let now = self.now();
        self.limiter.lock().set(limits, key_limits, now);
    }

    fn now(&self) -> Timestamp {
        Timestamp::default() + self.started.elapsed()
    }

    /// Admits a request with this key.
    ///
    /// # Errors
    /// 429 above a limit.
    pub(crate) fn admit(self: &Arc<Self>, key: KeyId) -> Result<QuotaLease, ApiError> {
        let admitted = self.limiter.lock().admit(key, self.now());
        match admitted {
            Ok(charge) => {
                let (quota, charge) = (Arc::clone(self), Some(charge));
                Ok(QuotaLease { quota, key, charge, estimate: None, is_refused: false })
            }
            Err(exceeded) => Err(self.refused(key, exceeded)),
        }
    }

    fn refused(&self, key: KeyId, exceeded: Exceeded) -> ApiError {
        let Exceeded { limit, max, retry_after } = exceeded;
        self.refusals[limit as usize].increment(1);
        ApiError { headers: self.headers(key), ..ApiError::limit_exceeded(limit, max, retry_after) }
    }

    /// OpenAI's headers for the limits with the fewest units left.
    fn headers(&self, key: KeyId) -> Vec<(HeaderName, HeaderValue)> {
        let now = self.now();
        let remaining = self.limiter.lock().remaining(key, now);
        let requests = remaining.requests.map(|allowance| allowance_headers(REQUEST_HEADERS, allowance));
        let tokens = remaining.tokens.map(|allowance| allowance_headers(TOKEN_HEADERS, allowance));
        requests.into_iter().chain(tokens).flatten().collect()
    }
}

/// An admitted request of a tenant.
pub(crate) struct QuotaLease {
    quota: Arc<TenantQuota>,
    key: KeyId,
    /// Present until the end.
    charge: Option<Charge>,
    /// Prompt tokens charged at admission; absent for requests without work for an engine.
    estimate: Option<u64>,
    is_refused: bool,
}

impl QuotaLease {
    /// Charges the prompt, whose length is estimated from its bytes if `tokens` is absent.
    ///
    /// # Errors
    /// 429 above a limit. The request then counts as none.
    pub(crate) fn charge(
        &mut self,
        tokens: Option<u32>,
        body_bytes: usize,
        tokens_max: Option<u32>,
    ) -> Result<(), ApiError> {
        let estimate = || (body_bytes as u64).div_ceil(BYTES_PER_TOKEN).min(tokens_max.map_or(u64::MAX, u64::from));
        let tokens = tokens.map_or_else(estimate, u64::from);
        let Some(charge) = &mut self.charge else { return Ok(()) };
        let charged = self.quota.limiter.lock().charge(charge, tokens, self.quota.now());
        match charged {
            Ok(()) => self.estimate = Some(tokens),
            Err(exceeded) => {
                self.is_refused = true;
                return Err(self.quota.refused(self.key, exceeded));
            }
        }
        Ok(())
    }

    /// Ends the request with the tokens that it used; `None` if no engine worked for it.
    pub(crate) fn settle(&mut self, used: Option<TokenUse>) {
        let Some(charge) = self.charge.take() else { return };
        let now = self.quota.now();
        if self.is_refused {
            return self.quota.limiter.lock().cancel(charge, now);
        }
        self.quota.requests.increment(1);
        let used = used.zip(self.estimate).map(|(used, estimate)| (used, used.prompt.unwrap_or(estimate)));
        let Some((TokenUse { cached, completion, .. }, prompt)) = used else {
            return self.quota.limiter.lock().end(charge, 0, now);
        };
        for (counter, tokens) in self.quota.tokens.iter().zip([prompt, cached, completion]) {
            counter.increment(tokens);
        }
        self.quota.limiter.lock().end(charge, prompt.saturating_add(completion), now);
    }

    /// Headers for the response.
    pub(crate) fn headers(&self) -> Vec<(HeaderName, HeaderValue)> {
        self.quota.headers(self.key)
    }
}

impl Drop for QuotaLease {
    fn drop(&mut self) {
        self.settle(None);
    }
}

/// Limit, remaining units and time until the limit is unused.
const REQUEST_HEADERS: [&str; 3] =
    ["x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"];
const TOKEN_HEADERS: [&str; 3] =
    ["x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens"];

fn allowance_headers(names: [&'static str; 3], allowance: Allowance) -> Vec<(HeaderName, HeaderValue)> {
    let Allowance { limit, remaining, reset } = allowance;
    let values = [limit.to_string(), remaining.to_string(), duration_text(reset)];
    let names = names.into_iter().map(HeaderName::from_static);
    names.zip(values).filter_map(|(name, value)| Some((name, HeaderValue::try_from(value).ok()?))).collect()
}

/// A duration as in OpenAI's headers: `20ms`, `1.5s`, `6m0s`, `23h59m8s`. Rounded up to milliseconds.
fn duration_text(duration: Duration) -> String {
    let ms = duration.as_nanos().div_ceil(1_000_000);
    if ms < 1_000 {
        return format!("{ms}ms");
    }
    let (hours, minutes, seconds) = (ms / 3_600_000, ms / 60_000 % 60, (ms % 60_000) as f64 / 1e3);
    match (hours, minutes) {
        (0, 0) => format!("{seconds}s"),
        (0, _) => format!("{minutes}m{seconds}s"),
        _ => format!("{hours}h{minutes}m{seconds}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_the_format_of_openai() {
        for (ms, expected) in [
            (0, "0ms"),
            (20, "20ms"),
            (1_000, "1s"),
            (1_500, "1.5s"),
            (59_951, "59.951s"),
            (360_000, "6m0s"),
            (86_348_010, "23h59m8.01s"),
        ] {
            assert_eq!(duration_text(Duration::from_millis(ms)), expected);
        }
        assert_eq!(duration_text(Duration::from_nanos(1)), "1ms", "never less than the time");
    }
}
