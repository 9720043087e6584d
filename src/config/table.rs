//! Declaration of a section of settings.

/// Declares a section: `name: type = default;` for each setting. Without a default that of the type applies.
macro_rules! settings {
    ($(#[$attr:meta])* pub struct $name:ident { $($(#[$doc:meta])* $field:ident: $type:ty $(= $default:expr)?;)* }) => {
        $(#[$attr])*
        #[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
        #[serde(deny_unknown_fields, default)]
        pub struct $name { $($(#[$doc])* pub $field: $type,)* }

        impl Default for $name {
            fn default() -> Self {
                Self { $($field: settings!(@default $($default)?),)* }
            }
        }
    };
    (@default) => { Default::default() };
    (@default $default:expr) => { $default };
}
pub(crate) use settings;
