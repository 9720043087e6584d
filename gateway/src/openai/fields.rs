//! One pass over a body: which fields it has, and where they stand.
//!
//! Owns the names of the fields that anybody here reads, and the checks that need no meaning: UTF-8, depth, an object,
//! no field twice. Promises to copy nothing, and no recursion on what a client nests. Leaves the values to whoever reads
//! them.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

use axum::body::Bytes;
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::error::ApiError;

/// How deep a body may be nested: as deep as most JSON parsers go, those of workers among them.
pub(super) const DEPTH_MAX: usize = 128;

/// Names of fields are the fields' names: said once, found by comparison.
macro_rules! fields {
    ($($name:ident)*) => {
        /// The fields that are read, each as JSON; `None` where the body has none.
        #[derive(Default)]
        pub(super) struct Fields<'a> {
            $(pub(super) $name: Given<'a>,)*
            /// One that is there twice.
            repeated: Option<&'static str>,
        }

        impl<'a> Fields<'a> {
            fn place(&mut self, name: &str) -> Option<&mut Given<'a>> {
                match name {
                    $(stringify!($name) => Some(self.$name.named(stringify!($name))),)*
                    _ => None,
                }
            }
        }
    };
}

fields! {
    model stream cache_salt session_id max_tokens max_completion_tokens max_output_tokens
    prompt messages tools documents chat_template chat_template_kwargs add_generation_prompt continue_final_message
    add_special_tokens reasoning_effort
    input instructions reasoning previous_response_id previous_input_messages conversation
    prompt_embeds input_embeds multi_modal_data multimodal_data image_data video_data audio_data
    suffix truncate_prompt_tokens lora_path session_params extra_key
    routed_dp_rank data_parallel_rank disagg_prefill_dp_rank
    bootstrap_host bootstrap_port bootstrap_room bootstrap_pair_key kv_transfer_params ec_transfer_params
}

/// One field, if it is there.
#[derive(Clone, Copy, Default)]
pub(super) struct Given<'a> {
    name: &'static str,
    raw: Option<&'a RawValue>,
}

impl<'a> Given<'a> {
    fn named(&mut self, name: &'static str) -> &mut Self {
        self.name = name;
        self
    }

    /// Its JSON; `None` for null, too, which means the same to every engine.
    pub(super) fn json(self) -> Option<&'a str> {
        self.raw.map(RawValue::get).filter(|raw| *raw != "null")
    }

    /// Its JSON as a part of the body, shared and not copied.
    pub(super) fn part(self, body: &Bytes) -> Option<Bytes> {
        self.json().map(|raw| body.slice_ref(raw.as_bytes()))
    }

    /// Where its value stands in the body, null or not.
    pub(super) fn span(self, body: &[u8]) -> Option<Range<usize>> {
        let raw = self.raw?.get();
        let start = raw.as_ptr() as usize - body.as_ptr() as usize;
        Some(start..start + raw.len())
    }

    /// A list, still JSON.
    pub(super) fn list(self, body: &Bytes) -> Result<Option<Bytes>, ApiError> {
        match self.json() {
            Some(raw) if !raw.starts_with('[') => Err(self.wrong("a list")),
            Some(_) | None => Ok(self.part(body)),
        }
    }

    /// An object, still JSON.
    pub(super) fn object(self, body: &Bytes) -> Result<Option<Bytes>, ApiError> {
        match self.json() {
            Some(raw) if !raw.starts_with('{') => Err(self.wrong("an object")),
            Some(_) | None => Ok(self.part(body)),
        }
    }

    pub(super) fn flag(self) -> Result<Option<bool>, ApiError> {
        match self.json() {
            None => Ok(None),
            Some("true") => Ok(Some(true)),
            Some("false") => Ok(Some(false)),
            Some(_) => Err(self.wrong("true or false")),
        }
    }

    pub(super) fn text(self) -> Result<Option<String>, ApiError> {
        match self.json() {
            None => Ok(None),
            Some(raw) if raw.starts_with('"') => unquoted(raw, self.name).map(Some),
            Some(_) => Err(self.wrong("a string")),
        }
    }

    /// A whole number, not negative; one too large for `u32` counts as the largest. `5.0` is whole, as it is to engines.
    pub(super) fn count(self) -> Result<Option<u32>, ApiError> {
        let Some(raw) = self.json() else { return Ok(None) };
        let number: Option<f64> = serde_json::from_str(raw).ok();
        match number.filter(|number| *number >= 0.0 && number.fract() == 0.0) {
            Some(number) => Ok(Some(number as u32)),
            None => Err(self.wrong("a whole number, 0 or more")),
        }
    }

    /// The error that it is not `expected`.
    pub(super) fn wrong(self, expected: &str) -> ApiError {
        ApiError::invalid("invalid_type", Some(self.name), format!("{} must be {expected}", self.name))
    }
}

