//! One table of settings: given values and their origins.
//!
//! Contains only values that fit their fields, so that the struct can be read from them. The struct's validation has
//! the rules.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use pointsman::RouterConfig;
use serde::Serialize;
use serde::de::DeserializeOwned;
use toml::{Table, Value};

use super::error::{LoadError, nearest};
use super::fields::{Field, FieldKind, fields_of, policies_with, router_fields};

/// Origin of a value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Origin {
    /// Default.
    #[default]
    Default,
    /// File.
    File,
    /// Variable of that name.
    Environment(String),
    /// Flag of that name.
    Flag(String),
    /// Pool name derived from the model name.
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

/// Given settings of a struct.
#[derive(Clone, Debug)]
pub(super) struct Section {
    /// Path in problems: `gateway`, `models[0].router`.
    pub(super) path: String,
    pub(super) fields: Vec<Field>,
    /// Keys that are tables with their own sections.
    tables: &'static [&'static str],
    /// Whether a table with one setting deserializes to the struct.
    fits: fn(Table) -> Result<(), String>,
    /// By path: `queue.threshold`.
    pub(super) values: Table,
    pub(super) origins: BTreeMap<&'static str, Origin>,
    /// Settings with unreadable values.
    pub(super) unread: Vec<&'static str>,
}

impl Section {
    pub(super) fn of<T: DeserializeOwned>(path: impl Into<String>) -> Self {
        Self::with_fields::<T>(path.into(), fields_of::<T>())
    }

    fn with_fields<T: DeserializeOwned>(path: String, fields: Vec<Field>) -> Self {
        fn fits<T: DeserializeOwned>(table: Table) -> Result<(), String> {
            nested(table).try_into::<T>().map(drop).map_err(|error| error.message().to_owned())
        }
        Self {
            path,
            fields,
            tables: &[],
            fits: fits::<T>,
            values: Table::new(),
            origins: BTreeMap::new(),
            unread: Vec::new(),
        }
    }

    /// That of a router.
    pub(super) fn of_router(path: impl Into<String>) -> Self {
        Self::with_fields::<RouterConfig>(path.into(), router_fields())
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

    /// Whether the setting was given, valid or not.
    pub(super) fn mentions(&self, name: &str) -> bool {
        self.values.contains_key(name) || self.unread.contains(&name)
    }

    /// Reads a table of the file. Relative paths are relative to `directory`.
    pub(super) fn read(&mut self, table: Table, directory: &Path, problems: &mut Vec<LoadError>) {
        self.read_at("", table, directory, problems);
    }

    /// Takes those of the table at a path, which ends in a dot.
    fn read_at(&mut self, path: &str, table: Table, directory: &Path, problems: &mut Vec<LoadError>) {
        for (key, value) in table {
            let key = format!("{path}{key}");
            let below = format!("{key}.");
            let value = match value {
                Value::Table(table) if self.fields.iter().any(|field| field.name.starts_with(&below)) => {
                    self.read_at(&below, table, directory, problems);
                    continue;
                }
                value => value,
            };
            let Some(&Field { name, kind }) = self.fields.iter().find(|field| field.is_named(&key)) else {
                if self.fields.iter().any(|field| field.name.starts_with(&below)) {
                    let (setting, value, rule) = (self.setting(&key), value.to_string(), "a table".to_owned());
                    problems.push(LoadError::Value { setting, value, rule, origin: Origin::File });
                    continue;
                }
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
            // The same forms of an address as in variables and flags.
            let text = value.as_str().map(str::to_owned).or_else(|| value.as_integer().map(|port| port.to_string()));
            let address = text.filter(|_| kind == FieldKind::Address).and_then(|text| kind.parse(&text));
            let value = address.unwrap_or(value);
            let refused = self.refused_parts(name, kind, &value);
            if refused.is_empty() {
                self.give(name, kind, value, Origin::File, directory);
            } else {
                self.unread.push(name);
                problems.extend(refused);
            }
        }
    }

    /// Reads one setting from a variable or a flag.
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
            FieldKind::Structured => "absent here: it can be set in the file only".to_owned(),
            kind => {
                self.unread.push(name);
                kind.to_string()
            }
        };
        problems.push(LoadError::Value { setting: self.setting(name), value: format!("{text:?}"), rule, origin });
    }

    fn give(&mut self, name: &'static str, kind: FieldKind, value: Value, origin: Origin, directory: &Path) {
        let value = match value {
            Value::String(path) if kind == FieldKind::File => {
                Value::String(directory.join(path).to_string_lossy().into_owned())
            }
            value => value,
        };
        self.values.insert(name.to_owned(), value);
        self.origins.insert(name, origin);
    }

