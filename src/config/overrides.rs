//! Settings that one request may have otherwise.

use serde::{Deserialize, Serialize};

use super::{ConfigErrors, Problems, RouterConfig};

/// What of a router's configuration is otherwise for one request. What is absent stays as configured.
///
/// ```
/// use pointsman::config::RouterConfigOverride;
///
/// let cold: RouterConfigOverride = serde_json::from_str(r#"{ "overlap_score_credit": 0.0 }"#)?;
/// cold.validate()?; // this request goes by load alone
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RouterConfigOverride {
    /// See [`RouterConfig::overlap_score_credit`].
    pub overlap_score_credit: Option<f64>,
    /// See [`RouterConfig::prefill_load_scale`].
    pub prefill_load_scale: Option<f64>,
    /// See [`RouterConfig::temperature`].
    pub temperature: Option<f64>,
    /// See [`RouterConfig::assume_kv_reuse`].
    pub assume_kv_reuse: Option<bool>,
    /// See [`RouterConfig::track_prefill_tokens`].
    pub track_prefill_tokens: Option<bool>,
    /// See [`RouterConfig::shared_cache_multiplier`].
    pub shared_cache_multiplier: Option<f64>,
}

impl RouterConfigOverride {
    /// Whether nothing is otherwise.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Checks every rule, as [`RouterConfig::validate`] does.
    ///
    /// # Errors
    /// Every field that breaks its rule.
    pub fn validate(&self) -> Result<(), ConfigErrors> {
        let mut problems = Problems::default();
        let not_negative = [
            ("overlap_score_credit", self.overlap_score_credit),
            ("prefill_load_scale", self.prefill_load_scale),
            ("temperature", self.temperature),
        ];
        for (field, value) in not_negative {
            let holds = |value: &f64| (0.0..=RouterConfig::WEIGHT_MAX).contains(value);
            problems.check_given(field, value, holds, "between 0 and 1e9");
        }
        let holds = |value: &f64| (0.0..=1.0).contains(value);
        problems.check_given("shared_cache_multiplier", self.shared_cache_multiplier, holds, "between 0 and 1");
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
            wrong.validate().expect_err("refused").to_string(),
            "temperature is -1, must be between 0 and 1e9; shared_cache_multiplier is 2, must be between 0 and 1"
        );
        assert!(RouterConfigOverride::default().is_empty() && !wrong.is_empty());
        assert!(serde_json::from_str::<RouterConfigOverride>(r#"{"seed":1}"#).is_err(), "the seed is the router's");
    }
}
