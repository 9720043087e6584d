//! `/v1/responses`: conversion of the input to the chat that the engine renders.
//!
//! Follows `construct_input_messages` and `construct_tool_dicts` of vLLM 0.32, and `_construct_input_messages` and
//! `_response_tools_to_chat_tools` of SGLang 0.5.23. One message of an assistant can span several items. Items that the
//! engine rejects or resolves itself, such as stored ones, make the prompt opaque. Strings are copied as written, and memory
//! is about that of the input.

use std::borrow::Cow;

use axum::body::Bytes;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::client_prompt::{ChatParts, ChatStyle, ClientPrompt};
use super::error::ApiError;
use super::fields::{Fields, Given, missing};
use crate::formats::json::{each, inner, quoted};

/// Start of the text of developer messages, which SGLang renders as system messages.
const DEVELOPER_LABEL: &str = r"Developer instructions:\n";

/// Parameters of a function with one string, as which engines show a custom tool.
const CUSTOM_PARAMETERS: &str = r#"{"type":"object","properties":{"input":{"type":"string","description":"The freeform text payload for this tool."}},"required":["input"],"additionalProperties":false}"#;

/// Extracts the prompt.
pub(super) fn read(fields: &Fields<'_>, body: &Bytes, style: ChatStyle) -> Result<ClientPrompt, ApiError> {
    let has = |given: Given<'_>| given.json().is_some();
    if has(fields.previous_response_id) || has(fields.previous_input_messages) || has(fields.conversation) {
        return Ok(ClientPrompt::Opaque("stored"));
    }
    if has(fields.prompt) {
        return Ok(ClientPrompt::Opaque("stored"));
    }
    let input = fields.input.json().ok_or_else(|| missing("input"))?;
    let Ok(tools) = tools(fields.tools.json(), style) else { return Ok(ClientPrompt::Opaque("tools")) };
    let mut messages = Messages::new(style);
    if let Some(instructions) = fields.instructions.json() {
        let text = inner(instructions).ok_or_else(|| fields.instructions.wrong("a string"))?;
        if !text.is_empty() {
            messages.add("system", instructions);
        }
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
    let continues = messages.ends_open && !style.is_sglang;
    let reasoning_effort = effort(fields.reasoning, body)?;
    Ok(ClientPrompt::Chat(Box::new(ChatParts {
        messages: messages.finish(),
        tools,
        template_kwargs: fields.chat_template_kwargs.object(body)?,
        reasoning_effort,
        add_generation_prompt: continues.then_some(false),
        continue_final_message: continues.then_some(true),
        has_own_template: fields.chat_template.json().is_some(),
        is_sglang: style.is_sglang,
        ..ChatParts::default()
    })))
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

type Raw<'a> = Option<&'a RawValue>;

/// Fields of a tool.
#[derive(Deserialize)]
struct Tool<'a> {
    #[serde(borrow, rename = "type")]
    kind: Option<Cow<'a, str>>,
    name: Raw<'a>,
    description: Raw<'a>,
    parameters: Raw<'a>,
    strict: Raw<'a>,
    format: Raw<'a>,
    tools: Raw<'a>,
}

/// Tools of a chat; `None` without any. Tools that engines serve themselves, such as a web search, are not in the prompt.
fn tools(given: Option<&str>, style: ChatStyle) -> Result<Option<Bytes>, ()> {
    let Some(given) = given else { return Ok(None) };
    let mut list = String::new();
    each(given, || (), |_, tool: Tool<'_>| add_tool(&mut list, &tool, "", style))?;
    Ok(Some(list).filter(|list| !list.is_empty()).map(|list| Bytes::from(list + "]")))
}

/// Adds a tool to the growing list. `namespace` precedes its name.
fn add_tool(list: &mut String, tool: &Tool<'_>, namespace: &str, style: ChatStyle) -> Result<(), ()> {
    let text = |field: Raw<'_>| field.and_then(|field| inner(field.get()).map(str::to_owned));
    let mut description = tool.description.map(|text| text.get().to_owned());
    let parameters = match tool.kind.as_deref() {
        Some("function") => tool.parameters.map_or("null", RawValue::get),
        Some("custom") => {
            if let Some(grammar) = tool.format.filter(|_| style.is_sglang) {
                description = with_grammar(text(tool.description), grammar.get());
            }
            CUSTOM_PARAMETERS
        }
        Some("namespace") if !style.is_sglang && namespace.is_empty() => {
            let (prefix, tools) = (text(tool.name).ok_or(())? + "__", tool.tools.ok_or(())?.get());
            let is_function = |tool: &Tool<'_>| tool.kind.as_deref() == Some("function");
            let add = |_, tool: Tool<'_>| {
                if is_function(&tool) { add_tool(list, &tool, &prefix, style) } else { Ok(()) }
            };
            return each(tools, || (), add);
        }
        _ => return Ok(()),
    };
    let name = text(tool.name).ok_or(())?;
    list.push(if list.is_empty() { '[' } else { ',' });
    // SGLang states all fields, in this order.
    let stated = |value: Option<&str>, absent: &'static str| match value {
        None if style.is_sglang => Some(absent.to_owned()),
        value => value.map(str::to_owned),
    };
    let fields = [
        ("description", stated(description.as_deref(), "null")),
        ("parameters", Some(parameters.to_owned())),
        ("strict", stated(tool.strict.map(RawValue::get), "false")),
    ];
    let mut function = format!(r#"{{"name":"{namespace}{name}""#);
    for (field, value) in fields {
        function += &value.map(|value| format!(r#","{field}":{value}"#)).unwrap_or_default();
    }
    *list += &format!(r#"{{"type":"function","function":{function}}}}}"#);
    Ok(())
}

/// Description of a custom tool with the grammar of its text, as SGLang shows it.
fn with_grammar(description: Option<String>, format: &str) -> Option<String> {
    #[derive(Deserialize)]
    struct Format<'a> {
        #[serde(borrow, rename = "type")]
        kind: Cow<'a, str>,
        #[serde(borrow)]
        syntax: Option<Cow<'a, str>>,
        definition: Raw<'a>,
    }
    let mut texts: Vec<String> = description.filter(|text| !text.is_empty()).into_iter().collect();
    if let Ok(Format { kind, syntax, definition }) = serde_json::from_str::<Format<'_>>(format)
        && kind == "grammar"
    {
        let syntax = syntax.as_deref().filter(|syntax| !syntax.is_empty()).unwrap_or("lark");
        let definition = definition.and_then(|definition| inner(definition.get())).unwrap_or_default();
        texts.push(format!(r"The payload must conform to this {syntax} grammar:\n{definition}"));
    }
    (!texts.is_empty()).then(|| format!("\"{}\"", texts.join(r"\n\n")))
}

/// Fields of an input item.
#[derive(Deserialize)]
struct Item<'a> {
    #[serde(borrow, rename = "type")]
    kind: Option<Cow<'a, str>>,
    #[serde(borrow)]
    role: Option<Cow<'a, str>>,
    #[serde(borrow)]
    status: Option<Cow<'a, str>>,
    content: Raw<'a>,
    phase: Raw<'a>,
    id: Raw<'a>,
    call_id: Raw<'a>,
    name: Raw<'a>,
    namespace: Raw<'a>,
    arguments: Raw<'a>,
    input: Raw<'a>,
    output: Raw<'a>,
    summary: Raw<'a>,
    encrypted_content: Raw<'a>,
}

/// One part of the content of a message.
#[derive(Deserialize)]
struct Part<'a> {
    #[serde(borrow, rename = "type")]
    kind: Option<Cow<'a, str>>,
    text: Raw<'a>,
    image_url: Raw<'a>,
}

/// Message of an assistant that further items may complete.
#[derive(Default)]
struct Assistant {
    /// JSON.
    content: Option<String>,
    /// Text with escapes.
    reasoning: Option<String>,
    /// Growing list.
    calls: String,
    /// JSON.
    phase: Option<String>,
}

/// Chat messages as growing JSON. A list of separate small items would take many times the input size.
struct Messages {
    style: ChatStyle,
    json: String,
    /// The last message, if it is that of an assistant.
    open: Option<Assistant>,
    /// Texts of system messages that SGLang moves to the beginning, with escapes.
    system: Vec<String>,
    /// Whether the last item is a message that the model continues.
    ends_open: bool,
}

/// Reason for an opaque prompt.
type Unknown = &'static str;

impl Messages {
    fn new(style: ChatStyle) -> Self {
        Self { style, json: String::new(), open: None, system: Vec::new(), ends_open: false }
    }

    /// `content` is JSON.
    fn add(&mut self, role: &str, content: &str) {
        if role == "system" && self.style.gathers_system() {
            self.system.extend(texts_of(content));
            return;
        }
        self.close();
        self.write(&["{\"role\":\"", role, "\",\"content\":", content, "}"]);
    }

    fn write(&mut self, message: &[&str]) {
        self.json.push(if self.json.is_empty() { '[' } else { ',' });
        message.iter().for_each(|part| self.json.push_str(part));
    }

    fn add_item(&mut self, item: &Item<'_>) -> Result<(), Unknown> {
        let status = item.status.as_deref();
        self.ends_open = matches!(status, Some("in_progress" | "incomplete"))
            && matches!(item.kind.as_deref(), None | Some("message" | "reasoning"));
        let string = |field: Raw<'_>| field.map(RawValue::get).filter(|json| json.starts_with('"')).map(str::to_owned);
        match item.kind.as_deref() {
            Some("function_call") => {
                let arguments = self.arguments(item.arguments)?;
                let id = string(item.call_id).or_else(|| string(item.id).filter(|_| self.style.is_sglang));
                let name = string(item.name).ok_or("items")?;
                let name = match item.namespace.map(RawValue::get).and_then(inner).filter(|_| !self.style.is_sglang) {
                    Some(namespace) => format!("\"{namespace}__{}", &name[1..]),
                    None => name,
                };
                self.call(id.as_deref().ok_or("items")?, &name, &arguments);
            }
            Some("custom_tool_call") => {
                let input = string(item.input).unwrap_or_else(|| "\"\"".to_owned());
                let (id, name) = (string(item.call_id).ok_or("items")?, string(item.name).ok_or("items")?);
                self.call(&id, &name, &quoted(&format!("{{\"input\": {input}}}")));
            }
            Some("function_call_output" | "custom_tool_call_output") => {
                let content = self.output(item.output)?;
                self.close();
                let id = string(item.call_id).ok_or("items")?;
                self.write(&["{\"role\":\"tool\",\"tool_call_id\":", &id, ",\"content\":", &content, "}"]);
            }
            Some("reasoning") => self.reasoning(item)?,
            None | Some("message") => self.message(item)?,
            // Items of tools that the engine or the client serves itself.
            Some(_) => return Err("items"),
        }
        Ok(())
    }

    /// Arguments of a call as a JSON string. SGLang replaces those that are no object.
    fn arguments(&self, arguments: Raw<'_>) -> Result<String, Unknown> {
        let given = arguments.map(RawValue::get);
        if !self.style.is_sglang {
            return given.filter(|given| given.starts_with('"')).map(str::to_owned).ok_or("items");
        }
        let text = given.map(|given| serde_json::from_str::<String>(given).unwrap_or_else(|_| given.to_owned()));
        let object = text.filter(|text| serde_json::from_str::<serde_json::Map<_, _>>(text).is_ok());
        Ok(quoted(object.as_deref().unwrap_or("{}")))
    }

    fn call(&mut self, id: &str, name: &str, arguments: &str) {
        let calls = &mut self.assistant(|_| true).calls;
        calls.push(if calls.is_empty() { '[' } else { ',' });
        *calls += &format!(r#"{{"id":{id},"type":"function","function":{{"name":{name},"arguments":{arguments}}}}}"#);
    }

    /// Content of a tool's message. SGLang keeps the text only.
    fn output(&self, output: Raw<'_>) -> Result<String, Unknown> {
        let Some(output) = output.map(RawValue::get) else { return Ok("null".to_owned()) };
        if !output.starts_with('[') {
            return Some(output.to_owned()).filter(|text| text.starts_with('"')).ok_or("items");
        }
        if self.style.is_sglang { Ok(format!("\"{}\"", texts_of(output).concat())) } else { parts(output) }
    }

    fn reasoning(&mut self, item: &Item<'_>) -> Result<(), Unknown> {
        let of = |list: Raw<'_>| texts_of(list.map_or("[]", RawValue::get));
        let (content, summary) = (of(item.content), of(item.summary));
        let encrypted = item.encrypted_content.and_then(|text| inner(text.get())).unwrap_or_default();
        if !self.style.is_sglang {
            // The engine rejects it.
            if !encrypted.is_empty() {
                return Err("items");
            }
            let text = content.into_iter().next().or_else(|| summary.into_iter().next()).unwrap_or_default();
            self.assistant(|open| open.reasoning.is_none()).reasoning = Some(text);
            return Ok(());
        }
        let texts =
            [summary, content].map(|texts| texts.into_iter().filter(|text| !text.is_empty()).collect::<Vec<_>>());
        let Some(texts) = texts.iter().find(|texts| !texts.is_empty()) else {
            // SGLang decodes its own encoding of the text and drops all others.
            return if encrypted.starts_with("sglang-reasoning-v1.") { Err("items") } else { Ok(()) };
        };
        let (text, open) = (texts.join(r"\n"), self.assistant(|open| open.phase.is_none()));
        open.reasoning =
            Some(open.reasoning.take().map_or_else(|| text.clone(), |before| [&before, r"\n", &text].concat()));
        Ok(())
    }

    fn message(&mut self, item: &Item<'_>) -> Result<(), Unknown> {
        let content = item.content.map(RawValue::get).ok_or("items")?;
        match item.role.as_deref() {
            Some("assistant") => return self.text(content, item.phase.map(RawValue::get)),
            Some(role @ ("user" | "system" | "developer")) => {
                let content = if content.starts_with('[') { parts(content)? } else { content.to_owned() };
                if !content.starts_with(['"', '[']) {
                    return Err("items");
                }
                match role {
                    "developer" if self.style.is_sglang => self.add("system", &labelled(&content)),
                    role => self.add(role, &content),
                }
            }
            Some(_) | None => return Err("items"),
        }
        Ok(())
    }

    /// Text of an assistant. vLLM takes the first part of a list.
    fn text(&mut self, content: &str, phase: Option<&str>) -> Result<(), Unknown> {
        let is_list = content.starts_with('[');
        if self.style.is_sglang {
            let content = if is_list { parts(content)? } else { content.to_owned() };
            let is_of_phase = |open: &Assistant| {
                let is_reasoning = open.content.is_none() && open.calls.is_empty() && open.reasoning.is_some();
                open.phase.as_deref() == phase || is_reasoning && open.phase.is_none()
            };
            let open = self.assistant(is_of_phase);
            open.phase = phase.map(str::to_owned).or(open.phase.take());
            open.content = Some(match open.content.take().filter(|before| before != "\"\"") {
                Some(before) if content != "\"\"" => merged(&before, &content),
                Some(before) => before,
                None => content,
            });
            return Ok(());
        }
        let text = match inner(content) {
            Some(_) => content.to_owned(),
            None if is_list => format!("\"{}\"", texts_of(content).into_iter().next().ok_or("items")?),
            None => return Err("items"),
        };
        self.assistant(|open| open.content.is_none()).content = Some(text);
        Ok(())
    }

    /// The message of the assistant that an item completes, a new one unless the last one `fits`.
    fn assistant(&mut self, fits: impl Fn(&Assistant) -> bool) -> &mut Assistant {
        if !self.open.as_ref().is_some_and(fits) {
            self.close();
        }
        self.open.get_or_insert_default()
    }

    /// Writes the message of the assistant.
    fn close(&mut self) {
        let Some(Assistant { content, reasoning, calls, phase }) = self.open.take() else { return };
        let mut message = "{\"role\":\"assistant\"".to_owned();
        if let Some(text) = reasoning {
            // vLLM reads the first name, SGLang the second.
            message += &format!(r#","reasoning":"{text}","reasoning_content":"{text}""#);
        }
        for (name, value) in [("content", content), ("phase", phase.filter(|_| self.style.is_sglang))] {
            message += &value.map(|value| format!(r#","{name}":{value}"#)).unwrap_or_default();
        }
        if !calls.is_empty() {
            message += &format!(r#","tool_calls":{calls}]"#);
        }
        self.write(&[&message, "}"]);
    }

    fn finish(mut self) -> Bytes {
        self.close();
        if self.json.is_empty() {
            self.json.push('[');
        }
        if !self.system.is_empty() {
            let comma = if self.json.len() > 1 { "," } else { "" };
            let text = self.system.join(r"\n\n");
            self.json.insert_str(1, &format!(r#"{{"role":"system","content":"{text}"}}{comma}"#));
        }
        self.json.push(']');
        Bytes::from(self.json)
    }
}

/// Texts of a string or of the parts of a list, with escapes.
fn texts_of(content: &str) -> Vec<String> {
    if let Some(text) = inner(content) {
        return vec![text.to_owned()];
    }
    let mut texts = Vec::new();
    let _ = each(content, <()>::default, |_, part: Part<'_>| {
        texts.extend(part.text.and_then(|text| inner(text.get())).map(str::to_owned));
        Ok(())
    });
    texts
}

/// Content parts of a chat for those of a message.
fn parts(content: &str) -> Result<String, Unknown> {
    let mut json = "[".to_owned();
    // Content that is not a list of parts is unknown.
    each(
        content,
        || "items",
        |_, raw: &RawValue| {
            let part: Part<'_> = serde_json::from_str(raw.get()).map_err(|_| "items")?;
            let string = |field: Raw<'_>| field.map(RawValue::get).and_then(inner).map(str::to_owned);
            if json.len() > 1 {
                json.push(',');
            }
            match part.kind.as_deref() {
                Some("input_text" | "output_text" | "text") => {
                    json += &format!(r#"{{"type":"text","text":"{}"}}"#, string(part.text).ok_or("items")?);
                }
                Some("input_image" | "image_url") if string(part.image_url).is_some() => {
                    let url = string(part.image_url).unwrap_or_default();
                    json += &format!(r#"{{"type":"image_url","image_url":{{"url":"{url}"}}}}"#);
                }
                // The form of chats.
                Some("image_url" | "input_audio" | "audio_url" | "video_url") => json.push_str(raw.get()),
                Some("input_image" | "input_file" | "input_video") => return Err("multimodal"),
                Some(_) | None => return Err("items"),
            }
            Ok(())
        },
    )?;
    json.push(']');
    Ok(json)
}

/// Content of a developer message with SGLang's label in its first text.
fn labelled(content: &str) -> String {
    const TEXT: &str = r#"{"type":"text","text":""#;
    match content.find(TEXT).filter(|_| content.starts_with('[')) {
        Some(at) => {
            let at = at + TEXT.len();
            [&content[..at], DEVELOPER_LABEL, &content[at..]].concat()
        }
        None if content.starts_with('"') => ["\"", DEVELOPER_LABEL, &content[1..]].concat(),
        None => content.to_owned(),
    }
}

/// Contents of two messages as that of one, as in SGLang.
fn merged(before: &str, after: &str) -> String {
    if let (Some(before), Some(after)) = (inner(before), inner(after)) {
        return format!(r#""{before}\n\n{after}""#);
    }
    let parts = |content: &str| match inner(content) {
        Some(text) => format!(r#"{{"type":"text","text":"{text}"}}"#),
        None => content[1..content.len() - 1].to_owned(),
    };
    let parts = [parts(before), parts(after)];
    format!("[{}]", parts.iter().filter(|parts| !parts.is_empty()).cloned().collect::<Vec<_>>().join(","))
}
