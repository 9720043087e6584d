//! Template input of a chat request.
//!
//! Reads messages and tools with limits, converts them to vLLM's shape, and detects content other than text.
//! [`media`](super::media) removes the data of media parts before. [`template`](super::template) renders.
//!
//! vLLM's shape: only known message fields, contents in the template's format (see [`ContentFormat`]), those of tools as
//! text, arguments of earlier tool calls as values instead of JSON text, tools with `description` and `parameters` even if
//! absent, no billing line of Claude Code, which differs per request. SGLang joins several texts by spaces, and keeps the
//! billing line and the order of a tool's fields.

use minijinja::Value;
use minijinja::value::ValueKind;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::format::ContentFormat;
use super::media::MediaKind;
use super::reason::NoTokens;
use crate::formats::anthropic::BILLING_HEADER;
use crate::formats::openai::ChatParts;

/// Maximum bytes of JSON read, and of text tokenized, per prompt: about a million tokens.
pub(super) const PROMPT_BYTES_MAX: usize = 4 << 20;

/// Variables for rendering a template.
pub(super) struct Chat {
    pub(super) messages: Vec<Value>,
    /// Length of their JSON.
    pub(super) bytes: usize,
    pub(super) tools: Value,
    pub(super) documents: Value,
    pub(super) variables: Vec<(Value, Value)>,
    pub(super) add_generation_prompt: bool,
    pub(super) continue_final_message: bool,
}

#[derive(Deserialize)]
struct Message {
    role: String,
    content: Option<Value>,
    tool_calls: Option<Vec<Value>>,
    reasoning: Option<Value>,
    reasoning_content: Option<Value>,
    tool_call_id: Option<Value>,
    name: Option<Value>,
    tools: Option<Value>,
}

/// Whether the request has tools, even as an empty list.
pub(super) fn has_tools(parts: &ChatParts) -> bool {
    parts.tools.as_deref().is_some_and(|tools| tools.trim_ascii() != b"null")
}

/// JSON bytes of a conversation.
pub(super) fn bytes(parts: &ChatParts) -> usize {
    let optional = [&parts.tools, &parts.documents, &parts.template_kwargs];
    let bytes: usize = optional.iter().filter_map(|part| part.as_ref().map(|bytes| bytes.len())).sum();
    parts.messages.len() + bytes
}

/// Reason why a local template would render a different text, as far as known without parsing.
pub(super) fn refused(parts: &ChatParts) -> Result<(), NoTokens> {
    if parts.has_own_template {
        return Err(NoTokens::OWN_TEMPLATE);
    }
    if bytes(parts) <= PROMPT_BYTES_MAX { Ok(()) } else { Err(NoTokens::TOO_LONG) }
}

/// Form of media parts in the messages for a template.
#[derive(Clone, Copy)]
pub(super) enum MediaForm<'a> {
    /// None are accepted: a conversation without media.
    Rejected,
    /// Parts such as `{"type": "image"}`, and this text before the texts of a message for templates without parts.
    Accepted(Option<&'a str>),
}

/// Parses a conversation for a template with content format `format`.
pub(super) fn read(parts: &ChatParts, format: ContentFormat, media: MediaForm<'_>) -> Result<Chat, NoTokens> {
    let messages: Vec<Message> = json(&parts.messages)?;
    let shaped = |message: Message| message.shaped(format, media, parts.is_sglang);
    let messages = messages.into_iter().map(shaped).collect::<Result<_, _>>()?;
    let tools = match &parts.tools {
        Some(tools) if has_tools(parts) => {
            let tools: Vec<Value> = json(tools)?;
            Value::from(tools.iter().map(|given| tool(given, parts.is_sglang)).collect::<Result<Vec<_>, _>>()?)
        }
        Some(_) | None => Value::from(()),
    };
    let optional = |part: &Option<axum::body::Bytes>| part.as_ref().map_or(Ok(Value::from(())), |bytes| json(bytes));
    Ok(Chat {
        messages,
        bytes: parts.messages.len(),
        tools,
        documents: optional(&parts.documents)?,
        variables: variables(parts)?,
        add_generation_prompt: parts.add_generation_prompt.unwrap_or(true),
        continue_final_message: parts.continue_final_message.unwrap_or(false),
    })
}

/// Variables of the template: those of the client and the effort, from which vLLM derives whether the model thinks.
pub(super) fn variables(parts: &ChatParts) -> Result<Vec<(Value, Value)>, NoTokens> {
    let given: Value = parts.template_kwargs.as_ref().map_or(Ok(Value::from(())), |kwargs| json(kwargs))?;
    let mut variables = if given.is_none() { Vec::new() } else { pairs(&given)? };
    let effort: Value = parts.reasoning_effort.as_ref().map_or(Ok(Value::from(())), |effort| json(effort))?;
    if effort.is_none() {
        return Ok(variables);
    }
    let is_given = |name: &str| given.get_attr(name).is_ok_and(|value| !value.is_undefined());
    if !parts.is_sglang && !is_given("enable_thinking") {
        variables.push((Value::from("enable_thinking"), Value::from(effort.as_str() != Some("none"))));
    }
    if !parts.is_sglang || !is_given("reasoning_effort") {
        variables.push((Value::from("reasoning_effort"), effort));
    }
    Ok(variables)
}