/// What a JSON string says.
pub(super) fn unquoted(raw: &str, field: &'static str) -> Result<String, ApiError> {
    // What is refused here are surrogates without their other half, which no text has.
    serde_json::from_str(raw)
        .map_err(|_| ApiError::invalid("invalid_value", Some(field), format!("{field} has a string that is no text")))
}

impl<'a> Fields<'a> {
    /// Finds the fields.
    pub(super) fn find(body: &'a [u8]) -> Result<Self, ApiError> {
        let text = std::str::from_utf8(body).map_err(|error| {
            let message = format!("the body is not UTF-8 from byte {} on", error.valid_up_to());
            ApiError::invalid("invalid_utf8", None, message)
        })?;
        if is_too_deep(body) {
            let message = format!("the body is nested deeper than {DEPTH_MAX} levels");
            return Err(ApiError::invalid("too_deep", None, message));
        }
        let fields: Self = serde_json::from_str(text).map_err(|error| {
            if error.is_data() {
                ApiError::invalid("not_an_object", None, "the body must be a JSON object")
            } else {
                // Says what was expected and where, and shows nothing of the body.
                ApiError::invalid("invalid_json", None, format!("the body is not JSON: {error}"))
            }
        })?;
        match fields.repeated {
            Some(name) => {
                Err(ApiError::invalid("duplicate_field", Some(name), format!("the body has {name} more than once")))
            }
            None => Ok(fields),
        }
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Fields<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(FieldsVisitor(Self::default()))
    }
}

struct FieldsVisitor<'a>(Fields<'a>);

impl<'de: 'a, 'a> Visitor<'de> for FieldsVisitor<'a> {
    type Value = Fields<'a>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields<'a>, A::Error> {
        let Self(mut fields) = self;
        while let Some(Key(key)) = map.next_key()? {
            match fields.place(&key) {
                None => drop(map.next_value::<IgnoredAny>()?),
                Some(given) => {
                    if given.raw.replace(map.next_value()?).is_some() {
                        fields.repeated = Some(given.name);
                    }
                }
            }
        }
        Ok(fields)
    }
}

/// A key, copied only where it is written with escapes.
#[derive(Deserialize)]
struct Key<'a>(#[serde(borrow)] Cow<'a, str>);

/// Whether brackets are open to more than [`DEPTH_MAX`] levels at once. For JSON this is exact; what is none is refused
/// later, whatever is said here. Values that are only carried are looked into, too: workers parse them with recursion.
fn is_too_deep(body: &[u8]) -> bool {
    let (mut depth, mut at) = (0_usize, 0);
    while let Some(byte) = body.get(at) {
        match byte {
            b'{' | b'[' => {
                depth += 1;
                if depth > DEPTH_MAX {
                    return true;
                }
            }
            b'}' | b']' => depth = depth.saturating_sub(1),
            b'"' => at = string_end(body, at + 1),
            _ => {}
        }
        at += 1;
    }
    false
}

/// Where the quote stands that ends the string whose content begins at `at`.
fn string_end(body: &[u8], mut at: usize) -> usize {
    while let Some(byte) = body.get(at) {
        match byte {
            b'"' => return at,
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
    at
}
