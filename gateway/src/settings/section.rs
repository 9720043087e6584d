//! One table of settings: what it was given, and by whom.
//!
//! Owns which of a struct's fields have a value, and where it came from. Promises that it holds only values that their
//! fields can hold, so that the struct can be read from them. Leaves rules to the struct's validation.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;
use toml::{Table, Value};

use super::error::{LoadError, nearest};
use super::fields::{Field, Kind, fields_of};

/// Where a value came from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Origin {
    /// Nobody gave one.
    #[default]
    Default,
    /// The file.
    File,
    /// The variable of that name.
    Environment(String),
    /// The flag of that name.
    Flag(String),
    /// Pools are called as their models unless they are given a name.
    ModelName,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File => f.write_str("file"),
            Self::Environment(variable) => write!(f, "environment: {variable}"),
            Self::Flag(flag) => write!(f, "flag: {flag}"),
            Self::ModelName => f.write_str("default: the model's name"),
        }
    }
}

/// A struct's settings as far as they are given.
#[derive(Clone, Debug)]
pub(super) struct Section {
    /// As problems name it: `gateway`, `models[0].router`.
    pub(super) path: String,
    pub(super) fields: Vec<Field>,
    /// Keys that are tables with sections of their own.
    tables: &'static [&'static str],
    /// Whether a table of one setting can be read as the struct.
    fits: fn(Table) -> Result<(), String>,
    pub(super) values: Table,
    pub(super) origins: BTreeMap<&'static str, Origin>,
    /// Settings whose value could not be read.
    pub(super) unread: Vec<&'static str>,
}

impl Section {
    pub(super) fn of<T: DeserializeOwned>(path: impl Into<String>) -> Self {
        fn fits<T: DeserializeOwned>(table: Table) -> Result<(), String> {
            table.try_into::<T>().map(drop).map_err(|error| error.message().to_owned())
        }
        Self {
            path: path.into(),
            fields: fields_of::<T>(),
            tables: &[],
            fits: fits::<T>,
            values: Table::new(),
            origins: BTreeMap::new(),
            unread: Vec::new(),
        }
    }

    pub(super) fn with_tables(mut self, tables: &'static [&'static str]) -> Self {
        self.tables = tables;
        self
    }

    pub(super) fn setting(&self, name: &str) -> String {
        format!("{}.{name}", self.path)
    }

    pub(super) fn origin(&self, name: &str) -> Origin {
        self.origins.get(name).cloned().unwrap_or_default()
    }

    /// Whether somebody has tried to give it.
    pub(super) fn mentions(&self, name: &str) -> bool {
        self.values.contains_key(name) || self.unread.contains(&name)
    }

    /// Takes the settings of a table of the file. Relative paths are relative to `directory`.
    pub(super) fn read(&mut self, table: Table, directory: &Path, problems: &mut Vec<LoadError>) {
        for (key, value) in table {
            let Some(&Field { name, kind }) = self.fields.iter().find(|field| field.name == key) else {
                let known = self.fields.iter().map(|field| field.name).chain(self.tables.iter().copied());
                problems.push(LoadError::Unknown {
                    what: "key",
                    near: nearest(&key, known).map(str::to_owned),
                    name: self.setting(&key),
                    rule: "the name of a setting",
                    origin: Origin::File,
                });
                continue;
            };
            let refused = self.refused_parts(name, kind, &value);
            if refused.is_empty() {
                self.give(name, kind, value, Origin::File, directory);
            } else {
                self.unread.push(name);
                problems.extend(refused);
            }
        }
    }

    /// Takes one setting from a variable or a flag.
    pub(super) fn read_text(
        &mut self,
        Field { name, kind }: Field,
        text: &str,
        origin: Origin,
        directory: &Path,
        problems: &mut Vec<LoadError>,
    ) {
        if let Some(value) = kind.parse(text) {
            self.give(name, kind, value, origin, directory);
            return;
        }
        let rule = match kind {
            Kind::Structured => "absent here: it can be set in the file only".to_owned(),
            kind => {
                self.unread.push(name);
                kind.to_string()
            }
        };
        problems.push(LoadError::Value { setting: self.setting(name), value: format!("{text:?}"), rule, origin });
    }

    fn give(&mut self, name: &'static str, kind: Kind, value: Value, origin: Origin, directory: &Path) {
        let value = match value {
            Value::String(path) if kind == Kind::File => {
                Value::String(directory.join(path).to_string_lossy().into_owned())
            }
            value => value,
        };
        self.values.insert(name.to_owned(), value);
        self.origins.insert(name, origin);
    }

    /// A value that is known to fit.
    pub(super) fn insert(&mut self, name: &'static str, value: Value, origin: Origin) {
        self.values.insert(name.to_owned(), value);
        self.origins.insert(name, origin);
    }

    /// The struct, defaults filled in.
    pub(super) fn parsed<T: DeserializeOwned>(&self) -> T {
        self.values.clone().try_into().expect("every value has been read by itself, and every field has a default")
    }

    /// What keeps `value` out of the field: of a list each element that does.
    fn refused_parts(&self, name: &'static str, kind: Kind, value: &Value) -> Vec<LoadError> {
        let is_empty_path = kind == Kind::File && value.as_str() == Some("");
        let (setting, shown, origin) = (self.setting(name), value.to_string(), Origin::File);
        let reason = match self.read_alone(name, value.clone()) {
            Ok(()) if !is_empty_path => return Vec::new(),
            Ok(()) => String::new(),
            Err(reason) => reason,
        };
        if kind != Kind::Structured {
            return vec![LoadError::Value { setting, value: shown, rule: kind.to_string(), origin }];
        }
        let elements = value.as_array().map_or(&[][..], Vec::as_slice);
        let refused = |(n, element): (usize, &Value)| {
            let reason = self.read_alone(name, Value::Array(vec![element.clone()])).err()?;
            let (setting, value) = (format!("{setting}[{n}]"), element.to_string());
            Some(LoadError::Structure { setting, value, reason, origin: Origin::File })
        };
        let parts: Vec<_> = elements.iter().enumerate().filter_map(refused).collect();
        if parts.is_empty() { vec![LoadError::Structure { setting, value: shown, reason, origin }] } else { parts }
    }

    /// Whether a field can hold the value, or why not.
    fn read_alone(&self, name: &str, value: Value) -> Result<(), String> {
        (self.fits)(Table::from_iter([(name.to_owned(), value)]))
    }

    /// A line for each of these fields of `values`, as TOML, with its origin behind it.
    pub(super) fn write_lines(
        &self,
        f: &mut impl fmt::Write,
        values: &impl Serialize,
        origin_of: impl Fn(&'static str) -> Option<Origin>,
    ) -> fmt::Result {
        let values = Table::try_from(values).expect("what was read from TOML can be written as TOML");
        for Field { name, .. } in &self.fields {
            let Some(origin) = origin_of(name) else { continue };
            let setting = match values.get(*name) {
                Some(value) => format!("{name} = {value}"),
                None => format!("# {name} is not set"),
            };
            writeln!(f, "{setting:<44} # {origin}")?;
        }
        Ok(())
    }
}
