//! Formats: bytes to types and back.
//!
//! OpenAI's and Anthropic's requests, responses and errors, the bodies of the legs of prefill and decode pools, resumed
//! streams, and the state of the live page. Pure: no I/O, no clock, and no knowledge of what a request is routed by.

/// Names of JSON fields.
macro_rules! names {
    ($($name:ident)*) => { &[$(stringify!($name)),*] };
}

/// An enum of plain values with their names.
macro_rules! named {
    ($(#[$of:meta])* $vis:vis enum $type:ident { $($(#[$about:meta])* $value:ident = $name:literal,)* }) => {
        $(#[$of])*
        $vis enum $type {
            $($(#[$about])* $value,)*
        }

        impl $type {
            /// All values.
            #[allow(dead_code, reason = "of some enums only the names are used")]
            $vis const ALL: [Self; [$($name),*].len()] = [$(Self::$value),*];

            /// Name in labels and in the encodings.
            $vis fn name(self) -> &'static str {
                match self {
                    $(Self::$value => $name,)*
                }
            }
        }
    };
}
pub(crate) use named;

pub mod anthropic;
pub(crate) mod events;
pub mod handover;
mod json;
pub mod live;
pub mod migration;
pub mod openai;
pub mod stream_error;
