//! Conversion of a Messages body to a chat body.
//!
//! Produces the messages that vLLM derives from the same body, so that the hashes of prefixes are those of an engine
//! that serves Messages itself. Memory is within a small multiple of the body. Strings are copied as written, without
//! decoding. Unknown block types are rejected, because the model would not see them.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::value::RawValue;

use super::blocks::{Block, Parts, Raw, each_block, invalid, missing, string, texts, unsupported, wrong};
use crate::formats::json::{each, inner, quoted};
use crate::formats::openai::{ApiError, checked_text};

/// Use of the converted body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// `/v1/messages`: a response is generated.
    Generate,
    /// `/v1/messages/count_tokens`: only the prompt matters.
    Count,
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
    let text = checked_text(body)?;
    let body: MessagesBody<'_> = serde_json::from_str(text).map_err(|error| {
        if error.is_data() {
            invalid(None, "the body must be a JSON object without repeated fields")
        } else {
            ApiError::invalid("invalid_json", None, format!("the body is not JSON: {error}"))
        }
    })?;
    let mut chat = Chat { json: String::with_capacity(text.len() + text.len() / 8 + 128) };
    chat.json.push('{');
    if let Some(model) = body.model {
        chat.field("model", model.get());
        chat.json.push(',');
    }
    chat.json.push_str("\"messages\":[");
    let start = chat.json.len();
    chat.system(body.system)?;
    let messages = body.messages.ok_or_else(|| missing("messages"))?.get();
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
    Ok(chat.json.into_bytes())
}

/// The growing chat body.
struct Chat {
    json: String,
}

impl Chat {
    fn field(&mut self, name: &str, value: &str) {
        for part in ["\"", name, "\":", value] {
            self.json.push_str(part);
        }
    }

    /// Adds a field after others, if given.
    fn add(&mut self, name: &str, value: Option<&str>) {
        if let Some(value) = value {
            self.json.push(',');
            self.field(name, value);
        }
    }

    /// Opens a message; the caller adds fields and the closing brace.
    fn open(&mut self, role: &str) {
        if !self.json.ends_with('[') {
            self.json.push(',');
        }
        self.json.push_str("{\"role\":\"");
        self.json.push_str(role);
        self.json.push('"');
    }

    fn content(&mut self, role: &str, content: &str) {
        self.open(role);
        self.add("content", Some(content));
        self.json.push('}');
    }

    fn system(&mut self, system: Raw<'_>) -> Result<(), ApiError> {
        let Some(system) = system else { return Ok(()) };
        self.instructions(&texts(system.get(), "system", "")?);
        Ok(())
    }

    fn instructions(&mut self, text: &str) {
        if !text.is_empty() {
            self.content("system", &format!("\"{text}\""));
        }
    }

    fn message(&mut self, position: usize, message: &Message<'_>) -> Result<(), ApiError> {
        let at = format!("messages[{position}]");
        let content = message.content.ok_or_else(|| invalid(Some("messages"), format!("{at} has no content")))?.get();
        match message.role.as_deref() {
            Some(role @ ("user" | "assistant")) if content.starts_with('"') => self.content(role, content),
            Some("user") => self.user(&at, content)?,
            Some("assistant") => self.assistant(&at, content)?,
            // Newer clients send these between turns. In place they keep the prefix of earlier turns.
            Some("system") => self.instructions(&texts(content, "messages", "")?),
            _ => return Err(invalid(Some("messages"), format!("{at}.role must be user or assistant"))),
        }
        Ok(())
    }

    /// Tool results become messages of their own, before the other blocks.
    fn user(&mut self, at: &str, content: &str) -> Result<(), ApiError> {
        let mut parts = Parts::default();
        each_block(at, content, |at, block| match block.kind.as_deref() {
            Some("tool_result") => self.tool_result(at, &block, &mut parts),
            _ => parts.block(at, &block),
        })?;
        if let Some(content) = parts.finish() {
            self.content("user", &content);
        }
        Ok(())
    }

    /// Images of a result are added to `parts`, because tool messages have text only.
    fn tool_result(&mut self, at: &str, block: &Block<'_>, parts: &mut Parts) -> Result<(), ApiError> {
        let id = string(block.tool_use_id, at, "tool_use_id")?;
        let mut text = String::new();
        match block.content.map(RawValue::get) {
            None => {}
            Some(content) if content.starts_with('"') => text.push_str(inner(content).unwrap_or_default()),
            Some(content) => each_block(at, content, |at, block| {
                if block.kind.as_deref() != Some("text") {
                    return parts.block(at, &block);
                }
                if !text.is_empty() {
                    text.push_str("\\n");
                }
                text.push_str(string(block.text, at, "text")?);
                Ok(())
            })?,
        }
        self.open("tool");
        self.add("tool_call_id", Some(&format!("\"{id}\"")));
        self.add("content", Some(&format!("\"{text}\"")));
        self.json.push('}');
        Ok(())
    }

