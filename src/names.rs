//! Enums whose values have names.

/// Defines an enum: `Value = "name",` for each value. The gateway uses it, too.
#[doc(hidden)]
#[macro_export]
macro_rules! named {
    ($(#[$of:meta])* $vis:vis enum $type:ident { $($(#[$about:meta])* $value:ident = $name:literal,)* }) => {
        $(#[$of])*
        $vis enum $type { $($(#[$about])* $value,)* }

        impl $type {
            /// All values, in their order.
            #[allow(dead_code, reason = "of some enums only the names are used")]
            $vis const ALL: [Self; [$($name),*].len()] = [$(Self::$value),*];

            /// Name in labels, logs, settings and messages.
            #[must_use]
            $vis const fn name(self) -> &'static str {
                match self { $(Self::$value => $name,)* }
            }
        }
    };
}
pub(crate) use named;
