//! Whether engines' KV events are used.

use std::fmt;

use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Which workers' KV events the index follows. Written as `true`, `false` or `"auto"`.
///
/// ```
/// use pointsman::config::UseKvEvents;
///
/// assert_eq!(serde_json::from_str::<UseKvEvents>("true")?, UseKvEvents::Yes);
/// assert_eq!(serde_json::from_str::<UseKvEvents>("\"auto\"")?, UseKvEvents::Auto);
/// assert_eq!(UseKvEvents::from(false), UseKvEvents::No);
/// assert!(UseKvEvents::Auto.reads_events() && !UseKvEvents::No.reads_events());
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UseKvEvents {
    /// No worker's: the index follows the router's own decisions.
    No,
    /// All workers'. A worker that publishes none is routed to by load only.
    #[default]
    Yes,
    /// Those of workers that publish some. For other workers the index follows the router's own decisions.
    Auto,
}

impl UseKvEvents {
    /// Whether events are used at all.
    #[must_use]
    pub fn reads_events(self) -> bool {
        self != Self::No
    }
}

impl From<bool> for UseKvEvents {
    fn from(uses: bool) -> Self {
        if uses { Self::Yes } else { Self::No }
    }
}

impl fmt::Display for UseKvEvents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::No => "false",
            Self::Yes => "true",
            Self::Auto => "auto",
        })
    }
}

impl Serialize for UseKvEvents {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::No => serializer.serialize_bool(false),
            Self::Yes => serializer.serialize_bool(true),
            Self::Auto => serializer.serialize_str("auto"),
        }
    }
}

impl<'de> Deserialize<'de> for UseKvEvents {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Words)
    }
}

/// Reads a boolean, or the one word.
struct Words;

impl Visitor<'_> for Words {
    type Value = UseKvEvents;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("true, false or auto")
    }

    fn visit_bool<E: Error>(self, uses: bool) -> Result<UseKvEvents, E> {
        Ok(uses.into())
    }

    fn visit_str<E: Error>(self, word: &str) -> Result<UseKvEvents, E> {
        match word {
            "auto" => Ok(UseKvEvents::Auto),
            other => Err(E::invalid_value(serde::de::Unexpected::Str(other), &self)),
        }
    }
}
