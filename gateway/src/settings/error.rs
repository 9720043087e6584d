//! Errors of settings.
//!
//! Each message names the setting, its value, the rule and the origin; an unknown name comes with the most similar
//! known one.

use super::Origin;
use super::rules::lines;

/// Longer than any setting name; the comparison takes the product of the lengths.
const NAME_BYTES_MAX: usize = 64;

/// One problem and the place to change.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// Invalid TOML or an integer out of range; the rest of the file was not checked.
    #[error("the file cannot be read as TOML: {0}")]
    Syntax(String),
    /// Unknown name.
    #[error("{name} is not a known {what}, must be {}{} ({origin})", .rule, suggestion(.near.as_deref()))]
    Unknown {
        /// Key or setting.
        what: &'static str,
        /// The given name.
        name: String,
        /// Rule.
        rule: &'static str,
        /// Most similar known name.
        near: Option<String>,
        /// Origin.
        origin: Origin,
    },
    /// Unknown variable. Its value is omitted, because it might be a secret.
    #[error("{variable} is not a known variable, must end in the name of a setting in upper case{}", suggestion(.near.as_deref()))]
    UnknownVariable {
        /// Name of the variable.
        variable: String,
        /// Most similar known name.
        near: Option<String>,
    },
    /// Invalid type or violated rule.
    #[error("{setting} is {value}, must be {rule} ({origin})")]
    Value {
        /// Setting with its section.
        setting: String,
        /// Value.
        value: String,
        /// Rule.
        rule: String,
        /// Origin.
        origin: Origin,
    },
    /// Invalid list or table.
    #[error("{setting} is {value}, which cannot be read: {reason} ({origin})")]
    Structure {
        /// Setting with its section.
        setting: String,
        /// Value.
        value: String,
        /// Reason.
        reason: String,
        /// Origin.
        origin: Origin,
    },
}

fn suggestion(near: Option<&str>) -> String {
    near.map_or(String::new(), |near| format!(", perhaps {near}"))
}

/// All problems: file, environment, flags, then violated rules. Displayed one per line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", lines(.0))]
pub struct LoadErrors(pub Vec<LoadError>);

/// The most similar known name, if it differs in at most a third of its letters.
pub(super) fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let comparable = known.into_iter().filter(|_| name.len() <= NAME_BYTES_MAX);
    let near = comparable.map(|known| (strsim::levenshtein(name, known), known));
    let near = near.filter(|(distance, known)| distance * 3 <= known.len().max(3));
    near.min_by_key(|(distance, _)| *distance).map(|(_, known)| known)
}
