//! Conversion of a Messages body to a chat body.
//!
//! The result is the chat for the engines, or that which an engine derives from the same body (vLLM 0.32, SGLang 0.5.23),
//! whose hashes are those of the engine. Memory is within a small multiple of the body. Strings are copied as written,
//! without decoding. Unknown block types are rejected, because the model would not see them.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::value::RawValue;

use super::blocks::{
    BILLING_HEADER, Block, Parts, Raw, each_block, invalid, missing, object, string, texts, unsupported, wrong,
};
use crate::formats::json::{each, inner, quoted};
use crate::formats::openai::{ApiError, ChatStyle, checked_text};

/// Use of the converted body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// `/v1/messages`: a response is generated.
    Generate,
    /// `/v1/messages/count_tokens`: only the prompt matters.
    Count,
}

/// How a body is converted.
#[derive(Clone, Copy, Debug, Default)]
pub struct Conversion {
    /// The engines of the model.
    pub style: ChatStyle,
    /// Whether they are vLLM, which accepts a budget of thinking tokens.
    pub is_vllm: bool,
    /// Whether the engine converts the body itself, and the result only serves for routing.
    pub is_passed: bool,
}

impl Conversion {
    fn is_passed_to_sglang(self) -> bool {
        self.is_passed && self.style.is_sglang
    }

    /// Separator of the texts of system messages, and whether the billing header of Claude Code is removed.
    fn system_texts(self) -> (&'static str, bool) {
        if self.is_passed_to_sglang() { ("\\n", false) } else { ("", true) }
    }
}

/// A converted body.
#[derive(Clone, Debug)]
pub struct ConvertedChat {
    /// The chat.
    pub json: Vec<u8>,
    /// Whether a system message follows other messages in the chat, which not every chat template takes.
    pub has_inline_system: bool,
}

#[derive(Deserialize)]
struct MessagesBody<'a> {
    #[serde(borrow)]
    model: Raw<'a>,
    messages: Raw<'a>,
    system: Raw<'a>,
    max_tokens: Raw<'a>,
    stop_sequences: Raw<'a>,
    temperature: Raw<'a>,
    top_p: Raw<'a>,
    top_k: Raw<'a>,
    stream: Raw<'a>,
    tools: Raw<'a>,
    tool_choice: Raw<'a>,
    metadata: Raw<'a>,
    thinking: Raw<'a>,
    output_config: Raw<'a>,
    mcp_servers: Raw<'a>,
    // Extensions of engines and of this gateway.
    cache_salt: Raw<'a>,
    session_id: Raw<'a>,
    chat_template_kwargs: Raw<'a>,
}

#[derive(Deserialize)]
struct Message<'a> {
    #[serde(borrow)]
    role: Option<Cow<'a, str>>,
    content: Raw<'a>,
}

#[derive(Deserialize)]
struct Tool<'a> {
    #[serde(borrow, rename = "type")]
    kind: Option<Cow<'a, str>>,
    name: Raw<'a>,
    description: Raw<'a>,
    input_schema: Raw<'a>,
}

/// `tool_choice`, `thinking`, or the format of an output.
#[derive(Deserialize)]
struct Choice<'a> {
    #[serde(borrow, rename = "type")]
    kind: Cow<'a, str>,
    name: Raw<'a>,
    disable_parallel_tool_use: Option<bool>,
    budget_tokens: Raw<'a>,
    schema: Raw<'a>,
}

#[derive(Deserialize)]
struct OutputConfig<'a> {
    #[serde(borrow)]
    effort: Option<Cow<'a, str>>,
    format: Raw<'a>,
}

/// Converts the body of a Messages request to the body of a chat request.
///
/// ```
/// use pointsman_gateway::formats::anthropic::{Purpose, chat_body};
///
/// let body = br#"{"model":"m","max_tokens":5,"system":"Be brief.","messages":[{"role":"user","content":"Hi"}]}"#;
/// let chat = chat_body(body, Purpose::Generate)?;
/// assert_eq!(
///     String::from_utf8_lossy(&chat),
///     r#"{"model":"m","messages":[{"role":"system","content":"Be brief."},{"role":"user","content":"Hi"}],"max_tokens":5}"#
/// );
/// # Ok::<(), pointsman_gateway::formats::openai::ApiError>(())
/// ```
///
/// # Errors
/// 400 for an invalid body, and for content that a chat cannot express, with its name.
pub fn chat_body(body: &[u8], purpose: Purpose) -> Result<Vec<u8>, ApiError> {
    converted(body, purpose, |_| Conversion::default()).map(|chat| chat.json)
}

