//! Why a configuration was refused.

use std::fmt;

use super::Origin;

/// One problem, with the place to change.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum LoadError {
    /// The text is not TOML, or holds an integer too large for it; nothing else in the file could be looked at.
    #[error("the file cannot be read as TOML: {0}")]
    Syntax(String),
    /// A key at the top of the file.
    #[error("{0} is not a known key, must be router, the only table")]
    UnknownSection(String),
    /// A key of the table `router`.
    #[error("router.{0} is not a known key, must be the name of a setting")]
    UnknownKey(String),
    /// A value in the file of the wrong type.
    #[error("{field} is {value}, must be {rule}")]
    Value { field: String, value: String, rule: String },
    /// A list or table in the file that cannot be read.
    #[error("{field} is {value}, which cannot be read: {reason}")]
    Structure { field: String, value: String, reason: String },
    /// A variable that names no setting.
    #[error("{0} is not a known variable, must end in the name of a setting in upper case")]
    UnknownVariable(String),
    /// A variable for a list or a table.
    #[error("{variable} is {value:?}, must be absent: {field} can be set in the file only")]
    FileOnly { variable: String, field: &'static str, value: String },
    /// A variable's value of the wrong type.
    #[error("{variable} is {value:?}, must be {rule}")]
    Variable { variable: String, value: String, rule: String },
    /// A value that breaks its setting's rule.
    #[error("router.{field} is {value}, must be {rule} ({origin})")]
    Rule { field: String, value: String, rule: &'static str, origin: Origin },
}

/// All problems: those of the file, then those of the environment, then broken rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LoadErrors(pub(crate) Vec<LoadError>);

impl std::error::Error for LoadErrors {}

/// One problem a line.
impl fmt::Display for LoadErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|problem| writeln!(f, "{problem}"))
    }
}
