//! Contender on a command line: a policy with optional router settings.

use std::fmt;
use std::str::FromStr;

use pointsman::policy::Policy;
use serde_json::Value;

use crate::fleet::{policy_named, setting};

/// A policy with optional settings, so that variants of one policy can be compared: `kv`, or
/// `kv+seed=7+policy.overlap_score_credit=0.5`.
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
    /// The policy.
    pub policy: Policy,
    /// Fields of the router's configuration, by path.
    pub settings: Vec<(String, Value)>,
    name: String,
}

impl FromStr for Policied {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (policy, given) = text.split_once('+').unwrap_or((text, ""));
        let settings = given.split('+').filter(|given| !given.is_empty()).map(setting).collect::<Result<_, _>>()?;
        let policy = policy_named(policy).map_err(|error| error.to_string())?;
        Ok(Self { policy, settings, name: text.to_owned() })
    }
}

impl From<Policy> for Policied {
    fn from(policy: Policy) -> Self {
        Self { policy, settings: Vec::new(), name: policy.name().to_owned() }
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
        assert_eq!(of, Policied::from(Policy::RoundRobin));
    }
}
