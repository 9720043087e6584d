//! One table of settings: given values and their origins.
//!
//! Contains only values that fit their fields, so that the struct can be read from them. The struct's validation has
//! the rules.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;

use pointsman::policy::Policy;
use serde::Serialize;
use serde::de::DeserializeOwned;
use toml::{Table, Value};

use super::error::{LoadError, nearest};
use super::fields::{Field, FieldKind, fields_of, policies_with};

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

/// The settings of a section.
#[derive(Debug)]
pub(super) struct Schema {
    pub(super) fields: Vec<Field>,
    /// Rule of a top-level key.
    rule: &'static str,
    /// Known tables and lists.
    pub(super) tables: &'static [&'static str],
    /// Printed tables: start of their names, header, and the comment in place of an absent one.
    printed: &'static [(&'static str, &'static str, &'static str)],
    /// Whether a table with one setting deserializes to the struct.
    fits: fn(Table) -> Result<(), String>,
}

impl Schema {
    pub(super) fn of<T: DeserializeOwned>(
        rule: &'static str,
        tables: &'static [&'static str],
        printed: &'static [(&'static str, &'static str, &'static str)],
    ) -> Self {
        fn fits<T: DeserializeOwned>(table: Table) -> Result<(), String> {
            nested(table).try_into::<T>().map(drop).map_err(|error| error.message().to_owned())
        }
        Self { fields: fields_of::<T>(), rule, tables, printed, fits: fits::<T> }
    }

    /// The setting of this name.
    pub(super) fn field(&self, name: &str) -> Option<Field> {
        self.fields.iter().find(|field| field.is_named(name)).copied()
    }

    /// A name as its table, with a dot, and the rest.
    fn split<'a>(&self, name: &'a str) -> (&'a str, &'a str) {
        let table = name.split_inclusive('.').next().filter(|table| table.ends_with('.'));
        let table = table.filter(|table| self.tables.contains(&table.trim_end_matches('.')));
        name.split_at(table.map_or(0, str::len))
    }

    /// The error of an unknown key.
    fn unknown(&self, path: &str, name: &str) -> LoadError {
        let (table, key) = self.split(name);
        let fields = self.fields.iter().map(|field| self.split(field.name));
        let known = fields.filter(|(of, _)| *of == table).map(|(_, known)| known);
        let tables = self.tables.iter().copied().filter(|_| table.is_empty());
        LoadError::Unknown {
            what: "key",
            near: nearest(key, known.chain(tables)).map(str::to_owned),
            name: format!("{path}{name}"),
            rule: if table.is_empty() { self.rule } else { "the name of a setting" },
            origin: Origin::File,
        }
    }
}

/// A given setting.
#[derive(Clone, Debug)]
struct Given {
    /// `None` if it does not fit the field.
    value: Option<Value>,
    origin: Origin,
    /// Whether `[router]` has it, not the model.
    is_inherited: bool,
}

/// Given settings of a struct.
#[derive(Clone, Debug)]
pub(super) struct Section {
    /// Start of its names in problems: empty, or `models[0].`.
    pub(super) path: String,
    pub(super) schema: &'static Schema,
    given: BTreeMap<&'static str, Given>,
    /// Given tables, which may be empty.
    tables: BTreeSet<String>,
}

impl Section {
    pub(super) fn new(path: impl Into<String>, schema: &'static Schema) -> Self {
        Self { path: path.into(), schema, given: BTreeMap::new(), tables: BTreeSet::new() }
    }

    pub(super) fn origin(&self, name: &str) -> Origin {
        self.given.get(name).map(|given| given.origin.clone()).unwrap_or_default()
    }

    /// Whether the section itself has the setting, valid or not.
    pub(super) fn mentions(&self, name: &str) -> bool {
        self.given.get(name).is_some_and(|given| !given.is_inherited)
    }

    /// The value as text, if one is given.
    pub(super) fn text(&self, name: &str) -> Option<&str> {
        self.given.get(name)?.value.as_ref()?.as_str()
    }

    /// Given texts with their settings.
    pub(super) fn texts(&self) -> impl Iterator<Item = (String, &str)> {
        self.given.iter().filter_map(|(name, given)| {
            let text = given.value.as_ref()?.as_str()?;
            Some((format!("{}{name}", self.path), text))
        })
    }

    pub(super) fn is_unread(&self, name: &str) -> bool {
        self.given.get(name).is_some_and(|given| given.value.is_none())
    }

