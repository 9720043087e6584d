//! Decision between a remote and a local prefill in disaggregated serving.
//!
//! A prefill pool computes prompts, and their KV blocks are transferred to the decode rank. A prompt that is mostly
//! cached on the decode rank, or that would wait long for a prefill rank, is served faster by the decode rank alone.
//! This module has the settings and the decision; callers select both ranks and transfer the blocks.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::config::ConfigErrors;
use crate::config::table::settings;
use crate::error::RouteError;
use crate::validation::Problems;

/// Condition for skipping a remote prefill.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SkipPolicy {
    /// Few tokens to compute: fewer than `effective_isl_tokens_max`, and a smaller share of the prompt than
    /// `effective_isl_ratio_max`.
    #[default]
    IslBounding,
    /// The prefill rank is busy: it has more than `prefill_busy_frac` of its `max_num_batched_tokens` to compute.
    PrefillLoad,
    /// Either of the two conditions.
    IslOrLoad,
}

settings! {
    /// Settings of disaggregated serving with one prefill and one decode pool.
    ///
    /// ```
    /// use pointsman::DisaggConfig;
    ///
    /// let config: DisaggConfig = serde_json::from_str(r#"{ "enabled": true, "decode_busy_frac": 0.9 }"#)?;
    /// config.validate()?;
    /// assert_eq!(config.effective_isl_tokens_max, 2_048);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub struct DisaggConfig {
        /// Whether `policy` may keep a prefill on the decode rank. Default false: every prefill is
        /// remote.
        enabled: bool;
        /// Condition for skipping a remote prefill. Default `isl_bounding`.
        policy: SkipPolicy;
        /// Limit of short prompts, in tokens not cached on the decode rank. Default 2,048.
        effective_isl_tokens_max: u32 = 2_048;
        /// The same limit as a share of the prompt; a value above 1 disables it. Default 0.7, not negative.
        effective_isl_ratio_max: f64 = 0.7;
        /// Busy limit of a prefill rank: tokens to compute as a share of its `max_num_batched_tokens`. A rank of
        /// unknown capacity is never busy. Default none; not negative, and required if `policy` depends on load.
        prefill_busy_frac: Option<f64>;
        /// Limit of active blocks on a decode rank that also prefills, as a share of its `total_kv_blocks`. A rank of
        /// unknown capacity has no limit. Default none: no limit. Not negative.
        decode_busy_frac: Option<f64>;
        /// Whether the decode rank prefills if no prefill rank is available. Default false: the request fails.
        decode_fallback: bool;
    }
}

impl DisaggConfig {
    /// Validates all settings.
    ///
    /// # Errors
    /// All fields that violate their rule.
    pub fn validate(&self) -> Result<(), ConfigErrors> {
        let mut problems = Problems::default();
        self.check(&mut problems);
        problems.into_result()
    }

    pub(crate) fn check(&self, problems: &mut Problems) {
        let shares = [
            ("effective_isl_ratio_max", Some(self.effective_isl_ratio_max)),
            ("prefill_busy_frac", self.prefill_busy_frac),
            ("decode_busy_frac", self.decode_busy_frac),
        ];
        for (field, value) in shares {
            let holds = |value: &f64| value.is_finite() && *value >= 0.0;
            problems.check_given(field, value, holds, "finite and not negative");
        }
        let given = self.prefill_busy_frac.is_some() || !self.policy.looks_at_load();
        problems.check("prefill_busy_frac", "none", given, "given where policy is prefill_load or isl_or_load");
    }
}

impl SkipPolicy {
    /// Whether the condition depends on the tokens to compute, which requires an index of the decode pool.
    #[must_use]
    pub fn looks_at_isl(self) -> bool {
        matches!(self, Self::IslBounding | Self::IslOrLoad)
    }

    /// Whether the condition depends on the load of the prefill rank.
    #[must_use]
    pub fn looks_at_load(self) -> bool {
        matches!(self, Self::PrefillLoad | Self::IslOrLoad)
    }
}

/// Inputs of the decision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DisaggFacts {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Prompt tokens cached on the chosen decode rank.
    pub decode_cached_tokens: u32,
    /// Prefill tokens to compute on the chosen prefill rank for other requests.
    pub prefill_active_tokens: u64,
    /// Maximum tokens per step of the prefill rank, if known.
    pub prefill_max_num_batched_tokens: Option<u32>,
    /// Active blocks on the decode rank, including this request.
    pub decode_potential_blocks: u64,
    /// Capacity of the decode rank in blocks, if known.
    pub decode_total_kv_blocks: Option<u32>,
}

