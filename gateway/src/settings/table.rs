//! Declaration of a table of settings.

use super::rules::Rules;

/// What the declaration of a table has beside its struct.
pub(super) trait Declared {
    /// Settings that a reload applies.
    const RELOADED: &'static [&'static str];

    /// Checks the declared ranges.
    fn check_ranges(&self, rules: &mut Rules);
}

/// Declares a table: `name: type = default, in range => reloaded;` for each setting. Without a default that of the type
/// applies, and only settings with `=> reloaded` change without a restart.
macro_rules! settings {
    ($(#[$attr:meta])* pub struct $name:ident { $(
        $(#[$doc:meta])* $field:ident: $type:ty $(= $default:expr)? $(, in $range:expr)? $(=> $reloaded:ident)?;
    )* }) => {
        $(#[$attr])*
        #[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
        #[serde(deny_unknown_fields, default)]
        pub struct $name { $($(#[$doc])* pub $field: $type,)* }

        impl Default for $name {
            fn default() -> Self {
                Self { $($field: settings!(@default $($default)?),)* }
            }
        }

        impl $crate::settings::table::Declared for $name {
            const RELOADED: &'static [&'static str] = &[$($(settings!(@$reloaded $field),)?)*];

            fn check_ranges(&self, _rules: &mut $crate::settings::rules::Rules) {
                $($(_rules.range(stringify!($field), self.$field, $range);)?)*
            }
        }
    };
    (@default) => { Default::default() };
    (@default $default:expr) => { $default };
    (@reloaded $field:ident) => { stringify!($field) };
}

pub(super) use settings;