/// Converts the body for the engines of the named model.
///
/// # Errors
/// As [`chat_body`].
pub fn converted(
    body: &[u8],
    purpose: Purpose,
    conversion: impl FnOnce(Option<&str>) -> Conversion,
) -> Result<ConvertedChat, ApiError> {
    let text = checked_text(body)?;
    let body: MessagesBody<'_> = serde_json::from_str(text).map_err(|error| {
        if error.is_data() {
            invalid(None, "the body must be a JSON object without repeated fields")
        } else {
            ApiError::invalid("invalid_json", None, format!("the body is not JSON: {error}"))
        }
    })?;
    let model = body.model.and_then(|model| serde_json::from_str::<Cow<'_, str>>(model.get()).ok());
    let mut chat = Chat {
        json: String::with_capacity(text.len() + text.len() / 8 + 128),
        conversion: conversion(model.as_deref()),
        last: "",
        is_last_folded: false,
        has_inline_system: false,
    };
    chat.json.push('{');
    if let Some(model) = body.model {
        chat.field("model", model.get());
        chat.json.push(',');
    }
    chat.json.push_str("\"messages\":[");
    let start = chat.json.len();
    let messages = body.messages.ok_or_else(|| missing("messages"))?.get();
    chat.system(body.system, messages)?;
    let shape = || wrong("messages", "a list of objects with role and content");
    let mut is_empty = true;
    each(messages, shape, |position, message: Message<'_>| {
        is_empty = false;
        chat.message(position, &message)
    })?;
    if is_empty {
        return Err(invalid(Some("messages"), "messages must not be empty"));
    }
    debug_assert!(chat.json[start..].starts_with('{') || chat.json.len() == start);
    chat.json.push(']');
    chat.tools(body.tools)?;
    chat.tool_choice(&body)?;
    chat.template(&body)?;
    for (name, value) in [("cache_salt", body.cache_salt), ("session_id", body.session_id)] {
        chat.add(name, value.map(RawValue::get));
    }
    if purpose == Purpose::Generate {
        chat.sampling(&body)?;
    }
    chat.json.push('}');
    Ok(ConvertedChat { json: chat.json.into_bytes(), has_inline_system: chat.has_inline_system })
}

/// The growing chat body.
struct Chat {
    json: String,
    conversion: Conversion,
    /// Role of the last message; empty before the first.
    last: &'static str,
    /// Whether that is a folded system message alone.
    is_last_folded: bool,
    has_inline_system: bool,
}

impl Chat {
    fn field(&mut self, name: &str, value: &str) {
        self.json.extend(["\"", name, "\":", value]);
    }

    /// Adds a field after others, if given.
    fn add(&mut self, name: &str, value: Option<&str>) {
        if let Some(value) = value {
            self.json.push(',');
            self.field(name, value);
        }
    }

    /// Opens a message; the caller adds fields and the closing brace.
    fn open(&mut self, role: &'static str) {
        if !self.last.is_empty() {
            self.json.push(',');
        }
        (self.last, self.is_last_folded) = (role, false);
        self.json.push_str("{\"role\":\"");
        self.json.push_str(role);
        self.json.push('"');
    }

    fn content(&mut self, role: &'static str, content: &str) {
        // Templates that take no system message between turns often take no two messages of a user, either.
        if let Some(text) = inner(content).filter(|_| role == "user" && self.is_last_folded) {
            return self.fold(text);
        }
        self.open(role);
        self.add("content", Some(content));
        self.json.push('}');
    }