/// Result of the decision on a remote prefill.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RemotePrefill {
    /// Prefill in the prefill pool.
    Worth,
    /// Prefill on the decode rank.
    Skip(SkipReason),
}

/// Reason for skipping a remote prefill.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SkipReason {
    /// Few tokens to compute.
    ShortPrefill {
        /// Prompt tokens not cached on the decode rank.
        effective_tokens: u32,
        /// Tokens of the prompt.
        prompt_tokens: u32,
    },
    /// The prefill rank is busy.
    PrefillBusy {
        /// Tokens to compute on the prefill rank.
        active_tokens: u64,
        /// Busy limit in tokens.
        active_tokens_max: f64,
    },
}

impl fmt::Display for SkipReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ShortPrefill { effective_tokens, prompt_tokens } => {
                write!(f, "only {effective_tokens} of {prompt_tokens} prompt tokens are left to compute")
            }
            Self::PrefillBusy { active_tokens, active_tokens_max } => {
                write!(f, "the prefill rank has {active_tokens} tokens to compute, busy is above {active_tokens_max}")
            }
        }
    }
}

/// Decides on a remote prefill.
///
/// A nearly full decode rank never prefills.
///
/// ```
/// use pointsman::{internals::disagg::{decide, DisaggFacts, RemotePrefill, SkipReason}, DisaggConfig};
///
/// let config = DisaggConfig { enabled: true, ..DisaggConfig::default() };
/// let cached = DisaggFacts { prompt_tokens: 8_000, decode_cached_tokens: 7_000, ..DisaggFacts::default() };
/// let short = SkipReason::ShortPrefill { effective_tokens: 1_000, prompt_tokens: 8_000 };
/// assert_eq!(decide(&config, &cached), RemotePrefill::Skip(short));
/// let fresh = DisaggFacts { decode_cached_tokens: 0, ..cached };
/// assert_eq!(decide(&config, &fresh), RemotePrefill::Worth);
/// ```
#[must_use]
pub fn decide(config: &DisaggConfig, facts: &DisaggFacts) -> RemotePrefill {
    let skip = || short_prefill(config, facts).or_else(|| prefill_busy(config, facts));
    match skip().filter(|_| config.enabled && !decode_busy(config, facts)) {
        Some(reason) => RemotePrefill::Skip(reason),
        None => RemotePrefill::Worth,
    }
}

fn short_prefill(config: &DisaggConfig, facts: &DisaggFacts) -> Option<SkipReason> {
    let prompt_tokens = facts.prompt_tokens;
    let effective_tokens = prompt_tokens.saturating_sub(facts.decode_cached_tokens);
    let ratio = f64::from(effective_tokens) / f64::from(prompt_tokens.max(1)); // nothing is a share of 0 of nothing
    let short = effective_tokens < config.effective_isl_tokens_max && ratio < config.effective_isl_ratio_max;
    (short && config.policy.looks_at_isl()).then_some(SkipReason::ShortPrefill { effective_tokens, prompt_tokens })
}

fn prefill_busy(config: &DisaggConfig, facts: &DisaggFacts) -> Option<SkipReason> {
    let active_tokens = facts.prefill_active_tokens;
    let active_tokens_max = config.prefill_busy_frac? * f64::from(facts.prefill_max_num_batched_tokens?);
    let busy = config.policy.looks_at_load() && active_tokens as f64 > active_tokens_max;
    busy.then_some(SkipReason::PrefillBusy { active_tokens, active_tokens_max })
}

fn decode_busy(config: &DisaggConfig, facts: &DisaggFacts) -> bool {
    let (Some(frac), Some(total)) = (config.decode_busy_frac, facts.decode_total_kv_blocks) else { return false };
    facts.decode_potential_blocks as f64 > frac * f64::from(total)
}

/// One of the two pools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Computes prompts.
    Prefill,
    /// Generates.
    Decode,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        })
    }
}

/// Why a request was not placed, and by whom.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{side} side: {error}")]
pub struct DisaggError {
    /// The pool that failed.
    pub side: Side,
    /// How.
    pub error: RouteError,
}

/// Why a request's prefill is done by its decode rank.
#[derive(Clone, Debug, PartialEq)]
pub enum WhyLocal {
    /// A remote one was not worth it.
    Skipped(SkipReason),
    /// The prefill pool had no rank for it, and `decode_fallback` is on.
    Fallback(RouteError),
}

