//! Arguments of a replay, and the other settings that they describe.

use std::fmt;
use std::path::PathBuf;

use clap::Args;
use pointsman::RouterConfig;
use serde_json::Value;

/// Arguments of `replay-decisions`.
#[derive(Args, Clone, Debug)]
pub struct ReplayArgs {
    /// Files of recorded decisions, in order.
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// Decides under this policy, with the defaults of its settings.
    #[arg(long, value_name = "NAME")]
    pub policy: Option<String>,
    /// Decides under another setting of the router, such as policy.prefill_load_scale=2. Repeatable.
    #[arg(long, value_name = "KEY=VALUE", value_parser = key_and_value)]
    pub set: Vec<(String, String)>,
    /// Maximum number of listed differences.
    #[arg(long, value_name = "NUMBER", default_value_t = 20)]
    pub list: u32,
}

fn key_and_value(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("must be KEY=VALUE")?;
    Ok((key.to_owned(), value.to_owned()))
}

impl ReplayArgs {
    /// Whether there are other settings.
    pub(super) fn changes(&self) -> bool {
        self.policy.is_some() || !self.set.is_empty()
    }

    /// The other settings in a report.
    pub(super) fn name(&self) -> String {
        let policy = self.policy.iter().map(|policy| format!("policy={policy}"));
        policy.chain(self.set.iter().map(|(key, value)| format!("{key}={value}"))).collect::<Vec<_>>().join(" ")
    }

    /// `config` with the other settings.
    pub(super) fn changed(&self, config: &RouterConfig) -> Result<RouterConfig, String> {
        let invalid = |error: &dyn fmt::Display| format!("the other settings are invalid: {error}");
        let mut value = serde_json::to_value(config).map_err(|error| invalid(&error))?;
        if let Some(policy) = &self.policy {
            value["policy"] = policy.as_str().into();
        }
        for (key, text) in &self.set {
            let given = serde_json::from_str(text).unwrap_or_else(|_| Value::from(text.as_str()));
            place(&mut value, key, given).ok_or_else(|| invalid(&format!("{key} is no setting")))?;
        }
        let changed: RouterConfig = serde_json::from_value(value).map_err(|error| invalid(&error))?;
        changed.validate().map_err(|errors| invalid(&errors))?;
        Ok(changed)
    }

    /// The problem with the other settings beside `config`, if any.
    pub(super) fn problem_with(&self, config: &RouterConfig) -> Option<String> {
        self.changed(config).err().filter(|_| self.changes())
    }
}

/// Sets the value at a path such as `queue.threshold`; `None` if a part of the path is no table.
fn place(settings: &mut Value, path: &str, given: Value) -> Option<()> {
    let (sections, name) = path.rsplit_once('.').map_or(("", path), |(sections, name)| (sections, name));
    let mut sections = sections.split('.').filter(|section| !section.is_empty());
    let table = sections.try_fold(settings, |table, section| {
        let table = table.get_mut(section)?;
        if let Value::String(policy) = table {
            *table = serde_json::json!({ "name": policy }); // a policy by name
        }
        Some(table)
    })?;
    table.as_object_mut()?.insert(name.to_owned(), given);
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(policy: Option<&str>, set: &[(&str, &str)]) -> ReplayArgs {
        let set = set.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        ReplayArgs { files: Vec::new(), policy: policy.map(str::to_owned), set, list: 20 }
    }

    #[test]
    fn settings_are_changed_by_path_and_checked() {
        let config = RouterConfig::default();
        let changed = args(Some("kv"), &[("policy.prefill_load_scale", "2.5"), ("queue.threshold", "1.5")]);
        let changed = changed.changed(&config).expect("valid");
        assert_eq!((changed.policy.name(), changed.policy.kv().prefill_load_scale), ("kv", 2.5));
        assert_eq!(changed.queue.threshold, Some(1.5));
        for (policy, key, value, rule) in [
            (Some("best"), "seed", "1", "unknown variant"),
            (None, "nothing.at", "1", "nothing.at is no setting"),
            (None, "nothing", "1", "unknown field"),
            (None, "policy.prefill_load_scale", "1", "unknown field"),
            (None, "decision_trace", "7", "between 0 and 1"),
        ] {
            let error = args(policy, &[(key, value)]).changed(&config).expect_err("rejected").to_string();
            assert!(error.contains(rule), "{key}: {error}");
        }
    }
}
