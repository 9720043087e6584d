//! Settings of a model with a prefill pool and a decode pool.

use pointsman::{DisaggConfig, RouterConfig, SkipPolicy, named};

use super::rules::Rules;
use super::table::{Declared as _, settings};
use super::{ModelSettings, Settings};
use crate::formats::handover::Protocol;

settings! {
    /// `[models.disaggregation]`: the workers of this model decode, those of another model compute its prompts.
    pub struct DisaggregationSettings {
        /// Name of the model with the prefill workers. Clients cannot request it.
        prefill: String;
        /// Transfer protocol between the engines.
        protocol: Protocol;
        /// Port at which KV transfers start, of workers without `transfer_port`: the bootstrap server of prefill workers
        /// (SGLang, Mooncake), or the KV port of rank 0 of all workers (P2P NCCL).
        transfer_port: u32 = 8998, in 1..=65_535;
        /// Maximum number of prefill ranks per request.
        prefill_attempts_max: u32 = 3, in 1..=16;
        /// Whether a decode rank computes the prompt if no prefill rank does. Not with SGLang.
        fallback: bool = true;
        /// Whether `skip_policy` may keep a prefill on the decode rank. Not with SGLang.
        skip: bool;
        /// Condition for it.
        skip_policy: SkipPolicy = DisaggConfig::default().policy;
        /// Limit of short prompts, in tokens that are not cached on the decode rank.
        skip_tokens_max: u32 = DisaggConfig::default().effective_isl_tokens_max;
        /// The same limit as a share of the prompt.
        skip_ratio_max: f64 = DisaggConfig::default().effective_isl_ratio_max;
        /// Busy limit of a prefill rank: tokens to compute as a share of its `max_num_batched_tokens`.
        prefill_busy_frac: Option<f64> = DisaggConfig::default().prefill_busy_frac;
        /// Limit of active blocks on a decode rank that also prefills, as a share of its blocks.
        decode_busy_frac: Option<f64> = DisaggConfig::default().decode_busy_frac;
    }
}

impl DisaggregationSettings {
    /// Conditions for a prefill on the decode rank. None hold with engines that cannot do so.
    pub(crate) fn conditions(&self) -> DisaggConfig {
        let decode_prefills = self.protocol.decode_prefills();
        DisaggConfig {
            enabled: self.skip && decode_prefills,
            policy: self.skip_policy,
            effective_isl_tokens_max: self.skip_tokens_max,
            effective_isl_ratio_max: self.skip_ratio_max,
            prefill_busy_frac: self.prefill_busy_frac,
            decode_busy_frac: self.decode_busy_frac,
            decode_fallback: self.fallback && decode_prefills,
        }
    }

    /// `transfer_port` of workers without one of their own.
    pub(crate) fn default_port(&self) -> u16 {
        u16::try_from(self.transfer_port).unwrap_or_default()
    }

    pub(super) fn check(&self, own_name: &str, settings: &Settings, rules: &mut Rules) {
        let prefill = settings.models.iter().find(|model| model.name == self.prefill);
        rules.text("prefill", &self.prefill, prefill.is_some(), "the name of a model");
        let is_plain = prefill.is_none_or(|model| model.disaggregation.is_none());
        rules.text("prefill", &self.prefill, is_plain, "a model without disaggregation");
        let owners = settings.models.iter().filter(|model| model.prefill_model() == Some(self.prefill.as_str()));
        let first = owners.map(|model| model.name.as_str()).next().unwrap_or(own_name);
        let rule = format!("a model other than that of {first:?}");
        rules.text("prefill", &self.prefill, first == own_name, rule);
        let has_aliases = prefill.is_some_and(|model| !model.aliases.is_empty());
        rules.text("prefill", &self.prefill, !has_aliases, "a model without aliases: clients cannot request it");
        self.check_ranges(rules);
        let names = [
            ("effective_isl_ratio_max", "skip_ratio_max"),
            ("prefill_busy_frac", "prefill_busy_frac"),
            ("decode_busy_frac", "decode_busy_frac"),
        ];
        let conditions = DisaggConfig { enabled: self.skip, ..self.conditions() };
        for error in conditions.validate().err().into_iter().flat_map(|errors| errors.0) {
            let name = names.iter().find(|(field, _)| *field == error.field).map_or("skip", |(_, name)| *name);
            rules.check(name, error.value, false, error.rule.replace("policy", "skip_policy"));
        }
    }
}

impl ModelSettings {
    /// Name of the model that computes the prompts of this one.
    pub(crate) fn prefill_model(&self) -> Option<&str> {
        self.disaggregation.as_ref().map(|settings| settings.prefill.as_str())
    }

    /// Router settings with those of the role.
    pub(crate) fn router_in(&self, role: ModelRole) -> RouterConfig {
        let router = self.router.clone();
        match role {
            ModelRole::Aggregated => router,
            ModelRole::Prefill => router.for_prefill(),
            ModelRole::Decode => {
                // Cached blocks decide whether a prefill is remote, and matter for prompts that are computed here.
                let enabled = router.index.enabled;
                let mut decode = router.for_decode();
                decode.index.enabled = enabled;
                decode
            }
        }
    }
}

named! {
/// Role of the workers of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ModelRole {
    /// Prefill and decode.
    Aggregated = "aggregated",
    /// Prefill for another model.
    Prefill = "prefill",
    /// Decode.
    Decode = "decode",
}
}

/// Role of a model, and the name of the model at its workers.
pub(crate) fn role_of<'a>(model: &'a ModelSettings, all: &'a [ModelSettings]) -> (ModelRole, &'a str) {
    if model.disaggregation.is_some() {
        return (ModelRole::Decode, model.upstream_name());
    }
    match all.iter().find(|other| other.prefill_model() == Some(model.name.as_str())) {
        Some(decode) => (ModelRole::Prefill, model.upstream_name.as_deref().unwrap_or(decode.upstream_name())),
        None => (ModelRole::Aggregated, model.upstream_name()),
    }
}
