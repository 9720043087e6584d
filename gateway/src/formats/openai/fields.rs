//! Single-pass field scanner for request bodies: fields and their positions.
//!
//! Defines the names of all read fields and checks UTF-8, depth, object type and repetition. Copies nothing and does
//! not recurse into client data. Callers interpret the values.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

use axum::body::Bytes;
use memchr::memchr2;
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::error::ApiError;
use crate::formats::json::{inner, position};

/// Maximum nesting depth, equal to most JSON parsers, including those of workers.
pub(super) const DEPTH_MAX: usize = 128;

/// Defines each field once: the struct field name is the JSON name.
macro_rules! fields {
    ($($name:ident)*) => {
        /// Recognized fields as JSON; `None` for absent fields.
        #[derive(Default)]
        pub(super) struct Fields<'a> {
            $(pub(super) $name: Given<'a>,)*
            /// A repeated field.
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
    model stream stream_options cache_salt session_id max_tokens max_completion_tokens max_output_tokens
    prompt messages tools documents chat_template chat_template_kwargs add_generation_prompt continue_final_message
    add_special_tokens reasoning_effort mm_processor_kwargs media_io_kwargs
    input instructions reasoning previous_response_id previous_input_messages conversation
    prompt_cache_key user metadata
    prompt_embeds input_embeds multi_modal_data multimodal_data image_data video_data audio_data
    text input_ids token_ids sampling_params features content_parts
    n best_of echo logprobs prompt_logprobs
    suffix truncate_prompt_tokens lora_path session_params extra_key priority
    routed_dp_rank data_parallel_rank disagg_prefill_dp_rank
    bootstrap_host bootstrap_port bootstrap_room bootstrap_pair_key kv_transfer_params ec_transfer_params disaggregated_params
}

/// An optional field.
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

    /// JSON of the field; `None` for null, which equals absent for every engine.
    pub(super) fn json(self) -> Option<&'a str> {
        self.raw.map(RawValue::get).filter(|raw| *raw != "null")
    }

    /// JSON of the field as a shared slice of the body.
    pub(super) fn part(self, body: &Bytes) -> Option<Bytes> {
        self.json().map(|raw| body.slice_ref(raw.as_bytes()))
    }

    /// Position of the value in the body, including null.
    pub(super) fn span(self, body: &[u8]) -> Option<Range<usize>> {
        Some(position(body, self.raw?.get()))
    }

    /// A list, as JSON.
    pub(super) fn list(self, body: &Bytes) -> Result<Option<Bytes>, ApiError> {
        self.beginning_with('[', "a list", body)
    }

    /// JSON of an object.
    pub(super) fn object(self, body: &Bytes) -> Result<Option<Bytes>, ApiError> {
        self.beginning_with('{', "an object", body)
    }

    fn beginning_with(self, first: char, expected: &str, body: &Bytes) -> Result<Option<Bytes>, ApiError> {
        match self.json() {
            Some(raw) if !raw.starts_with(first) => Err(self.wrong(expected)),
            Some(_) | None => Ok(self.part(body)),
        }
    }

    /// A boolean, also as a number or a text: engines read them alike (reference: pydantic, conversion table).
    pub(super) fn flag(self) -> Result<Option<bool>, ApiError> {
        let Some(raw) = self.json() else { return Ok(None) };
        match inner(raw).unwrap_or(raw).to_ascii_lowercase().as_str() {
            "true" | "1" | "1.0" | "t" | "y" | "yes" | "on" => Ok(Some(true)),
            "false" | "0" | "0.0" | "f" | "n" | "no" | "off" => Ok(Some(false)),
            _ => Err(self.wrong("true or false")),
        }
    }

    pub(super) fn text(self) -> Result<Option<String>, ApiError> {
        match self.json() {
            None => Ok(None),
            Some(raw) if raw.starts_with('"') => unquoted(raw, self.name).map(Some),
            Some(_) => Err(self.wrong("a string")),
        }
    }

    /// A non-negative whole number; larger values saturate at `u32::MAX`. `5.0`, `"5"` and `true` are whole, as in the
    /// engines.
    pub(super) fn count(self) -> Result<Option<u32>, ApiError> {
        let Some(raw) = self.json() else { return Ok(None) };
        let number = match raw {
            "true" => Some(1.0),
            "false" => Some(0.0),
            _ => inner(raw).unwrap_or(raw).trim().parse().ok(),
        };
        match number.filter(|number: &f64| *number >= 0.0 && number.fract() == 0.0) {
            Some(number) => Ok(Some(number as u32)),
            None => Err(self.wrong("a whole number, 0 or more")),
        }
    }

    /// Type error with the expected type.
    pub(super) fn wrong(self, expected: &str) -> ApiError {
        ApiError::invalid("invalid_type", Some(self.name), format!("{} must be {expected}", self.name))
    }
}

/// The body as text, if it is not nested too deeply.
///
/// # Errors
/// 400 otherwise.
pub(crate) fn checked_text(body: &[u8]) -> Result<&str, ApiError> {
    let text = std::str::from_utf8(body).map_err(|error| {
        let message = format!("the body is not UTF-8 from byte {} on", error.valid_up_to());
        ApiError::invalid("invalid_utf8", None, message)
    })?;
    if is_deeper_than(DEPTH_MAX, body) {
        let message = format!("the body is nested deeper than {DEPTH_MAX} levels");
        return Err(ApiError::invalid("too_deep", None, message));
    }
    Ok(text)
}

pub(super) fn missing(field: &'static str) -> ApiError {
    ApiError::invalid("missing_field", Some(field), format!("the body has no {field}"))
}

/// Decoded JSON string.
pub(super) fn unquoted(raw: &str, field: &'static str) -> Result<String, ApiError> {
    // Fails only on unpaired surrogates, which are not valid text.
    serde_json::from_str(raw)
        .map_err(|_| ApiError::invalid("invalid_value", Some(field), format!("{field} has an invalid string")))
}

impl<'a> Fields<'a> {
    /// Scans the fields.
    pub(super) fn find(body: &'a [u8]) -> Result<Self, ApiError> {
        let text = checked_text(body)?;
        let fields: Self = serde_json::from_str(text).map_err(|error| {
            if error.is_data() {
                ApiError::invalid("not_an_object", None, "the body must be a JSON object")
            } else {
                // States expectation and position without body content.
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
        while let Some(FieldName(name)) = map.next_key()? {
            match fields.place(&name) {
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

/// A field name, copied only if it contains escapes.
#[derive(Deserialize)]
struct FieldName<'a>(#[serde(borrow)] Cow<'a, str>);

/// Whether brackets outside of strings are nested deeper than the maximum. Exact for valid JSON; any result is fine for
/// invalid JSON, which is rejected later. Includes forwarded values, because workers parse them recursively.
pub(crate) fn is_deeper_than(depth_max: usize, json: &[u8]) -> bool {
    let (mut depth, mut at) = (0_usize, 0);
    while let Some(byte) = json.get(at) {
        match byte {
            b'{' | b'[' => {
                depth += 1;
                if depth > depth_max {
                    return true;
                }
            }
            b'}' | b']' => depth = depth.saturating_sub(1),
            b'"' => at = string_end(json, at + 1),
            _ => {}
        }
        at += 1;
    }
    false
}

/// Position of the closing quote of the string content that begins at `at`.
fn string_end(body: &[u8], mut at: usize) -> usize {
    loop {
        match body.get(at..).and_then(|rest| Some(at + memchr2(b'"', b'\\', rest)?)) {
            Some(escape) if body[escape] == b'\\' => at = escape + 2,
            end => return end.unwrap_or(body.len()),
        }
    }
}
