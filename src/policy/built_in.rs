//! Interface of the built-in policies, and the code that their list generates.

use serde::de::DeserializeOwned;
use serde::de::value::{Error, MapDeserializer};

use super::custom::{RankTable, RequestFacts};
use super::needs::Needs;
use crate::validation::Problems;

/// Unit of the costs that a policy compares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CostUnit {
    /// KV blocks.
    Blocks,
    /// Seconds.
    Seconds,
}

impl CostUnit {
    /// Costs up to this multiple of the lowest are ties. Those in seconds are estimates from learned speeds: differences
    /// within 5 % are insignificant.
    pub(crate) fn tie_factor(self) -> f64 {
        if self == Self::Seconds { 1.05 } else { 1.0 }
    }
}

/// A built-in policy. Its settings implement this; a policy without settings is an empty struct.
///
/// A policy that compares no costs provides [`choose_from`](Self::choose_from). One that compares costs sets
/// [`UNIT`](Self::UNIT), and `schedule` computes its costs and their bounds.
pub(crate) trait BuiltIn: Default + DeserializeOwned {
    /// Unit of its costs, if it compares costs. Only such a policy has a temperature, and only there a soft session
    /// affinity has an effect.
    const UNIT: Option<CostUnit> = None;

    /// Knowledge that an exact placement at `temperature` requires.
    fn needs(&self, _temperature: f64) -> Needs {
        Needs::Board
    }

    /// Temperature of the choice; 0 for a policy that compares no costs.
    fn temperature(&self) -> f64 {
        0.0
    }

    /// Whether cache hits count, so that an index is kept.
    fn counts_overlap(&self) -> bool {
        true
    }

    /// Adds the rules that the settings break.
    fn check(&self, _: &mut Problems) {}

    /// The settings from the given fields.
    fn read(given: Vec<(String, f64)>) -> Result<Self, Error> {
        Self::deserialize(MapDeserializer::new(given.into_iter()))
    }

    /// Index of the chosen rank. Generic, so that the calls per rank are static. `None` if no rank is eligible, and for
    /// a policy that compares costs.
    #[inline]
    fn choose_from<R: RankTable + ?Sized>(_: &RequestFacts<'_>, _: &R) -> Option<usize> {
        None
    }
}

/// Generates [`Policy`](super::Policy) and [`PolicyConfig`](super::PolicyConfig) from the list of policies: name in
/// configurations, and type of the settings.
macro_rules! policies {
    ($($(#[$attribute:meta])* $variant:ident($settings:ty) = $name:literal,)*) => {
        /// Selection policy.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        pub enum Policy {
            $($(#[$attribute])* $variant,)*
        }

        /// The active policy with its settings.
        #[derive(Clone, Debug, PartialEq, Serialize)]
        #[serde(tag = "name", rename_all = "snake_case")]
        pub enum PolicyConfig {
            $(#[doc = concat!("See [`Policy::", stringify!($variant), "`].")] $variant($settings),)*
        }

        impl Policy {
            /// All policies.
            pub const ALL: [Self; [$($name),*].len()] = [$(Self::$variant),*];

            /// Name in configurations.
            ///
            /// ```
            /// use pointsman::policy::Policy;
            ///
            /// assert_eq!(Policy::CacheAware.name(), "cache_aware");
            /// ```
            #[must_use]
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }

            /// Calls a policy that compares no costs; `None` for one that does.
            #[inline]
            pub(crate) fn choose(self, request: &RequestFacts<'_>, ranks: &impl RankTable) -> Option<usize> {
                match self {
                    $(Self::$variant => <$settings>::choose_from(request, ranks),)*
                }
            }

            /// Unit of its costs, if it compares costs.
            pub(crate) fn cost_unit(self) -> Option<CostUnit> {
                match self {
                    $(Self::$variant => <$settings>::UNIT,)*
                }
            }

            /// The policy with the given settings, by name.
            pub(super) fn read(self, settings: Vec<(String, f64)>) -> Result<PolicyConfig, serde::de::value::Error> {
                match self {
                    $(Self::$variant => <$settings as BuiltIn>::read(settings).map(PolicyConfig::$variant),)*
                }
            }
        }

        impl From<Policy> for PolicyConfig {
            /// The policy with the defaults of its settings.
            fn from(policy: Policy) -> Self {
                match policy {
                    $(Policy::$variant => Self::$variant(<$settings>::default()),)*
                }
            }
        }

        impl PolicyConfig {
            /// The policy without its settings.
            #[must_use]
            pub fn kind(&self) -> Policy {
                match self {
                    $(Self::$variant(_) => Policy::$variant,)*
                }
            }

            /// Whether the policy compares costs. Only such a policy has a temperature, and only there a soft session
            /// affinity has an effect.
            #[must_use]
            pub fn compares_costs(&self) -> bool {
                self.kind().cost_unit().is_some()
            }

            /// The temperature of the choice; 0 for a policy that compares no costs.
            #[must_use]
            pub fn temperature(&self) -> f64 {
                match self {
                    $(Self::$variant(settings) => settings.temperature(),)*
                }
            }

            /// Knowledge that this policy requires at `temperature`.
            #[must_use]
            pub fn needs(&self, temperature: f64) -> Needs {
                match self {
                    $(Self::$variant(settings) => BuiltIn::needs(settings, temperature),)*
                }
            }

            /// Whether cache hits count, so that an index is kept.
            pub(crate) fn counts_overlap(&self) -> bool {
                match self {
                    $(Self::$variant(settings) => settings.counts_overlap(),)*
                }
            }

            /// Adds the rules that its settings break.
            pub(crate) fn check(&self, problems: &mut Problems) {
                match self {
                    $(Self::$variant(settings) => settings.check(problems),)*
                }
            }
        }
    };
}

pub(super) use policies;
