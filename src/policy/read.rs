//! Reads a [`PolicyConfig`] from the name of a policy or from a table.

use std::fmt;

use serde::de::{Error, IntoDeserializer, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::{Policy, PolicyConfig};

impl<'de> Deserialize<'de> for PolicyConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NameOrTable)
    }
}

struct NameOrTable;

impl<'de> Visitor<'de> for NameOrTable {
    type Value = PolicyConfig;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the name of a policy, or a table with its name and settings")
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<PolicyConfig, E> {
        Policy::deserialize(name.into_deserializer()).map(PolicyConfig::from)
    }

    /// The name may come after the settings, so all are read first. Every setting of every policy is a number.
    fn visit_map<A: MapAccess<'de>>(self, mut table: A) -> Result<PolicyConfig, A::Error> {
        let (mut policy, mut settings) = (None, Vec::<(String, f64)>::new());
        while let Some(key) = table.next_key::<String>()? {
            if key != "name" {
                settings.push((key, table.next_value()?));
            } else if policy.replace(table.next_value::<Policy>()?).is_some() {
                return Err(A::Error::duplicate_field("name"));
            }
        }
        let policy = policy.unwrap_or_default();
        policy.read(settings).map_err(|error| A::Error::custom(format_args!("policy {}: {error}", policy.name())))
    }
}
