//! `/v1/responses`: conversion of the input to chat messages.
//!
//! Produces messages for a chat template in the order of the items, with memory of about the input size. Items with
//! engine-specific handling (function calls, images, earlier responses) make the prompt opaque.

use std::borrow::Cow;

use axum::body::Bytes;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::client_prompt::{ChatParts, ClientPrompt};
use super::error::ApiError;
use super::fields::{Fields, Given, missing};
use crate::formats::json::each;

/// Extracts the prompt.
pub(super) fn read(fields: &Fields<'_>, body: &Bytes) -> Result<ClientPrompt, ApiError> {
    let has = |given: Given<'_>| given.json().is_some();
    if has(fields.previous_response_id) || has(fields.previous_input_messages) || has(fields.conversation) {
        return Ok(ClientPrompt::Opaque("stored"));
    }
    if has(fields.prompt) {
        return Ok(ClientPrompt::Opaque("stored"));
    }
    // Engines convert the tools of this endpoint differently before templating.
    if fields.tools.json().is_some_and(|tools| !is_empty_list(tools)) {
        return Ok(ClientPrompt::Opaque("tools"));
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
        let shape = || fields.input.wrong("a string or a list of items, each an object without repeated fields");
        match each(input, || Err(shape()), |_, item: Item<'_>| messages.add_item(&item).map_err(Ok)) {
            Err(Ok(reason)) => return Ok(ClientPrompt::Opaque(reason)),
            Err(Err(error)) => return Err(error),
            Ok(()) => {}
        }
    } else {
        return Err(fields.input.wrong("a string or a list of items"));
    }
    Ok(ClientPrompt::Chat(Box::new(ChatParts {
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

/// Message fields of an input item.
#[derive(Deserialize)]
struct Item<'a> {
    #[serde(borrow, rename = "type")]
    kind: Option<Cow<'a, str>>,
    role: Option<Cow<'a, str>>,
    content: Option<&'a RawValue>,
}

/// One part of message content.
#[derive(Deserialize)]
struct Part<'a> {
    #[serde(borrow, rename = "type")]
    kind: Option<Cow<'a, str>>,
    text: Option<&'a RawValue>,
}

/// Chat messages as growing JSON. A list of separate small items would take many times the input size.
#[derive(Default)]
struct Messages {
    json: String,
}

impl Messages {
    /// `content` is JSON.
    fn add(&mut self, role: &str, content: &str) {
        self.json.push(if self.json.is_empty() { '[' } else { ',' });
        for part in ["{\"role\":\"", role, "\",\"content\":", content, "}"] {
            self.json.push_str(part);
        }
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
            let mut parts = "[".to_owned();
            // Content that is not a list of parts is unknown.
            each(content, || "items", |_, part: Part<'_>| add_part(&mut parts, &part))?;
            parts.push(']');
            self.add(role, &parts);
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

/// Adds a part to the growing JSON of one content.
fn add_part(json: &mut String, part: &Part<'_>) -> Result<(), &'static str> {
    match part.kind.as_deref() {
        Some("input_text" | "output_text" | "text") => {}
        Some("input_image" | "input_file" | "input_audio" | "input_video") => return Err("multimodal"),
        Some(_) | None => return Err("items"),
    }
    let text = part.text.map(RawValue::get).filter(|text| text.starts_with('"')).ok_or("items")?;
    if json.len() > 1 {
        json.push(',');
    }
    for part in ["{\"type\":\"text\",\"text\":", text, "}"] {
        json.push_str(part);
    }
    Ok(())
}