/// Checks that all contents are text, without a template.
pub(super) fn text_only(parts: &ChatParts) -> Result<(), NoTokens> {
    #[derive(Deserialize)]
    struct Outline {
        content: Option<Value>,
    }
    let messages: Vec<Outline> = json(&parts.messages)?;
    messages.into_iter().try_for_each(|message| pieces(message.content, MediaForm::Rejected).map(drop))
}

fn json<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, NoTokens> {
    serde_json::from_slice(bytes).map_err(|_| NoTokens::MALFORMED)
}

impl Message {
    fn shaped(self, format: ContentFormat, media: MediaForm<'_>, is_sglang: bool) -> Result<Value, NoTokens> {
        let mut pieces = pieces(self.content, media)?;
        if self.role == "system" && !is_sglang {
            pieces.retain_mut(Piece::strip_billing_line);
        }
        let is_tool_text = self.role == "tool" && pieces.iter().all(|piece| matches!(piece, Piece::Text(_)));
        let content = match format {
            ContentFormat::Parts if is_tool_text => joined(pieces, media, false)?,
            ContentFormat::Text => joined(pieces, media, is_sglang)?,
            ContentFormat::Parts => Value::from(pieces.into_iter().map(Piece::part).collect::<Vec<Value>>()),
        };
        let mut fields = vec![("role", Value::from(self.role.as_str())), ("content", content)];
        match self.role.as_str() {
            "assistant" => {
                let calls = self.tool_calls.filter(|calls| !calls.is_empty());
                if let Some(calls) = calls {
                    let calls = calls.iter().map(tool_call).collect::<Result<Vec<_>, _>>()?;
                    fields.push(("tool_calls", Value::from(calls)));
                }
                if let Some(reasoning) = self.reasoning.or(self.reasoning_content) {
                    fields.push(("reasoning", reasoning.clone()));
                    fields.push(("reasoning_content", reasoning));
                }
            }
            "tool" => fields.extend(self.tool_call_id.map(|id| ("tool_call_id", id))),
            "developer" => fields.push(("tools", self.tools.unwrap_or(Value::from(())))),
            // Clients may use any role.
            _ => {}
        }
        fields.extend(self.name.filter(|name| name.as_str().is_some()).map(|name| ("name", name)));
        Ok(Value::from_pairs(fields))
    }
}

/// One part of a message's content.
enum Piece {
    /// A string, without a copy of the parsed one.
    Text(Value),
    Media(MediaKind),
}

impl Piece {
    /// `None` for a part that engines omit.
    fn of(part: &Value, media: MediaForm<'_>) -> Result<Option<Self>, NoTokens> {
        if part.kind() == ValueKind::String {
            return Ok(Some(Self::Text(part.clone())));
        }
        let field = |name| text_of(part, name);
        let (kind, text, refusal, thinking) = (field("type")?, field("text")?, field("refusal")?, field("thinking")?);
        match kind.as_ref().and_then(Value::as_str).ok_or(NoTokens::MULTIMODAL)? {
            "text" | "input_text" | "output_text" => Ok(text.map(Self::Text)),
            "refusal" => Ok(refusal.map(Self::Text)),
            "thinking" => Ok(thinking.map(Self::Text)),
            kind => match (MediaKind::of_part(kind), media) {
                (Some(kind), MediaForm::Accepted(_)) => Ok(Some(Self::Media(kind))),
                (Some(_) | None, _) => Err(NoTokens::MULTIMODAL),
            },
        }
    }

    /// Removes the line that Claude Code adds to its first system text. Returns whether anything else remains.
    fn strip_billing_line(&mut self) -> bool {
        let Self::Text(value) = self else { return true };
        let Some(text) = value.as_str().filter(|text| text.starts_with(BILLING_HEADER)) else { return true };
        let rest = text.split_once('\n').map_or("", |(_, rest)| rest);
        let is_empty = rest.is_empty();
        *value = Value::from(rest);
        !is_empty
    }

    fn part(self) -> Value {
        match self {
            Self::Text(text) => Value::from_pairs([("type", Value::from("text")), ("text", text)]),
            Self::Media(kind) => Value::from_pairs([("type", Value::from(kind.name()))]),
        }
    }
}

/// The pieces of a message's content.
fn pieces(content: Option<Value>, media: MediaForm<'_>) -> Result<Vec<Piece>, NoTokens> {
    let Some(content) = content else { return Ok(Vec::new()) };
    match content.kind() {
        ValueKind::String => Ok(vec![Piece::Text(content)]),
        ValueKind::Seq => {
            let parts = content.try_iter().map_err(|_| NoTokens::MALFORMED)?;
            parts.filter_map(|part| Piece::of(&part, media).transpose()).collect()
        }
        _ => Err(NoTokens::MALFORMED),
    }
}