impl fmt::Display for WhyLocal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Skipped(reason) => reason.fmt(f),
            Self::Fallback(error) => write!(f, "no prefill rank can be had: {error}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn enabled(policy: SkipPolicy) -> DisaggConfig {
        let prefill_busy_frac = policy.looks_at_load().then_some(0.5);
        let config = DisaggConfig { enabled: true, policy, prefill_busy_frac, ..DisaggConfig::default() };
        config.validate().expect("valid settings");
        config
    }

    fn skips(config: &DisaggConfig, facts: &DisaggFacts) -> bool {
        decide(config, facts) != RemotePrefill::Worth
    }

    #[test]
    fn a_prefill_is_short_below_both_bounds_only() {
        let config = enabled(SkipPolicy::IslBounding);
        for (prompt_tokens, decode_cached_tokens, skipped) in [
            (10_000, 7_953, true),
            (10_000, 7_952, false), // 2,048 left
            (1_000, 301, true),
            (1_000, 300, false), // a share of 0.7
            (1_000, 0, false),
            (1_000, 1_000, true),
            (1_000, 1_024, true),
            (0, 0, true),
        ] {
            let facts = DisaggFacts { prompt_tokens, decode_cached_tokens, ..DisaggFacts::default() };
            assert_eq!(skips(&config, &facts), skipped, "{decode_cached_tokens} of {prompt_tokens} cached");
            assert!(!skips(&DisaggConfig::default(), &facts), "not enabled");
        }
    }

    #[test]
    fn a_prefill_rank_is_busy_above_its_share() {
        let config = enabled(SkipPolicy::PrefillLoad);
        let facts = DisaggFacts { prompt_tokens: 100, decode_cached_tokens: 99, ..DisaggFacts::default() };
        for (active, capacity, skipped) in
            [(4_097, Some(8_192), true), (4_096, Some(8_192), false), (u64::MAX, None, false)]
        {
            let (prefill_active_tokens, prefill_max_num_batched_tokens) = (active, capacity);
            let facts = DisaggFacts { prefill_active_tokens, prefill_max_num_batched_tokens, ..facts };
            assert_eq!(skips(&config, &facts), skipped, "{active} of {capacity:?}");
        }
        let busy = DisaggFacts { prefill_active_tokens: 5_000, prefill_max_num_batched_tokens: Some(8_192), ..facts };
        let RemotePrefill::Skip(reason) = decide(&config, &busy) else { panic!("busy") };
        assert_eq!(reason.to_string(), "the prefill rank has 5000 tokens to compute, busy is above 4096");
        let RemotePrefill::Skip(reason) = decide(&enabled(SkipPolicy::IslOrLoad), &busy) else { panic!("short") };
        assert_eq!(reason.to_string(), "only 1 of 100 prompt tokens are left to compute");
    }

    #[test]
    fn rules_are_named() {
        let refused = |json: &str| {
            let config: DisaggConfig = serde_json::from_str(json).expect("well formed");
            config.validate().expect_err("must be refused").to_string()
        };
        assert_eq!(
            refused(r#"{"policy":"isl_or_load"}"#),
            "prefill_busy_frac is none, must be given where policy is prefill_load or isl_or_load"
        );
        assert_eq!(refused(r#"{"decode_busy_frac":-1.0}"#), "decode_busy_frac is -1, must be finite and not negative");
        assert!(serde_json::from_str::<DisaggConfig>(r#"{"enable":true}"#).is_err(), "unknown keys are refused");
        DisaggConfig::default().validate().expect("the defaults follow the rules");
    }

    proptest! {
        #[test]
        fn either_combines_both_conditions_and_a_full_decode_rank_stops_both(
            (prompt_tokens, decode_cached_tokens) in (0..5_000u32, 0..5_000u32),
            prefill_active_tokens in 0..10_000u64,
            prefill_max_num_batched_tokens in prop::option::of(1..10_000u32),
            decode_potential_blocks in 0..1_000u64,
            decode_total_kv_blocks in prop::option::of(1..1_000u32),
        ) {
            let facts = DisaggFacts {
                prompt_tokens,
                decode_cached_tokens,
                prefill_active_tokens,
                prefill_max_num_batched_tokens,
                decode_potential_blocks,
                decode_total_kv_blocks,
            };
            let [isl, load, either] =
                [SkipPolicy::IslBounding, SkipPolicy::PrefillLoad, SkipPolicy::IslOrLoad].map(enabled);
            prop_assert_eq!(skips(&either, &facts), skips(&isl, &facts) || skips(&load, &facts));
            let full = decode_total_kv_blocks.is_some_and(|total| 2 * decode_potential_blocks > u64::from(total));
            let guarded = DisaggConfig { decode_busy_frac: Some(0.5), ..either.clone() };
            prop_assert_eq!(skips(&guarded, &facts), skips(&either, &facts) && !full);
        }
    }
}
