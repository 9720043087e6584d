//! The operator's configuration: a TOML file, and the environment over it.
//!
//! Owns where each value came from. Promises that loading is a pure function of its arguments, that every problem is
//! named at once, and that what is printed loads again to the same settings. Leaves reading files and the environment
//! to `main`, and the rules to [`RouterConfig::validate`].

mod error;
mod fields;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;

use pointsman::RouterConfig;
use toml::{Table, Value};

pub(crate) use error::{LoadError, LoadErrors};
use fields::{Field, Kind, fields_of};

/// What the names of variables for router settings begin with; the setting follows in upper case.
const PREFIX: &str = "POINTSMAN_ROUTER_";

/// The one table of the file.
const SECTION: &str = "router";

/// Where a value came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    Default,
    File,
    /// The variable of that name.
    Environment(String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File => f.write_str("file"),
            Self::Environment(variable) => write!(f, "environment: {variable}"),
        }
    }
}

/// A configuration that follows every rule.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub(crate) router: RouterConfig,
    /// Of every setting, in the order of the struct.
    pub(crate) origins: Vec<(&'static str, Origin)>,
}

/// Every setting on a line of its own, as TOML, with its origin behind it.
impl fmt::Display for Loaded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let values = Table::try_from(&self.router).expect("what was read from TOML can be written as TOML");
        writeln!(f, "[{SECTION}]")?;
        for (name, origin) in &self.origins {
            let setting = match values.get(*name) {
                Some(value) => format!("{name} = {value}"),
                None => format!("# {name} is not set"),
            };
            writeln!(f, "{setting:<44} # {origin}")?;
        }
        Ok(())
    }
}

/// Reads `text`, the file, and `env` over it. Variables that do not begin with [`PREFIX`] are left alone.
///
/// # Errors
/// Every problem of the file, of the variables, and of the values that result.
pub(crate) fn load(text: &str, env: impl Iterator<Item = (String, String)>) -> Result<Loaded, LoadErrors> {
    let mut loading = Loading { fields: fields_of::<RouterConfig>(), ..Loading::default() };
    loading.read_file(text);
    // In the order of their names, so that the same problems are told in the same order.
    let variables: BTreeMap<String, String> = env.filter(|(name, _)| name.starts_with(PREFIX)).collect();
    for (variable, value) in variables {
        loading.read_variable(variable, value);
    }
    loading.finish()
}

/// What has been read so far.
#[derive(Debug, Default)]
struct Loading {
    fields: Vec<Field>,
    /// Only values that their fields can hold.
    values: Table,
    origins: BTreeMap<&'static str, Origin>,
    /// Fields whose value could not be read: rules that look at them are not judged.
    unread: Vec<&'static str>,
    problems: Vec<LoadError>,
}

impl Loading {
    fn read_file(&mut self, text: &str) {
        let file: Table = match text.parse() {
            Ok(file) => file,
            Err(error) => {
                self.problems.push(LoadError::Syntax(error.to_string().trim_end().to_owned()));
                self.unread.extend(self.fields.iter().map(|field| field.name));
                return;
            }
        };
        for (key, value) in file {
            match value {
                Value::Table(settings) if key == SECTION => {
                    settings.into_iter().for_each(|(key, value)| self.read_setting(key, value));
                }
                _ if key == SECTION => {
                    let (value, rule) = (value.to_string(), "a table".to_owned());
                    self.problems.push(LoadError::Value { field: key, value, rule });
                }
                _ => self.problems.push(LoadError::UnknownSection(key)),
            }
        }
    }

    fn read_setting(&mut self, key: String, value: Value) {
        let Some(&Field { name, kind }) = self.fields.iter().find(|field| field.name == key) else {
            self.problems.push(LoadError::UnknownKey(key));
            return;
        };
        let refused = refused_parts(name, kind, &value);
        if refused.is_empty() {
            self.values.insert(key, value);
            self.origins.insert(name, Origin::File);
        } else {
            self.unread.push(name);
            self.problems.extend(refused);
        }
    }

    fn read_variable(&mut self, variable: String, value: String) {
        let setting = &variable[PREFIX.len()..];
        let Some(&Field { name, kind }) = self.fields.iter().find(|field| field.name.to_ascii_uppercase() == setting)
        else {
            self.problems.push(LoadError::UnknownVariable(variable));
            return;
        };
        if kind == Kind::Structured {
            self.problems.push(LoadError::FileOnly { variable, field: name, value });
        } else if let Some(value) = kind.parse(&value) {
            self.values.insert(name.to_owned(), value);
            self.origins.insert(name, Origin::Environment(variable));
        } else {
            self.unread.push(name);
            self.problems.push(LoadError::Variable { variable, value, rule: kind.to_string() });
        }
    }

    fn finish(mut self) -> Result<Loaded, LoadErrors> {
        let router: RouterConfig = self.values.try_into().expect("every value has been read by itself");
        let mut origin_of = |name: &str| self.origins.remove(name).unwrap_or(Origin::Default);
        let origins: Vec<_> = self.fields.iter().map(|field| (field.name, origin_of(field.name))).collect();
        if let Err(broken) = router.validate() {
            // A rule that speaks of an unread field might hold, did we know that field's value.
            let judged = |error: &pointsman::config::ConfigError| {
                !self.unread.iter().any(|unread| setting_of(&error.field) == *unread || error.rule.contains(unread))
            };
            self.problems.extend(broken.0.into_iter().filter(judged).map(|error| {
                let origin = origins.iter().find(|(name, _)| *name == setting_of(&error.field));
                let origin = origin.map_or(Origin::Default, |(_, origin)| origin.clone());
                LoadError::Rule { field: error.field, value: error.value, rule: error.rule, origin }
            }));
        }
        if self.problems.is_empty() { Ok(Loaded { router, origins }) } else { Err(LoadErrors(self.problems)) }
    }
}

/// What keeps `value` out of the field: of a list each element that does.
fn refused_parts(name: &'static str, kind: Kind, value: &Value) -> Vec<LoadError> {
    let Err(reason) = read_alone(name, value.clone()) else { return Vec::new() };
    let (field, shown) = (format!("{SECTION}.{name}"), value.to_string());
    if kind != Kind::Structured {
        return vec![LoadError::Value { field, value: shown, rule: kind.to_string() }];
    }
    let elements = value.as_array().map_or(&[][..], Vec::as_slice);
    let refused = |(n, element): (usize, &Value)| {
        let reason = read_alone(name, Value::Array(vec![element.clone()])).err()?;
        Some(LoadError::Structure { field: format!("{field}[{n}]"), value: element.to_string(), reason })
    };
    let parts: Vec<_> = elements.iter().enumerate().filter_map(refused).collect();
    if parts.is_empty() { vec![LoadError::Structure { field, value: shown, reason }] } else { parts }
}

/// Whether a field can hold the value, or why not.
fn read_alone(name: &str, value: Value) -> Result<(), String> {
    let alone = Table::from_iter([(name.to_owned(), value)]);
    let read: Result<RouterConfig, _> = alone.try_into();
    read.map(drop).map_err(|error| error.message().to_owned())
}

/// The setting that a field such as `queue_classes[0].name` is part of.
fn setting_of(field: &str) -> &str {
    field.split(['[', '.']).next().unwrap_or(field)
}