    /// The first system message. Engines that convert the body move all others to it if their template refuses them.
    fn system(&mut self, system: Raw<'_>, messages: &str) -> Result<(), ApiError> {
        let form = self.conversion.system_texts();
        let mut all = system.map_or(Ok(String::new()), |system| texts(system.get(), "system", form))?;
        if self.gathers_system() {
            let shape = || wrong("messages", "a list of objects with role and content");
            each(messages, shape, |_, message: Message<'_>| {
                let Some(content) = message.content.filter(|_| message.role.as_deref() == Some("system")) else {
                    return Ok(());
                };
                let text = texts(content.get(), "messages", form)?;
                if !all.is_empty() && !text.is_empty() {
                    all.push_str(form.0);
                }
                all.push_str(&text);
                Ok(())
            })?;
        }
        self.instructions(&all);
        Ok(())
    }

    fn gathers_system(&self) -> bool {
        self.conversion.is_passed && self.conversion.style.takes_inline_system == Some(false)
    }

    fn instructions(&mut self, text: &str) {
        let text = match text.starts_with(BILLING_HEADER) && self.conversion.system_texts().1 {
            true => text.split_once("\\n").map_or("", |(_, rest)| rest),
            false => text,
        };
        if text.is_empty() {
            return;
        }
        let is_inline = !self.last.is_empty();
        if is_inline && self.conversion.style.takes_inline_system == Some(false) {
            self.fold(text);
        } else {
            self.has_inline_system |= is_inline;
            self.content("system", &format!("\"{text}\""));
        }
    }

    /// Adds the text to the message before, for templates that take no system message there. The prefix of earlier turns
    /// stays the same.
    fn fold(&mut self, text: &str) {
        let is_open_end = !["", "assistant"].contains(&self.last);
        // The content is the last field of these messages.
        if is_open_end && self.json.ends_with("\"}") {
            self.json.truncate(self.json.len() - 2);
            self.json += &format!(r#"\n\n{text}"}}"#);
        } else if is_open_end && self.json.ends_with("]}") {
            self.json.truncate(self.json.len() - 2);
            self.json += &format!(r#",{{"type":"text","text":"{text}"}}]}}"#);
        } else {
            self.content("user", &format!("\"{text}\""));
            self.is_last_folded = true;
        }
    }

    fn message(&mut self, position: usize, message: &Message<'_>) -> Result<(), ApiError> {
        let at = format!("messages[{position}]");
        let content = message.content.ok_or_else(|| invalid(Some("messages"), format!("{at} has no content")))?.get();
        match message.role.as_deref() {
            Some("user") if content.starts_with('"') => self.content("user", content),
            Some("assistant") if content.starts_with('"') => self.content("assistant", content),
            Some("user") => self.user(&at, content)?,
            Some("assistant") => self.assistant(&at, content)?,
            Some("system") if self.gathers_system() => {}
            // Newer clients send these between turns. In place they keep the prefix of earlier turns.
            Some("system") => self.instructions(&texts(content, "messages", self.conversion.system_texts())?),
            _ => return Err(invalid(Some("messages"), format!("{at}.role must be user or assistant"))),
        }
        Ok(())
    }

    /// Tool results become messages of their own, before the other blocks; in SGLang in the order of the blocks.
    fn user(&mut self, at: &str, content: &str) -> Result<(), ApiError> {
        let (mut parts, mut images) = (Parts::default(), Parts::default());
        each_block(at, content, |at, block| {
            if block.kind.as_deref() != Some("tool_result") {
                return parts.block(at, &block);
            }
            if self.conversion.is_passed_to_sglang() {
                self.parts(std::mem::take(&mut parts));
            }
            // vLLM gives each result with images a message for them.
            let of_result = if self.conversion.is_passed { &mut images } else { &mut parts };
            self.tool_result(at, &block, of_result)?;
            self.parts(std::mem::take(&mut images));
            Ok(())
        })?;
        self.parts(parts);
        Ok(())
    }

    /// Adds a message of the user, unless it is empty.
    fn parts(&mut self, parts: Parts) {
        if let Some(content) = parts.finish() {
            self.content("user", &content);
        }
    }

    /// Images of a result are added to `parts`, because tool messages have text only; those of SGLang have images, too. A
    /// reference of a tool search names the tool, which the engine has in its list.
    fn tool_result(&mut self, at: &str, block: &Block<'_>, parts: &mut Parts) -> Result<(), ApiError> {
        let id = string(block.tool_use_id, at, "tool_use_id")?;
        let (is_sglang, mut of_sglang, mut text) =
            (self.conversion.is_passed_to_sglang(), Parts::default(), String::new());
        match block.content.map(RawValue::get) {
            None => {}
            Some(content) if content.starts_with('"') => text.push_str(inner(content).unwrap_or_default()),
            Some(content) => each_block(at, content, |at, block| {
                let (of_block, before) = match block.kind.as_deref() {
                    Some("text" | "image") if is_sglang => return of_sglang.block(at, &block),
                    Some("text") => (string(block.text, at, "text")?, ""),
                    Some("tool_reference") if !self.conversion.is_passed => {
                        (string(block.tool_name.or(block.name), at, "tool_name")?, "Tool available: ")
                    }
                    _ if is_sglang => return Err(unsupported(at, "block", block.kind.as_deref())),
                    _ => return parts.block(at, &block),
                };
                text.extend([if text.is_empty() { "" } else { "\\n" }, before, of_block]);
                Ok(())
            })?,
        }
        self.open("tool");
        self.add("tool_call_id", Some(&format!("\"{id}\"")));
        self.add("content", Some(&of_sglang.finish().unwrap_or_else(|| format!("\"{text}\""))));
        self.json.push('}');
        Ok(())
    }

    fn assistant(&mut self, at: &str, content: &str) -> Result<(), ApiError> {
        let (mut parts, mut calls, mut reasoning) = (Parts::default(), String::new(), String::new());
        each_block(at, content, |at, block| {
            match block.kind.as_deref() {
                Some("text") => parts.text(string(block.text, at, "text")?),
                Some("thinking") => {
                    let is_next = self.conversion.is_passed_to_sglang() && !reasoning.is_empty();
                    reasoning.push_str(if is_next { "\\n" } else { "" });
                    reasoning.push_str(string(block.thinking, at, "thinking")?);
                }
                Some("redacted_thinking") => {}
                Some("tool_use") => {
                    let (id, name) = (string(block.id, at, "id")?, string(block.name, at, "name")?);
                    let input = quoted(block.input.map_or("{}", RawValue::get));
                    let function = format!(r#"{{"name":"{name}","arguments":{input}}}"#);
                    calls.push(if calls.is_empty() { '[' } else { ',' });
                    calls += &format!(r#"{{"id":"{id}","type":"function","function":{function}}}"#);
                }
                kind => return Err(unsupported(at, "block", kind)),
            }
            Ok(())
        })?;
        self.open("assistant");
        if !reasoning.is_empty() {
            // vLLM reads the first name, SGLang the second.
            self.add("reasoning", Some(&format!("\"{reasoning}\"")));
            self.add("reasoning_content", Some(&format!("\"{reasoning}\"")));
        }
        match parts.finish() {
            Some(content) => self.add("content", Some(&content)),
            None if calls.is_empty() => self.add("content", Some("\"\"")),
            None => {}
        }
        if !calls.is_empty() {
            calls.push(']');
            self.add("tool_calls", Some(&calls));
        }
        self.json.push('}');
        Ok(())
    }

    fn tools(&mut self, tools: Raw<'_>) -> Result<(), ApiError> {
        let Some(tools) = tools else { return Ok(()) };
        let mut list = String::new();
        let shape = || wrong("tools", "a list of objects");
        each(tools.get(), shape, |position, tool: Tool<'_>| {
            let at = format!("tools[{position}]");
            if !matches!(tool.kind.as_deref(), None | Some("custom")) {
                return Err(unsupported(&at, "tool", tool.kind.as_deref()));
            }
            let name = string(tool.name, &at, "name")?;
            let schema = tool.input_schema.map(RawValue::get).filter(|schema| schema.starts_with('{'));
            let wrong = || invalid(Some("tools"), format!("{at}.input_schema must be an object"));
            let schema = schema.ok_or_else(wrong)?;
            list.push(if list.is_empty() { '[' } else { ',' });
            let description = tool.description.map(|text| format!(r#","description":{text}"#)).unwrap_or_default();
            let function = format!(r#"{{"name":"{name}"{description},"parameters":{schema}}}"#);
            list += &format!(r#"{{"type":"function","function":{function}}}"#);
            Ok(())
        })?;
        if !list.is_empty() {
            list.push(']');
            self.add("tools", Some(&list));
        }
        Ok(())
    }

    fn tool_choice(&mut self, body: &MessagesBody<'_>) -> Result<(), ApiError> {
        const FORM: &str = "an object with the type auto, any, tool or none";
        let Some(choice) = object::<Choice<'_>>(body.tool_choice, "tool_choice", FORM)? else { return Ok(()) };
        let has_tools = body.tools.is_some_and(|tools| tools.get().contains('{'));
        let value = match &*choice.kind {
            // Engines reject a choice without tools.
            "auto" | "none" if !has_tools => return Ok(()),
            kind @ ("auto" | "none") => quoted(kind),
            "any" | "tool" if !has_tools => return Err(invalid(Some("tool_choice"), "tool_choice requires tools")),
            "any" => quoted("required"),
            "tool" => {
                let name = string(choice.name, "tool_choice", "name")?;
                format!(r#"{{"type":"function","function":{{"name":"{name}"}}}}"#)
            }
            _ => return Err(wrong("tool_choice", FORM)),
        };
        self.add("tool_choice", Some(&value));
        if choice.disable_parallel_tool_use == Some(true) {
            self.add("parallel_tool_calls", Some("false"));
        }
        Ok(())
    }

    /// Fields that change the prompt through the chat template.
    fn template(&mut self, body: &MessagesBody<'_>) -> Result<(), ApiError> {
        const FORM: &str = "an object with the type enabled, adaptive or disabled";
        let (mut thinks, mut budget) = (None, None);
        if let Some(thinking) = object::<Choice<'_>>(body.thinking, "thinking", FORM)? {
            thinks = match &*thinking.kind {
                "enabled" | "adaptive" => Some(true),
                "disabled" => Some(false),
                _ => return Err(wrong("thinking", FORM)),
            };
            budget = thinking.budget_tokens.filter(|_| thinking.kind == "enabled").map(RawValue::get);
        }
        let is_sglang = self.conversion.style.is_sglang;
        let variables = thinks.filter(|_| is_sglang);
        let variables = variables.map(|thinks| format!(r#"{{"enable_thinking":{thinks},"thinking":{thinks}}}"#));
        let given = body.chat_template_kwargs.map(RawValue::get);
        self.add("chat_template_kwargs", given.or(variables.as_deref()));
        self.add("thinking_token_budget", budget.filter(|_| self.conversion.is_vllm));
        if thinks == Some(false) && !is_sglang {
            self.add("reasoning_effort", Some("\"none\""));
            return Ok(());
        }
        let form = "an object with effort and format";
        let config = object::<OutputConfig<'_>>(body.output_config, "output_config", form)?;
        let Some(effort) = config.and_then(|config| config.effort) else { return Ok(()) };
        let effort = match &*effort {
            effort @ ("low" | "medium" | "high" | "max") if self.conversion.is_passed => effort,
            "xhigh" if self.conversion.is_passed && is_sglang => "max",
            "xhigh" if self.conversion.is_passed => "xhigh",
            effort @ ("low" | "medium" | "high") => effort,
            // Not every engine accepts more.
            "xhigh" | "max" => "high",
            _ => {
                let message = "output_config.effort must be low, medium, high, xhigh or max";
                return Err(invalid(Some("output_config"), message));
            }
        };
        self.add("reasoning_effort", Some(&quoted(effort)));
        Ok(())
    }

    /// Fields that do not change the prompt.
    fn sampling(&mut self, body: &MessagesBody<'_>) -> Result<(), ApiError> {
        #[derive(Deserialize)]
        struct Metadata<'a> {
            #[serde(borrow)]
            user_id: Raw<'a>,
        }
        const FORM: &str = "an object with a format of the type json_schema";
        if body.mcp_servers.is_some_and(|servers| servers.get().contains('{')) {
            return Err(ApiError::invalid("unsupported_content", Some("mcp_servers"), "mcp_servers are not supported"));
        }
        let max_tokens = body.max_tokens.ok_or_else(|| missing("max_tokens"))?.get();
        if !max_tokens.parse::<u32>().is_ok_and(|tokens| tokens > 0) {
            return Err(wrong("max_tokens", "a whole number, 1 or more"));
        }
        self.add("max_tokens", Some(max_tokens));
        if let Some(stop) = body.stop_sequences.map(RawValue::get) {
            let shape = || wrong("stop_sequences", "a list of strings");
            let mut is_empty = true;
            each(stop, shape, |_, _: Cow<'_, str>| {
                is_empty = false;
                Ok(())
            })?;
            self.add("stop", Some(stop).filter(|_| !is_empty));
        }
        for (name, value) in [("temperature", body.temperature), ("top_p", body.top_p), ("top_k", body.top_k)] {
            let Some(value) = value.map(RawValue::get) else { continue };
            if value.parse::<f64>().is_err() {
                return Err(wrong(name, "a number"));
            }
            self.add(name, Some(value));
        }
        match body.stream.map(RawValue::get) {
            None | Some("false") => {}
            Some("true") => {
                self.add("stream", Some("true"));
                self.add("stream_options", Some("{\"include_usage\":true}"));
            }
            Some(_) => return Err(wrong("stream", "true or false")),
        }
        if let Some(metadata) = object::<Metadata<'_>>(body.metadata, "metadata", "an object")? {
            self.add("user", metadata.user_id.map(RawValue::get).filter(|user| user.starts_with('"')));
        }
        let config = object::<OutputConfig<'_>>(body.output_config, "output_config", FORM)?;
        let format = config.and_then(|config| config.format);
        if let Some(Choice { kind, schema, .. }) = object(format, "output_config", FORM)? {
            let schema = schema.filter(|_| kind == "json_schema");
            let schema = schema.ok_or_else(|| wrong("output_config", FORM))?.get();
            let format = format!(r#"{{"type":"json_schema","json_schema":{{"name":"response","schema":{schema}}}}}"#);
            self.add("response_format", Some(&format));
        }
        Ok(())
    }
}
