//! Why settings were refused.
//!
//! Owns the messages. Promises that each names the setting, its value, the rule and where the value came from, and that
//! a name that nobody knows comes with the known one that looks most like it.

use std::fmt;

use super::Origin;

/// One problem, with the place to change.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// The text is not TOML, or holds an integer too large for it; nothing else in the file could be looked at.
    #[error("the file cannot be read as TOML: {0}")]
    Syntax(String),
    /// A name that is no setting's.
    #[error("{name} is not a known {what}, must be {}{} ({origin})", .rule, suggestion(.near.as_deref()))]
    Unknown {
        /// Key or setting.
        what: &'static str,
        /// As it was given.
        name: String,
        /// What it must be.
        rule: &'static str,
        /// A known one that looks like it.
        near: Option<String>,
        /// Where it was given.
        origin: Origin,
    },
    /// A variable that names no setting. Its value is not told: it might be a secret, meant for a setting that wants a
    /// file of it.
    #[error("{variable} is not a known variable, must end in the name of a setting in upper case{}", suggestion(.near.as_deref()))]
    UnknownVariable {
        /// The variable.
        variable: String,
        /// A known one that looks like it.
        near: Option<String>,
    },
    /// A value of the wrong type, or one that breaks its setting's rule.
    #[error("{setting} is {value}, must be {rule} ({origin})")]
    Value {
        /// The setting with its section.
        setting: String,
        /// Its value.
        value: String,
        /// What it must be.
        rule: String,
        /// Where it was given.
        origin: Origin,
    },
    /// A list or table that cannot be read.
    #[error("{setting} is {value}, which cannot be read: {reason} ({origin})")]
    Structure {
        /// The setting with its section.
        setting: String,
        /// Its value.
        value: String,
        /// What is wrong with it.
        reason: String,
        /// Where it was given.
        origin: Origin,
    },
}

fn suggestion(near: Option<&str>) -> String {
    near.map_or(String::new(), |near| format!(", perhaps {near}"))
}

/// All problems: those of the file, of the environment, of flags, then broken rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadErrors(pub Vec<LoadError>);

impl std::error::Error for LoadErrors {}

/// One problem a line.
impl fmt::Display for LoadErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|problem| writeln!(f, "{problem}"))
    }
}

/// The known name that looks most like `name`, if one differs by a third of its letters or less.
pub(super) fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let near = known.into_iter().map(|known| (distance(name, known), known));
    let near = near.filter(|(distance, known)| distance * 3 <= known.len().max(3));
    near.min_by_key(|(distance, _)| *distance).map(|(_, known)| known)
}

/// Letters to add, drop or replace to make the one from the other.
fn distance(from: &str, to: &str) -> usize {
    // No setting's name is longer than this, so nothing longer is near one.
    const LONGEST: usize = 64;
    if from.len() > LONGEST {
        return usize::MAX / 4;
    }
    let to: Vec<char> = to.chars().collect();
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (n, letter) in from.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], n + 1);
        for (m, other) in to.iter().enumerate() {
            let replaced = diagonal + usize::from(letter != *other);
            diagonal = row[m + 1];
            row[m + 1] = replaced.min(diagonal + 1).min(row[m] + 1);
        }
    }
    row[to.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_name_is_near() {
        let known = ["listen", "seed", "block_size", "name"];
        for (name, near) in [("lisen", "listen"), ("blok_size", "block_size"), ("nmae", "name"), ("seed", "seed")] {
            let expected = (name != "nmae").then_some(near);
            assert_eq!(nearest(name, known), expected, "{name}");
        }
        for name in ["", "server", "port", &"x".repeat(1_000_000)] {
            assert_eq!(nearest(name, known), None);
        }
    }

    #[test]
    fn distances_are_those_of_the_definition() {
        for (from, to, expected) in [("", "abc", 3), ("abc", "", 3), ("kitten", "sitting", 3), ("ab", "ba", 2)] {
            assert_eq!(distance(from, to), expected);
        }
    }
}
