//! Broken rules of settings.

use std::fmt;

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

/// All violations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SettingErrors(pub Vec<SettingError>);

impl std::error::Error for SettingErrors {}

/// One violation per line.
impl fmt::Display for SettingErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|error| writeln!(f, "{error}"))
    }
}

/// Collects violations.
#[derive(Default)]
pub(super) struct Rules {
    pub(super) errors: Vec<SettingError>,
}

impl Rules {
    pub(super) fn check(
        &mut self,
        setting: impl Into<String>,
        value: impl ToString,
        holds: bool,
        rule: impl Into<String>,
    ) {
        if !holds {
            self.errors.push(SettingError { setting: setting.into(), value: value.to_string(), rule: rule.into() });
        }
    }

    pub(super) fn text(&mut self, setting: impl Into<String>, value: &str, holds: bool, rule: impl Into<String>) {
        self.check(setting, format!("{value:?}"), holds, rule);
    }

    pub(super) fn range(&mut self, setting: impl Into<String>, value: impl Into<u64>, least: u64, most: u64) {
        let value = value.into();
        self.check(setting, value, (least..=most).contains(&value), format!("{least} to {most}"));
    }
}

/// Whether the API server accepts the name in a path: a DNS subdomain (RFC 1123).
pub(super) fn is_object_name(name: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-.".contains(&byte);
    let is_edge = |byte: Option<u8>| byte.is_some_and(|byte| byte.is_ascii_alphanumeric());
    let (first, last) = (name.bytes().next(), name.bytes().next_back());
    name.len() <= 253 && name.bytes().all(is_plain) && is_edge(first) && is_edge(last)
}
