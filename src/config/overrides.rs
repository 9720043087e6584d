//! Settings that one request may override.

use serde::{Deserialize, Serialize};

use super::ConfigErrors;
use crate::policy::Policy;
use crate::policy::PolicyConfig;
use crate::validation::Problems;

/// Per-request overrides of the router configuration. An absent field keeps the configured value.
///
/// ```
/// use pointsman::config::RouterConfigOverride;
/// use pointsman::policy::Policy;
///
/// let by_load: RouterConfigOverride = serde_json::from_str(r#"{ "overlap_score_credit": 0.0 }"#)?;
/// by_load.validate(&Policy::Latency.into())?; // caches do not count for this request
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RouterConfigOverride {
    /// See [`KvConfig::overlap_score_credit`](crate::policy::KvConfig::overlap_score_credit). Policies other than `kv` take
    /// only 0: caches then do not count for the request.
    pub overlap_score_credit: Option<f64>,
    /// See [`KvConfig::prefill_load_scale`](crate::policy::KvConfig::prefill_load_scale).
    pub prefill_load_scale: Option<f64>,
    /// Randomness of the choice, under the policies `latency` and `kv`.
    pub temperature: Option<f64>,
    /// See `load.assume_kv_reuse`.
    pub assume_kv_reuse: Option<bool>,
    /// See `load.track_prefill_tokens`.
    pub track_prefill_tokens: Option<bool>,
    /// See [`KvConfig::shared_cache_multiplier`](crate::policy::KvConfig::shared_cache_multiplier).
    pub shared_cache_multiplier: Option<f64>,
}

impl RouterConfigOverride {
    /// Whether no field is given.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Checks every rule, as [`RouterConfig::validate`](super::RouterConfig::validate) does, also that every field given
    /// has an effect under `policy`.
    ///
    /// # Errors
    /// Every field that breaks its rule.
    pub fn validate(&self, policy: &PolicyConfig) -> Result<(), ConfigErrors> {
        let mut problems = Problems::default();
        problems.weight("overlap_score_credit", self.overlap_score_credit);
        problems.weight("prefill_load_scale", self.prefill_load_scale);
        problems.weight("temperature", self.temperature);
        problems.share("shared_cache_multiplier", self.shared_cache_multiplier);
        let is_kv = policy.kind() == Policy::Kv;
        let holds = |credit: &f64| is_kv || *credit == 0.0;
        problems.check_given(
            "overlap_score_credit",
            self.overlap_score_credit,
            holds,
            "0 or absent unless the policy is kv",
        );
        let rule = "absent unless the policy is kv";
        problems.check_given("prefill_load_scale", self.prefill_load_scale, |_| is_kv, rule);
        problems.check_given("shared_cache_multiplier", self.shared_cache_multiplier, |_| is_kv, rule);
        let rule = "absent unless the policy is latency or kv";
        problems.check_given("temperature", self.temperature, |_| policy.compares_costs(), rule);
        problems.into_result()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overrides_follow_the_rules_of_their_fields() {
        let wrong =
            RouterConfigOverride { temperature: Some(-1.0), shared_cache_multiplier: Some(2.0), ..Default::default() };
        assert_eq!(
            wrong.validate(&Policy::Kv.into()).expect_err("refused").to_string(),
            "temperature is -1, must be between 0 and 1e9; shared_cache_multiplier is 2, must be between 0 and 1"
        );
        assert!(RouterConfigOverride::default().is_empty() && !wrong.is_empty());
        assert!(serde_json::from_str::<RouterConfigOverride>(r#"{"seed":1}"#).is_err(), "the seed is a router setting");
    }

    #[test]
    fn an_override_without_effect_is_rejected_by_name() {
        let all = RouterConfigOverride {
            overlap_score_credit: Some(0.5),
            prefill_load_scale: Some(1.0),
            temperature: Some(1.0),
            assume_kv_reuse: Some(false),
            track_prefill_tokens: Some(false),
            shared_cache_multiplier: Some(0.5),
        };
        let refused = |policy: Policy, overrides: RouterConfigOverride| {
            let errors = overrides.validate(&policy.into()).err().map_or(Vec::new(), |errors| errors.0);
            errors.into_iter().map(|error| error.field).collect::<Vec<_>>()
        };
        assert!(refused(Policy::Kv, all).is_empty());
        let of_kv = ["overlap_score_credit", "prefill_load_scale", "shared_cache_multiplier"];
        assert_eq!(refused(Policy::Latency, all), of_kv);
        let by_load = RouterConfigOverride { overlap_score_credit: Some(0.0), ..Default::default() };
        for policy in Policy::ALL {
            assert!(refused(policy, by_load).is_empty(), "{policy:?}");
            if !matches!(policy, Policy::Kv | Policy::Latency) {
                assert_eq!(refused(policy, all), [&of_kv[..], &["temperature"]].concat(), "{policy:?}");
            }
        }
    }
}
