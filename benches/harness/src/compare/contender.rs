//! Contender on a command line: a policy with optional router settings.

use std::fmt;
use std::str::FromStr;

use pointsman::policy::Policy;
use serde_json::Value;

use crate::fleet::{Rule, policy_named, setting};

/// A policy or the [`Rule`] of another router with optional settings, so that variants of one policy can be compared:
/// `kv`, or `kv+seed=7+policy.overlap_score_credit=0.5`.
///
/// ```
/// use pointsman_bench::compare::Policied;
///
/// let of: Policied = "kv+queue.order=fcfs".parse()?;
/// assert_eq!((of.to_string(), of.settings[0].1.as_str()), ("kv+queue.order=fcfs".into(), Some("fcfs")));
/// # Ok::<(), String>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Policied {
    /// The policy, or one that reads the index for a rule.
    pub policy: Policy,
    /// The rule in its place.
    pub rule: Option<Rule>,
    /// Fields of the router's configuration, by path.
    pub settings: Vec<(String, Value)>,
    name: String,
}

impl FromStr for Policied {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (policy, given) = text.split_once('+').unwrap_or((text, ""));
        let rule = Rule::named(policy);
        let placements = (rule == Some(Rule::Smg)).then(|| setting("index.speculative.with_events_ttl_ms=5000"));
        let given = given.split('+').filter(|given| !given.is_empty()).map(setting);
        let settings = placements.into_iter().chain(given).collect::<Result<_, _>>()?;
        let policy = rule.map_or_else(|| policy_named(policy), |_| Ok(Policy::CacheAware));
        Ok(Self { policy: policy.map_err(|error| error.to_string())?, rule, settings, name: text.to_owned() })
    }
}

impl fmt::Display for Policied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_policies_and_invalid_settings_are_rejected() {
        for (text, words) in [("best", "best"), ("kv+seed", "no '='"), ("", "unknown variant")] {
            let error = text.parse::<Policied>().expect_err(text);
            assert!(error.contains(words), "{error}");
        }
        let of: Policied = "round_robin".parse().expect("a policy");
        assert_eq!((of.policy, of.rule, of.settings.len()), (Policy::RoundRobin, None, 0));
    }
}
