//! Field names and value types of a settings struct, derived from its `Deserialize` implementation.
//!
//! New fields of the struct are known automatically. The struct's own validation has the rules beyond types.

use std::fmt;
use std::iter::once;
use std::net::{Ipv4Addr, SocketAddr};

use pointsman::policy::Policy;
use pointsman::policy::PolicyConfig;
use serde::de::value::{Error, MapDeserializer};
use serde::de::{Deserialize, DeserializeOwned, Deserializer, Error as _, Expected, IntoDeserializer, Visitor};
use serde::forward_to_deserialize_any;
use toml::Value;

/// A setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Field {
    pub(super) name: &'static str,
    pub(super) kind: FieldKind,
}

/// Accepted values of a setting, before its own rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FieldKind {
    Switch,
    /// 0 to `max`.
    Integer {
        max: i64,
    },
    Number,
    Choice(&'static [&'static str]),
    Text,
    /// File path.
    File,
    /// IP address with port.
    Address,
    /// List or table, which cannot be written in one word.
    Structured,
    /// A struct with settings of its own.
    Nested,
    /// A [`PolicyConfig`].
    Policy,
}

/// The error of a [`PolicyConfig`] that is read from something else.
const POLICY: &str = "the name of a policy, or a table with its name and settings";

/// The settings of `T` in the order of their declaration, those of nested structs by path, as `index.shards`; none if `T`
/// is not a struct. Allocates the paths for the life of the process.
pub(super) fn fields_of<T: DeserializeOwned>() -> Vec<Field> {
    let mut fields = Vec::new();
    collect::<T>(&[], &mut fields);
    fields
}

/// Adds the settings of the struct at `path` within `T`.
fn collect<T: DeserializeOwned>(path: &[&'static str], fields: &mut Vec<Field>) {
    for &name in probe::<T>(path).names {
        let path = [path, &[name]].concat();
        match probe::<T>(&path).kind {
            FieldKind::Nested => collect::<T>(&path, fields),
            FieldKind::Policy => fields.extend(policy_fields(&path.join("."))),
            kind if path.len() == 1 => fields.push(Field { name, kind }),
            kind => fields.push(Field { name: path.join(".").leak(), kind }),
        }
    }
}

/// The value at `path` within `T`.
fn probe<'de, T: Deserialize<'de>>(path: &[&'static str]) -> Found {
    let mut found = Found { kind: FieldKind::Structured, names: &[] };
    // The probe returns an error once it has its result.
    let _ = T::deserialize(Probe { path, found: &mut found });
    found
}

/// The name of the policy, and the settings of all policies, each once.
fn policy_fields(path: &str) -> Vec<Field> {
    let mut fields = vec![Field { name: format!("{path}.name").leak(), kind: probe::<Policy>(&[]).kind }];
    for name in Policy::ALL.into_iter().flat_map(settings_of).map(|setting| format!("{path}.{setting}")) {
        if fields.iter().all(|field| field.name != name) {
            fields.push(Field { name: name.leak(), kind: FieldKind::Number });
        }
    }
    fields
}

/// The names of a policy's settings. All are numbers.
fn settings_of(policy: Policy) -> impl Iterator<Item = String> {
    let table = toml::Table::try_from(PolicyConfig::from(policy)).expect("policies serialize to TOML");
    table.into_iter().map(|(name, _)| name).filter(|name| name != "name")
}

/// The policies that have a setting such as `router.policy.temperature`.
pub(super) fn policies_with(name: &str) -> impl Iterator<Item = Policy> {
    let setting = name.strip_prefix("router.policy.").filter(|setting| *setting != "name").map(str::to_owned);
    let has =
        move |policy: &Policy| setting.as_ref().is_some_and(|setting| settings_of(*policy).any(|own| own == *setting));
    Policy::ALL.into_iter().filter(has)
}

impl Field {
    /// The name in a variable, which is also that of `policy` for the name of the policy.
    pub(super) fn variable(&self) -> String {
        self.short().replace('.', "_").to_ascii_uppercase()
    }

    /// Whether a flag or a key of the file means this setting: by its name, or `policy` for the name of the policy.
    pub(super) fn is_named(&self, name: &str) -> bool {
        self.name == name || self.short() == name
    }

    fn short(&self) -> &'static str {
        self.name.strip_suffix(".name").unwrap_or(self.name)
    }
}

impl FieldKind {
    /// The value of `text`, if it has this type.
    pub(super) fn parse(self, text: &str) -> Option<Value> {
        match self {
            Self::Switch => text.parse().ok().map(Value::Boolean),
            Self::Integer { max } => text.parse().ok().filter(|n| (0..=max).contains(n)).map(Value::Integer),
            Self::Number => text.parse().ok().map(Value::Float),
            Self::Choice(names) => names.contains(&text).then(|| Value::from(text)),
            Self::Text | Self::File => (!text.is_empty()).then(|| Value::from(text)),
            Self::Address => address(text).map(|address| Value::from(address.to_string())),
            Self::Structured | Self::Nested | Self::Policy => None,
        }
    }
}

/// An IP address with a port; `localhost` and a missing host are 127.0.0.1.
fn address(text: &str) -> Option<SocketAddr> {
    let port = |text: &str| text.parse::<u16>().ok().map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
    match text.split_once(':') {
        None => port(text),
        Some(("" | "localhost", rest)) => port(rest),
        Some(_) => text.parse().ok(),
    }
}

impl fmt::Display for FieldKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Switch => f.write_str("true or false"),
            Self::Integer { max } => write!(f, "an integer from 0 to {max}"),
            Self::Number => f.write_str("a number"),
            Self::Choice(names) => write!(f, "one of {}", names.join(", ")),
            Self::Text => f.write_str("a text, not empty"),
            Self::File => f.write_str("the path of a file"),
            Self::Address => {
                f.write_str("an IP address with a port, such as 127.0.0.1:8080 or 0.0.0.0:8080, or a port of 127.0.0.1")
            }
            Self::Structured | Self::Nested | Self::Policy => f.write_str("a list or a table"),
        }
    }
}

