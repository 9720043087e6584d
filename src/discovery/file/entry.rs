//! Deserialization of one file entry: a worker configuration with `url`, `id` and `probe`.
//!
//! Passes all other fields to the deserializer of [`WorkerConfig`], so that new fields are supported automatically, and
//! errors keep the position reported by the format.

use std::fmt;

use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{DeserializeSeed, Deserializer, Error, IntoDeserializer, MapAccess, Visitor};

use crate::discovery::NamedWorker;
use crate::protocol::{WorkerConfig, WorkerId};

pub(super) struct Entry(pub(super) NamedWorker);

impl<'de> Deserialize<'de> for Entry {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(EntryVisitor)
    }
}

struct EntryVisitor;

impl<'de> Visitor<'de> for EntryVisitor {
    type Value = Entry;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a worker")
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Entry, A::Error> {
        let mut beside = Beside::default();
        let fields = Fields { map, beside: &mut beside };
        let config = WorkerConfig::deserialize(MapAccessDeserializer::new(fields))?;
        Ok(Entry(NamedWorker { id: beside.id, config, probe: beside.probe.unwrap_or(false) }))
    }
}

/// Fields of an entry beside the configuration.
#[derive(Default)]
struct Beside {
    id: Option<WorkerId>,
    probe: Option<bool>,
    has_url: bool,
}

/// The entry as seen by the deserializer of the configuration.
struct Fields<'a, A> {
    map: A,
    beside: &'a mut Beside,
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for Fields<'_, A> {
    type Error = A::Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, A::Error> {
        let mut seed = Some(seed);
        loop {
            match self.map.next_key_seed(KeySeed { seed: &mut seed, beside: self.beside })? {
                Some(Key::Id) => self.beside.id = Some(self.map.next_value()?),
                Some(Key::Probe) => self.beside.probe = Some(self.map.next_value()?),
                Some(Key::OfConfig(key)) => return Ok(Some(key)),
                None if self.beside.has_url => return Ok(None),
                None => return Err(A::Error::missing_field("url")),
            }
        }
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, A::Error> {
        self.map.next_value_seed(seed)
    }
}

enum Key<T> {
    Id,
    Probe,
    OfConfig(T),
}

struct KeySeed<'a, K> {
    /// Taken by the first configuration key.
    seed: &'a mut Option<K>,
    beside: &'a mut Beside,
}

impl<'de, K: DeserializeSeed<'de>> DeserializeSeed<'de> for KeySeed<'_, K> {
    type Value = Key<K::Value>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_identifier(self)
    }
}

impl<'de, K: DeserializeSeed<'de>> Visitor<'de> for KeySeed<'_, K> {
    type Value = Key<K::Value>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a field of a worker")
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<Self::Value, E> {
        let name = match name {
            "id" if self.beside.id.is_some() => return Err(E::duplicate_field("id")),
            "id" => return Ok(Key::Id),
            "probe" if self.beside.probe.is_some() => return Err(E::duplicate_field("probe")),
            "probe" => return Ok(Key::Probe),
            "url" if self.beside.has_url => return Err(E::duplicate_field("url")),
            "url" => {
                self.beside.has_url = true;
                "endpoint"
            }
            "endpoint" => return Err(E::custom("unknown field `endpoint`, must be `url`")),
            other => other,
        };
        let seed = self.seed.take().ok_or_else(|| E::custom("a key after the last"))?;
        seed.deserialize(name.into_deserializer()).map(Key::OfConfig)
    }
}
