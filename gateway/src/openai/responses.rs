//! `/v1/responses`: its input as the messages of a chat.
//!
//! Owns which items of an input are messages. Promises messages that a chat template takes, in the order of the items,
//! in memory of about the input's size. Items that engines make of themselves what they like (function calls, images,
//! earlier answers) make the prompt opaque.

use std::borrow::Cow;
use std::fmt;

use axum::body::Bytes;
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::ask::{AskedPrompt, ChatParts};
use super::error::ApiError;
use super::fields::{Fields, Given};
use super::prompt::missing;

/// The prompt of a body.
pub(super) fn read(fields: &Fields<'_>, body: &Bytes) -> Result<AskedPrompt, ApiError> {
    let has = |given: Given<'_>| given.json().is_some();
    if has(fields.previous_response_id) || has(fields.previous_input_messages) || has(fields.conversation) {
        return Ok(AskedPrompt::Opaque("stored"));
    }
    if has(fields.prompt) {
        return Ok(AskedPrompt::Opaque("stored"));
    }
    // Engines differ in what they make of this endpoint's tools before a template sees them.
    if fields.tools.json().is_some_and(|tools| !is_empty_list(tools)) {
        return Ok(AskedPrompt::Opaque("tools"));
    }
    let input = fields.input.json().ok_or_else(|| missing("input"))?;
    let mut messages = Messages::default();
    if let Some(instructions) = fields.instructions.json() {
        if !instructions.starts_with('"') {
            return Err(fields.instructions.wrong("a string"));
        }
        messages.add("system", instructions);
    }
    if input.starts_with('"') {
        messages.add("user", input);
    } else if input.starts_with('[') {
        let items = (&mut messages).deserialize(&mut serde_json::Deserializer::from_str(input));
        items.map_err(|_| fields.input.wrong("a string or a list of items, each an object without repeated fields"))?;
    } else {
        return Err(fields.input.wrong("a string or a list of items"));
    }
    if let Some(reason) = messages.opaque {
        return Ok(AskedPrompt::Opaque(reason));
    }
    Ok(AskedPrompt::Chat(Box::new(ChatParts {
        messages: messages.finish(),
        template_kwargs: fields.chat_template_kwargs.object(body)?,
        reasoning_effort: effort(fields.reasoning, body)?,
        has_own_template: fields.chat_template.json().is_some(),
        ..ChatParts::default()
    })))
}

fn is_empty_list(raw: &str) -> bool {
    raw.strip_prefix('[').is_some_and(|rest| rest.trim_ascii_start() == "]")
}

fn effort(reasoning: Given<'_>, body: &Bytes) -> Result<Option<Bytes>, ApiError> {
    #[derive(Deserialize)]
    struct Reasoning<'a> {
        #[serde(borrow)]
        effort: Option<&'a RawValue>,
    }
    let Some(raw) = reasoning.json() else { return Ok(None) };
    let reasoning: Reasoning<'_> = serde_json::from_str(raw).map_err(|_| reasoning.wrong("an object"))?;
    Ok(reasoning.effort.map(|effort| body.slice_ref(effort.get().as_bytes())))
}

/// An item of the input, as far as messages go.
#[derive(Deserialize)]
struct Item<'a> {
    #[serde(borrow, rename = "type")]
    kind: Option<Cow<'a, str>>,
    #[serde(borrow)]
    role: Option<Cow<'a, str>>,
    #[serde(borrow)]
    content: Option<&'a RawValue>,
}

/// A part of a message's content.
#[derive(Deserialize)]
struct Part<'a> {
    #[serde(borrow, rename = "type")]
    kind: Option<Cow<'a, str>>,
    #[serde(borrow)]
    text: Option<&'a RawValue>,
}

/// Messages of a chat, as JSON that grows item by item: a list of small items kept apart would take many times the
/// bytes that it came in.
#[derive(Default)]
struct Messages {
    json: String,
    opaque: Option<&'static str>,
}

impl Messages {
    /// `content` is JSON.
    fn add(&mut self, role: &str, content: &str) {
        self.json.push(if self.json.is_empty() { '[' } else { ',' });
        self.json.push_str("{\"role\":\"");
        self.json.push_str(role);
        self.json.push_str("\",\"content\":");
        self.json.push_str(content);
        self.json.push('}');
    }

    fn add_item(&mut self, item: &Item<'_>) -> Result<(), &'static str> {
        if item.kind.as_deref().is_some_and(|kind| kind != "message") {
            return Err("items");
        }
        let role = match item.role.as_deref() {
            Some(role @ ("user" | "assistant" | "system" | "developer")) => role,
            Some(_) | None => return Err("items"),
        };
        let content = item.content.ok_or("items")?.get();
        if content.starts_with('"') {
            self.add(role, content);
        } else if content.starts_with('[') {
            let mut parts = Parts { json: "[".to_owned(), opaque: None };
            // A list that is not of parts is nothing that is understood here.
            (&mut parts).deserialize(&mut serde_json::Deserializer::from_str(content)).map_err(|_| "items")?;
            if let Some(reason) = parts.opaque {
                return Err(reason);
            }
            parts.json.push(']');
            self.add(role, &parts.json);
        } else {
            return Err("items");
        }
        Ok(())
    }

    fn finish(mut self) -> Bytes {
        self.json.push_str(if self.json.is_empty() { "[]" } else { "]" });
        Bytes::from(self.json)
    }
}

impl<'de> DeserializeSeed<'de> for &mut Messages {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for &mut Messages {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of items")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        while self.opaque.is_none() {
            let Some(item) = list.next_element::<Item<'_>>()? else { return Ok(()) };
            self.opaque = self.add_item(&item).err();
        }
        while list.next_element::<IgnoredAny>()?.is_some() {}
        Ok(())
    }
}

/// The parts of one content, likewise.
struct Parts {
    json: String,
    opaque: Option<&'static str>,
}

impl Parts {
    fn add(&mut self, part: &Part<'_>) -> Result<(), &'static str> {
        match part.kind.as_deref() {
            Some("input_text" | "output_text" | "text") => {}
            Some("input_image" | "input_file" | "input_audio" | "input_video") => return Err("multimodal"),
            Some(_) | None => return Err("items"),
        }
        let text = part.text.map(RawValue::get).filter(|text| text.starts_with('"')).ok_or("items")?;
        if self.json.len() > 1 {
            self.json.push(',');
        }
        self.json.push_str("{\"type\":\"text\",\"text\":");
        self.json.push_str(text);
        self.json.push('}');
        Ok(())
    }
}

impl<'de> DeserializeSeed<'de> for &mut Parts {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for &mut Parts {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of parts")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        while self.opaque.is_none() {
            let Some(part) = list.next_element::<Part<'_>>()? else { return Ok(()) };
            self.opaque = self.add(&part).err();
        }
        while list.next_element::<IgnoredAny>()?.is_some() {}
        Ok(())
    }
}