/// Type of a value, and the field names of a struct.
struct Found {
    kind: FieldKind,
    names: &'static [&'static str],
}

/// Records the value at a path: a table with the first name as its only entry, which has the rest of the path. One type
/// for all depths, because each deserializer is compiled for every struct of settings.
struct Probe<'a> {
    path: &'a [&'static str],
    found: &'a mut Found,
}

impl Probe<'_> {
    fn note<T>(self, kind: FieldKind) -> Result<T, Error> {
        self.found.kind = kind;
        Err(Error::custom("seen"))
    }

    fn descend<'de, V: Visitor<'de>>(self, name: &'static str, visitor: V) -> Result<V::Value, Error> {
        let Self { path, found } = self;
        visitor.visit_map(MapDeserializer::new(once((name, Probe { path: &path[1..], found }))))
    }
}

impl<'de> IntoDeserializer<'de, Error> for Probe<'_> {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

impl<'de> Deserializer<'de> for Probe<'_> {
    type Error = Error;

    // A policy is known by the error it would give.
    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        let expected: &dyn Expected = &visitor;
        self.note(if expected.to_string() == POLICY { FieldKind::Policy } else { FieldKind::Structured })
    }

    fn deserialize_bool<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Error> {
        self.note(FieldKind::Switch)
    }

    fn deserialize_u32<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Error> {
        self.note(FieldKind::Integer { max: i64::from(u32::MAX) })
    }

    // Integers have the range of TOML.
    fn deserialize_u64<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Error> {
        self.note(FieldKind::Integer { max: i64::MAX })
    }

    fn deserialize_f64<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Error> {
        self.note(FieldKind::Number)
    }

    // Strings and paths use the same call; only their error texts differ.
    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        let expected: &dyn Expected = &visitor;
        self.note(if expected.to_string() == "path string" { FieldKind::File } else { FieldKind::Text })
    }

    // Of all setting types, only addresses deserialize from text.
    fn deserialize_str<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Error> {
        self.note(FieldKind::Address)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        names: &'static [&'static str],
        _: V,
    ) -> Result<V::Value, Error> {
        self.note(FieldKind::Choice(names))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        names: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        if let [name, ..] = *self.path {
            return self.descend(name, visitor);
        }
        self.found.names = names;
        self.note(FieldKind::Nested)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_some(self)
    }

    forward_to_deserialize_any! {
        i8 i16 i32 i64 i128 u8 u16 u128 f32 char bytes byte_buf unit unit_struct newtype_struct seq tuple
        tuple_struct map identifier ignored_any
    }
}