    /// Inserts a value that is known to fit.
    pub(super) fn insert(&mut self, name: &'static str, value: Value, origin: Origin) {
        self.values.insert(name.to_owned(), value);
        self.origins.insert(name, origin);
    }

    /// The struct with defaults for missing settings.
    pub(super) fn parsed<T: DeserializeOwned>(&self) -> T {
        nested(self.values.clone()).try_into().expect("every value was parsed alone, and every field has a default")
    }

    /// Reasons why `value` does not fit the field; for lists, per element.
    fn refused_parts(&self, name: &'static str, kind: FieldKind, value: &Value) -> Vec<LoadError> {
        let is_empty_path = kind == FieldKind::File && value.as_str() == Some("");
        let (setting, shown, origin) = (self.setting(name), value.to_string(), Origin::File);
        let reason = match self.read_alone(name, value.clone()) {
            Ok(()) if !is_empty_path => return Vec::new(),
            Ok(()) => String::new(),
            Err(reason) => reason,
        };
        if kind != FieldKind::Structured {
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

    /// Whether a field accepts the value, with the reason otherwise.
    fn read_alone(&self, name: &str, value: Value) -> Result<(), String> {
        let mut table = Table::from_iter([(name.to_owned(), value)]);
        if let Some(policy) = policies_with(name).next() {
            table.insert("policy.name".to_owned(), Value::from(policy.name()));
        }
        (self.fits)(table)
    }

    /// The name of the policy that this section gives.
    pub(super) fn policy(&self) -> Option<&str> {
        self.values.get("policy.name").and_then(Value::as_str)
    }

    /// Drops the settings that `policy` does not have, with a problem for each.
    pub(super) fn refuse_settings_of_others(&mut self, policy: &str, problems: &mut Vec<LoadError>) {
        let has = |name: &str| policies_with(name).any(|with| with.name() == policy);
        let foreign = |name: &&str| name.starts_with("policy.") && *name != "policy.name" && !has(name);
        let names: Vec<&'static str> = self.fields.iter().map(|field| field.name).filter(foreign).collect();
        for name in names {
            let Some(value) = self.values.remove(name) else { continue };
            self.unread.push(name);
            let rule = format!("absent under policy {policy}, which has no such setting");
            let (setting, origin) = (self.setting(name), self.origin(name));
            problems.push(LoadError::Value { setting, value: value.to_string(), rule, origin });
        }
    }

    /// One TOML line per field of `values`, with its origin as a comment.
    pub(super) fn write_lines(
        &self,
        f: &mut impl fmt::Write,
        values: &impl Serialize,
        origin_of: impl Fn(&'static str) -> Option<Origin>,
    ) -> fmt::Result {
        let values = Table::try_from(values).expect("values parsed from TOML serialize to TOML");
        let values = flattened(values);
        for Field { name, .. } in &self.fields {
            let Some(origin) = origin_of(name) else { continue };
            let setting = match values.get(*name) {
                Some(value) => format!("{name} = {value}"),
                // A setting of another policy.
                None if name.starts_with("policy.") => continue,
                None if *name == "block_size" => format!("# {name} is not set: the engines report it"),
                None => format!("# {name} is not set"),
            };
            writeln!(f, "{setting:<44} # {origin}")?;
        }
        Ok(())
    }
}

/// Tables by path: `{ "queue.threshold" = 2.0 }` becomes `{ queue = { threshold = 2.0 } }`.
pub(super) fn nested(flat: Table) -> Table {
    let mut tables = Table::new();
    for (path, value) in flat {
        let mut at = &mut tables;
        let mut names = path.split('.');
        let last = names.next_back().unwrap_or_default().to_owned();
        for name in names {
            let below = at.entry(name).or_insert_with(|| Value::Table(Table::new()));
            at = below.as_table_mut().expect("no setting is both a value and a table");
        }
        at.insert(last, value);
    }
    tables
}

/// The values of tables by path, the reverse of [`nested`].
pub(super) fn flattened(tables: Table) -> Table {
    let mut flat = Table::new();
    for (name, value) in tables {
        match value {
            Value::Table(below) => {
                flat.extend(flattened(below).into_iter().map(|(path, value)| (format!("{name}.{path}"), value)));
            }
            value => drop(flat.insert(name, value)),
        }
    }
    flat
}