    fn assistant(&mut self, at: &str, content: &str) -> Result<(), ApiError> {
        let (mut parts, mut calls, mut reasoning) = (Parts::default(), String::new(), String::new());
        each_block(at, content, |at, block| {
            match block.kind.as_deref() {
                Some("text") => parts.text(string(block.text, at, "text")?),
                Some("thinking") => reasoning.push_str(string(block.thinking, at, "thinking")?),
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
        #[derive(Deserialize)]
        struct ToolChoice<'a> {
            #[serde(borrow, rename = "type")]
            kind: Cow<'a, str>,
            name: Raw<'a>,
            disable_parallel_tool_use: Option<bool>,
        }
        let Some(choice) = body.tool_choice else { return Ok(()) };
        let has_tools = body.tools.is_some_and(|tools| tools.get().contains('{'));
        let shape = || wrong("tool_choice", "an object with the type auto, any, tool or none");
        let choice: ToolChoice<'_> = serde_json::from_str(choice.get()).map_err(|_| shape())?;
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
            _ => return Err(shape()),
        };
        self.add("tool_choice", Some(&value));
        if choice.disable_parallel_tool_use == Some(true) {
            self.add("parallel_tool_calls", Some("false"));
        }
        Ok(())
    }

    /// Fields that change the prompt through the chat template.
    fn template(&mut self, body: &MessagesBody<'_>) -> Result<(), ApiError> {
        #[derive(Deserialize)]
        struct Thinking<'a> {
            #[serde(borrow, rename = "type")]
            kind: Cow<'a, str>,
        }
        #[derive(Deserialize)]
        struct OutputConfig<'a> {
            #[serde(borrow)]
            effort: Option<Cow<'a, str>>,
        }
        let shape = || wrong("thinking", "an object with the type enabled, adaptive or disabled");
        let thinks = match body.thinking {
            None => None,
            Some(thinking) => {
                let Thinking { kind } = serde_json::from_str(thinking.get()).map_err(|_| shape())?;
                match &*kind {
                    "enabled" | "adaptive" => Some(true),
                    "disabled" => Some(false),
                    _ => return Err(shape()),
                }
            }
        };
        let variables = thinks.map(|thinks| format!(r#"{{"enable_thinking":{thinks},"thinking":{thinks}}}"#));
        let given = body.chat_template_kwargs.map(RawValue::get);
        self.add("chat_template_kwargs", given.or(variables.as_deref()));
        let Some(config) = body.output_config else { return Ok(()) };
        let shape = || wrong("output_config", "an object with effort and format");
        let config: OutputConfig<'_> = serde_json::from_str(config.get()).map_err(|_| shape())?;
        let effort = match config.effort.as_deref() {
            None => return Ok(()),
            Some(effort @ ("low" | "medium" | "high")) => effort,
            // Not every engine accepts more.
            Some("xhigh" | "max") => "high",
            Some(_) => {
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
        #[derive(Deserialize)]
        struct OutputConfig<'a> {
            #[serde(borrow)]
            format: Option<Format<'a>>,
        }
        #[derive(Deserialize)]
        struct Format<'a> {
            #[serde(borrow, rename = "type")]
            kind: Cow<'a, str>,
            schema: Raw<'a>,
        }
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
        if let Some(metadata) = body.metadata {
            let metadata: Metadata<'_> =
                serde_json::from_str(metadata.get()).map_err(|_| wrong("metadata", "an object"))?;
            self.add("user", metadata.user_id.map(RawValue::get).filter(|user| user.starts_with('"')));
        }
        let Some(config) = body.output_config else { return Ok(()) };
        let shape = || wrong("output_config", "an object with a format of the type json_schema");
        let config: OutputConfig<'_> = serde_json::from_str(config.get()).map_err(|_| shape())?;
        if let Some(Format { kind, schema }) = config.format {
            let schema = schema.filter(|_| kind == "json_schema").ok_or_else(shape)?.get();
            let format = format!(r#"{{"type":"json_schema","json_schema":{{"name":"response","schema":{schema}}}}}"#);
            self.add("response_format", Some(&format));
        }
        Ok(())
    }
}