/// A text field of a part; `None` if it is missing.
fn text_of(part: &Value, name: &str) -> Result<Option<Value>, NoTokens> {
    let value = if part.kind() == ValueKind::Map { part.get_attr(name).ok() } else { None };
    match value.ok_or(NoTokens::MALFORMED)? {
        value if value.is_none() || value.is_undefined() => Ok(None),
        value if value.kind() == ValueKind::String => Ok(Some(value)),
        _ => Err(NoTokens::MALFORMED),
    }
}

/// The content as one text: placeholders of media first, as in vLLM.
fn joined(mut pieces: Vec<Piece>, media: MediaForm<'_>, by_spaces: bool) -> Result<Value, NoTokens> {
    if let [Piece::Text(text)] = &mut pieces[..] {
        return Ok(std::mem::take(text));
    }
    let (mut lines, mut texts) = (Vec::new(), Vec::new());
    for piece in &pieces {
        match (piece, media) {
            (Piece::Text(text), _) => texts.push(text.as_str().unwrap_or_default()),
            (Piece::Media(_), MediaForm::Accepted(Some(placeholder))) => lines.push(placeholder),
            (Piece::Media(_), MediaForm::Accepted(None) | MediaForm::Rejected) => return Err(NoTokens::MULTIMODAL),
        }
    }
    lines.extend(texts);
    Ok(Value::from(lines.join(if by_spaces { " " } else { "\n" })))
}

/// A call in an earlier response, with arguments as JSON text.
fn tool_call(call: &Value) -> Result<Value, NoTokens> {
    let function = call.get_attr("function").map_err(|_| NoTokens::MALFORMED)?;
    let arguments = function.get_attr("arguments").map_err(|_| NoTokens::MALFORMED)?;
    let arguments = match arguments.as_str() {
        Some(text) if !text.is_empty() => json(text.as_bytes())?,
        Some(_) | None if !arguments.is_true() => Value::from_pairs(Vec::<(Value, Value)>::new()),
        Some(_) | None => arguments,
    };
    with(call, "function", with(&function, "arguments", arguments)?)
}

/// A tool with the field order and null fields of the engine's own types.
fn tool(tool: &Value, is_sglang: bool) -> Result<Value, NoTokens> {
    let function = tool.get_attr("function").map_err(|_| NoTokens::MALFORMED)?;
    if tool.kind() != ValueKind::Map {
        return Err(NoTokens::MALFORMED);
    }
    if function.kind() != ValueKind::Map {
        // Not a function, or the flat form of another API: unchanged.
        return Ok(tool.clone());
    }
    let function = function_of(&function, is_sglang)?;
    let tool = with(tool, "function", function)?;
    let kind = tool.get_attr("type").unwrap_or_default();
    let tool = if kind.is_undefined() { with(&tool, "type", Value::from("function"))? } else { tool };
    ordered(&tool, &["type", "function"])
}

/// The function of a tool: only known fields, in vLLM's order or in that of the client.
fn function_of(function: &Value, is_sglang: bool) -> Result<Value, NoTokens> {
    /// The fields, and whether they are null if missing.
    const FIELDS: [(&str, bool); 5] =
        [("name", true), ("description", true), ("parameters", true), ("strict", false), ("defer_loading", false)];
    let given = pairs(function)?;
    let place = |(field, _): &(&str, bool)| given.iter().position(|(key, _)| key.as_str() == Some(field));
    let mut fields = FIELDS.to_vec();
    if is_sglang {
        fields.sort_by_key(|field| place(field).unwrap_or(usize::MAX));
    }
    let fields = fields.into_iter().filter_map(|field| {
        let value = place(&field).map(|place| given[place].1.clone()).unwrap_or_default();
        let value = if value.is_undefined() { Value::from(()) } else { value };
        (field.1 || !value.is_none()).then(|| (Value::from(field.0), value))
    });
    Ok(Value::from_pairs(fields))
}

/// The map with the fields `first` at its beginning, null if missing.
fn ordered(map: &Value, first: &[&str]) -> Result<Value, NoTokens> {
    let given = pairs(map)?;
    let found = |name: &str| given.iter().find(|(key, _)| key.as_str() == Some(name)).map(|(_, value)| value.clone());
    let head = first.iter().map(|name| (Value::from(*name), found(name).unwrap_or(Value::from(()))));
    let rest = given.iter().filter(|(key, _)| key.as_str().is_none_or(|key| !first.contains(&key))).cloned();
    Ok(Value::from_pairs(head.chain(rest)))
}

/// The map with one value changed or added.
pub(super) fn with(map: &Value, name: &str, value: Value) -> Result<Value, NoTokens> {
    let mut fields = pairs(map)?;
    match fields.iter_mut().find(|(key, _)| key.as_str() == Some(name)) {
        Some(field) => field.1 = value,
        None => fields.push((Value::from(name), value)),
    }
    Ok(Value::from_pairs(fields))
}

fn pairs(map: &Value) -> Result<Vec<(Value, Value)>, NoTokens> {
    if map.kind() != ValueKind::Map {
        return Err(NoTokens::MALFORMED);
    }
    let keys = map.try_iter().map_err(|_| NoTokens::MALFORMED)?;
    keys.map(|key| map.get_item(&key).map(|value| (key, value)).map_err(|_| NoTokens::MALFORMED)).collect()
}
