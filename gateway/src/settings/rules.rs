//! Broken rules of settings.

use std::ffi::OsStr;
use std::ops::RangeInclusive;

use serde::Serialize;

/// Rule of settings of another build.
pub(super) const NOT_BUILT: &str = "absent: this program was built without the feature kubernetes";

/// A setting that violates its rule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{setting} is {value}, must be {rule}")]
pub struct SettingError {
    /// Setting with its section, such as `models[0].name`.
    pub setting: String,
    /// Value.
    pub value: String,
    /// Rule.
    pub rule: String,
}

/// All violations. Displayed one per line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", lines(.0))]
pub struct SettingErrors(pub Vec<SettingError>);

/// Each item on a line of its own.
pub(super) fn lines(items: &[impl ToString]) -> String {
    items.iter().map(|item| item.to_string() + "\n").collect()
}

/// Collects violations, by names within one table.
#[derive(Default)]
pub(super) struct Rules {
    path: String,
    pub(super) errors: Vec<SettingError>,
}

impl Rules {
    /// Those of the table at `path`.
    pub(super) fn at(&mut self, path: impl Into<String>) -> &mut Self {
        self.path = path.into();
        self
    }

    /// Without a name, the table itself.
    pub(super) fn check(&mut self, name: impl AsRef<str>, value: impl ToString, holds: bool, rule: impl Into<String>) {
        if !holds {
            let dot = if self.path.is_empty() || name.as_ref().is_empty() { "" } else { "." };
            let setting = [self.path.as_str(), dot, name.as_ref()].concat();
            self.errors.push(SettingError { setting, value: value.to_string(), rule: rule.into() });
        }
    }

    pub(super) fn text(&mut self, name: impl AsRef<str>, value: &str, holds: bool, rule: impl Into<String>) {
        self.check(name, format!("{value:?}"), holds, rule);
    }

    /// A text or a path, if one is given.
    pub(super) fn given(
        &mut self,
        name: &str,
        value: Option<&(impl AsRef<OsStr> + ?Sized)>,
        holds: impl FnOnce(&str) -> bool,
        rule: impl Into<String>,
    ) {
        if let Some(value) = value {
            let value = value.as_ref().to_string_lossy();
            self.text(name, &value, holds(&value), rule);
        }
    }

    pub(super) fn range(&mut self, name: &str, value: impl Serialize, range: RangeInclusive<u64>) {
        if let Some(value) = serde_json::json!(value).as_u64() {
            self.check(name, value, range.contains(&value), format!("{} to {}", range.start(), range.end()));
        }
    }
}

/// Whether the API server accepts the name in a path: a DNS subdomain (RFC 1123).
pub(super) fn is_object_name(name: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-.".contains(&byte);
    let is_edge = |byte: Option<u8>| byte.is_some_and(|byte| byte.is_ascii_alphanumeric());
    let (first, last) = (name.bytes().next(), name.bytes().next_back());
    name.len() <= 253 && name.bytes().all(is_plain) && is_edge(first) && is_edge(last)
}
