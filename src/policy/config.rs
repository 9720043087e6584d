//! The active policy with its settings.
//!
//! [`PolicyConfig`] holds the active policy together with its own settings and nothing else, so that a setting of another
//! policy cannot be given. Written as a table with a `name`, or as the bare name where every setting has its default:
//!
//! ```
//! use pointsman::policy::{KvConfig, PolicyConfig};
//!
//! let kv: PolicyConfig = serde_json::from_str(r#"{ "name": "kv", "temperature": 0.5 }"#)?;
//! assert_eq!(kv, PolicyConfig::Kv(KvConfig { temperature: 0.5, ..KvConfig::default() }));
//! assert_eq!(serde_json::from_str::<PolicyConfig>("\"kv\"")?, PolicyConfig::Kv(KvConfig::default()));
//!
//! let error = serde_json::from_str::<PolicyConfig>(r#"{ "name": "latency", "prefill_load_scale": 2 }"#).unwrap_err();
//! assert!(error.to_string().contains("policy latency: unknown field `prefill_load_scale`, expected `temperature`"));
//! # Ok::<(), serde_json::Error>(())
//! ```

use super::{KvConfig, Policy, PolicyConfig};

impl Default for PolicyConfig {
    fn default() -> Self {
        Policy::default().into()
    }
}

impl PolicyConfig {
    /// Its name in configurations and reports.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.kind().name()
    }

    /// The settings of the `kv` cost. Under another policy these are the defaults: explanations show that cost for every
    /// policy.
    #[must_use]
    pub fn kv(&self) -> KvConfig {
        if let Self::Kv(kv) = self { *kv } else { KvConfig::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_policy_parses_from_its_table_and_its_name() {
        for policy in Policy::ALL {
            let config = PolicyConfig::from(policy);
            assert_eq!((config.kind(), config.name()), (policy, policy.name()));
            let table = serde_json::to_value(&config).expect("plain data");
            assert_eq!(table["name"], policy.name());
            assert_eq!(serde_json::from_value::<PolicyConfig>(table).expect("a policy"), config);
            assert_eq!(serde_json::from_value::<PolicyConfig>(policy.name().into()).expect("a policy"), config);
        }
    }

    #[test]
    fn settings_of_another_policy_are_rejected_with_the_policy_name() {
        let refused = |json: &str| serde_json::from_str::<PolicyConfig>(json).expect_err("refused").to_string();
        for (json, words) in [
            (r#"{"name":"random","temperature":1}"#, "policy random: unknown field `temperature`, there are no fields"),
            (r#"{"prefill_load_scale":1}"#, "policy latency: unknown field `prefill_load_scale`"),
            (r#"{"temperature":"hot","name":"kv"}"#, "invalid type: string \"hot\", expected f64"),
            (r#"{"name":"best"}"#, "unknown variant `best`, expected one of `kv`"),
            (r#"{"name":"kv","name":"kv"}"#, "duplicate field `name`"),
            (r#"{"name":"kv","temperature":1,"temperature":2}"#, "policy kv: duplicate field `temperature`"),
            ("\"best\"", "unknown variant `best`"),
            ("7", "expected the name of a policy, or a table with its name and settings"),
        ] {
            assert!(refused(json).contains(words), "{json}: {}", refused(json));
        }
    }
}
