//! Broken rules: how they are found, all at once, and what is said of them.

use std::fmt;

/// One field that breaks its rule: the field, its value and the rule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} is {value}, must be {rule}")]
pub struct ConfigError {
    /// The field's name.
    pub field: String,
    /// Its value, as text.
    pub value: String,
    /// What it must be.
    pub rule: &'static str,
}

/// Why a configuration was refused: every field that breaks its rule, in the order of the fields.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigErrors(pub Vec<ConfigError>);

impl std::error::Error for ConfigErrors {}

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, error) in self.0.iter().enumerate() {
            write!(f, "{}{error}", if n == 0 { "" } else { "; " })?;
        }
        Ok(())
    }
}

/// Broken rules, as they are found.
#[derive(Debug, Default)]
pub(crate) struct Problems(Vec<ConfigError>);

impl Problems {
    pub(crate) fn check(&mut self, field: impl Into<String>, value: impl ToString, holds: bool, rule: &'static str) {
        if !holds {
            self.0.push(ConfigError { field: field.into(), value: value.to_string(), rule });
        }
    }

    pub(crate) fn check_given<V: ToString>(
        &mut self,
        field: &'static str,
        value: Option<V>,
        holds: impl Fn(&V) -> bool,
        rule: &'static str,
    ) {
        if let Some(value) = value {
            let holds = holds(&value);
            self.check(field, value, holds, rule);
        }
    }

    pub(crate) fn into_result(self) -> Result<(), ConfigErrors> {
        if self.0.is_empty() { Ok(()) } else { Err(ConfigErrors(self.0)) }
    }
}