    /// Settings with values that do not fit, by their names within their tables.
    pub(super) fn unread(&self) -> impl Iterator<Item = &'static str> {
        self.given.keys().filter(|name| self.is_unread(name)).map(|name| self.schema.split(name).1)
    }

    /// The name of the policy that this section gives, else the one below it, else the default.
    pub(super) fn policy<'a>(&'a self, below: Option<&'a Self>) -> &'a str {
        let given = |section: &'a Self| section.text("router.policy.name");
        given(self).or_else(|| below.and_then(given)).unwrap_or_else(|| Policy::default().name())
    }

    /// Reads a table of the file, whose name with a dot is `path`. Relative paths are relative to `directory`.
    pub(super) fn read(&mut self, path: &str, table: Table, directory: &Path, problems: &mut Vec<LoadError>) {
        let mut entries: Vec<(String, Value)> = table.into_iter().collect();
        entries.sort_by_key(|(key, _)| !self.schema.tables.contains(&key.as_str()));
        for (key, value) in entries {
            let name = format!("{path}{key}");
            let below = format!("{name}.");
            let is_table = self.schema.fields.iter().any(|field| field.name.starts_with(&below));
            match (value, self.schema.field(&name)) {
                (Value::Table(table), _) if is_table => {
                    if self.schema.tables.contains(&name.as_str()) {
                        self.tables.insert(name);
                    }
                    self.read(&below, table, directory, problems);
                }
                (value, Some(field)) => self.read_value(field, value, directory, problems),
                (value, None) if is_table => problems.push(not_a(format!("{}{name}", self.path), &value, "a table")),
                (_, None) => problems.push(self.schema.unknown(&self.path, &name)),
            }
        }
    }

    fn read_value(&mut self, field: Field, value: Value, directory: &Path, problems: &mut Vec<LoadError>) {
        let Field { name, kind } = field;
        // The same forms of an address as in variables and flags.
        let text = value.as_str().map(str::to_owned).or_else(|| value.as_integer().map(|port| port.to_string()));
        let address = text.filter(|_| kind == FieldKind::Address).and_then(|text| kind.parse(&text));
        let value = address.unwrap_or(value);
        let refused = self.refused_parts(field, &value);
        self.give(field, Some(value).filter(|_| refused.is_empty()), Origin::File, directory);
        if name == "workers" {
            self.locate_key_files(directory);
        }
        problems.extend(refused);
    }

    /// Reads one setting from a variable or a flag.
    pub(super) fn read_text(
        &mut self,
        field: Field,
        text: &str,
        origin: Origin,
        directory: &Path,
        problems: &mut Vec<LoadError>,
    ) {
        let Field { name, kind } = field;
        let value = kind.parse(text);
        if value.is_none() {
            let rule = match kind {
                FieldKind::Structured => "absent here: it can be set in the file only".to_owned(),
                kind => kind.to_string(),
            };
            let (setting, value) = (format!("{}{name}", self.path), format!("{text:?}"));
            problems.push(LoadError::Value { setting, value, rule, origin: origin.clone() });
        }
        if value.is_some() || kind != FieldKind::Structured {
            self.give(field, value, origin, directory);
        }
    }

    /// Sets a value, which fits the field. A path is relative to `directory`.
    pub(super) fn give(&mut self, field: Field, value: Option<Value>, origin: Origin, directory: &Path) {
        let value = match value {
            Some(Value::String(path)) if field.kind == FieldKind::File => Some(located(&path, directory)),
            value => value,
        };
        self.given.insert(field.name, Given { value, origin, is_inherited: false });
    }

    /// Makes the paths of the workers' key files relative to the directory of the file, like all others.
    fn locate_key_files(&mut self, directory: &Path) {
        let workers = self.given.get_mut("workers").and_then(|given| given.value.as_mut()?.as_array_mut());
        for file in workers.into_iter().flatten().filter_map(|worker| worker.get_mut("api_key_file")) {
            if let Value::String(path) = file {
                *file = located(path, directory);
            }
        }
    }

    /// Adds the settings of `[router]` that this model lacks, and the name of its pool.
    pub(super) fn inherit(&mut self, shared: &Self, pool: &str) {
        let is_other = self.text("router.policy.name").is_some_and(|policy| policy != shared.policy(None));
        for (&name, given) in shared.given.iter().filter(|(name, _)| name.starts_with("router.")) {
            // The settings of another policy do not apply.
            if !(is_other && name.starts_with("router.policy.")) {
                self.given.entry(name).or_insert_with(|| Given { is_inherited: true, ..given.clone() });
            }
        }
        let value = Some(Value::from(pool));
        let pool = Given { value, origin: Origin::ModelName, is_inherited: false };
        self.given.entry("router.pool").or_insert(pool);
    }

    /// The struct with defaults for missing settings.
    pub(super) fn parsed<T: DeserializeOwned>(&self) -> T {
        let tables = self.tables.iter().map(|table| (table.clone(), Value::Table(Table::new())));
        let values = self.given.iter().filter_map(|(name, given)| Some(((*name).to_owned(), given.value.clone()?)));
        let parsed = nested(tables.chain(values).collect()).try_into();
        parsed.expect("every value was parsed alone, and every field has a default")
    }

    /// Reasons why `value` does not fit the field; for lists, per element.
    fn refused_parts(&self, Field { name, kind }: Field, value: &Value) -> Vec<LoadError> {
        let is_empty_path = kind == FieldKind::File && value.as_str() == Some("");
        let (setting, shown, origin) = (format!("{}{name}", self.path), value.to_string(), Origin::File);
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
            table.insert("router.policy.name".to_owned(), Value::from(policy.name()));
        }
        (self.schema.fits)(table)
    }

    /// Drops the settings that `policy` does not have, with a problem for each.
    pub(super) fn refuse_settings_of_others(&mut self, policy: &str, problems: &mut Vec<LoadError>) {
        let has = |name: &str| name == "router.policy.name" || policies_with(name).any(|with| with.name() == policy);
        let of_policies = self.schema.fields.iter().filter(|field| field.name.starts_with("router.policy."));
        for Field { name, .. } in of_policies.filter(|field| !has(field.name)) {
            let Some(given) = self.given.get_mut(name) else { continue };
            let Some(value) = given.value.take() else { continue };
            let rule = format!("absent under policy {policy}, which has no such setting");
            let (setting, origin) = (format!("{}{name}", self.path), given.origin.clone());
            problems.push(LoadError::Value { setting, value: value.to_string(), rule, origin });
        }
    }

    /// Writes `values` as TOML: one line per setting, with its origin as a comment.
    pub(super) fn write(&self, f: &mut impl fmt::Write, values: &impl Serialize) -> fmt::Result {
        let values = Table::try_from(values).expect("values parsed from TOML serialize to TOML");
        let flat = flattened(values.clone());
        for (table, header, absent) in self.schema.printed {
            let is_present = table.is_empty() || values.contains_key(table.trim_end_matches('.'));
            let head = if is_present { header } else { absent };
            if !head.is_empty() {
                writeln!(f, "{}{head}", if *table == "gateway." { "" } else { "\n" })?;
            }
            let fields = self.schema.fields.iter().filter(|_| is_present);
            for Field { name, kind } in fields.filter(|field| self.schema.split(field.name).0 == *table) {
                if self.is_written(name) {
                    // A list is written as given.
                    let given = self.given.get(name).filter(|_| *kind == FieldKind::Structured);
                    let value = given.and_then(|given| given.value.as_ref()).or_else(|| flat.get(*name));
                    self.write_line(f, name, value)?;
                }
            }
        }
        Ok(())
    }

    /// Whether the setting has a line: not one that a model takes from `[router]`, and not the pool of all models, each
    /// of which has its own unless one is given.
    fn is_written(&self, name: &str) -> bool {
        let is_shared = name.starts_with("router.") && !self.path.is_empty() || name == "router.pool";
        !is_shared || self.mentions(name)
    }

    fn write_line(&self, f: &mut impl fmt::Write, name: &str, value: Option<&Value>) -> fmt::Result {
        let short = self.schema.split(name).1;
        let setting = match value {
            Some(value) => format!("{short} = {value}"),
            // A setting of another policy.
            None if short.starts_with("policy.") => return Ok(()),
            None if short == "block_size" => format!("# {short} is not set: the engines report it"),
            None => format!("# {short} is not set"),
        };
        writeln!(f, "{setting:<44} # {}", self.origin(name))
    }
}

/// The error of a table or list that is something else.
pub(super) fn not_a(setting: String, value: &Value, rule: &str) -> LoadError {
    LoadError::Value { setting, value: value.to_string(), rule: rule.to_owned(), origin: Origin::File }
}

fn located(path: &str, directory: &Path) -> Value {
    Value::String(directory.join(path).to_string_lossy().into_owned())
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
