//! Chat templates: Jinja with the environment of `apply_chat_template` in Hugging Face's transformers.
//!
//! Renders the same text as transformers, with limits on steps, depth and output. [`chat`](super::chat) prepares
//! messages and [`local`](super::local) tokenizes.

use std::io;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Kwargs;
use minijinja::{Environment, Error, ErrorKind, Value};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde_json::json;

use super::chat::{self, Chat, MediaForm, PROMPT_BYTES_MAX};
use super::format::ContentFormat;
use super::python::{strftime, tojson};
use super::reason::NoTokens;
use crate::formats::openai::ChatParts;

/// Step limit of one rendering; ten thousand messages take about a million steps.
const FUEL: u64 = 4_000_000;

/// Limit of the product of messages and their bytes. Some templates append each system message to a text and copy that
/// text each time, which the step limit does not count. Ten thousand messages with 400 KiB in all are within the limit.
const MESSAGE_BYTES_PRODUCT_MAX: u64 = 1 << 32;

/// Depth limit of one rendering; templates are flat, with macros two or three deep.
const DEPTH_MAX: usize = 128;

/// Marks the end of the final message during rendering, to find the position for a continuation. Its trailing space
/// shows whether the template trims.
const END_MARK: &str = "<<pointsman: the final message ends here>> ";

/// Time in seconds since 1970, for templates with the current date.
pub(super) type Clock = fn() -> u64;

/// Template sources of a model, from its files.
#[derive(Default)]
pub(super) struct TemplateSources {
    /// For conversations without a special template.
    pub(super) default: Option<String>,
    /// For conversations with tools.
    pub(super) tool_use: Option<String>,
    /// `bos_token` and similar variables.
    pub(super) special_tokens: Vec<(String, Value)>,
}

/// Compiled templates.
pub(super) struct Templates {
    default: Option<Template>,
    tool_use: Option<Template>,
    special_tokens: Vec<(Value, Value)>,
}

struct Template {
    env: Environment<'static>,
    format: ContentFormat,
}

impl Templates {
    pub(super) fn compile(sources: TemplateSources, clock: Clock) -> Result<Self, Error> {
        let compiled = |source: Option<String>| source.map(|source| Template::compile(&source, clock)).transpose();
        Ok(Self {
            default: compiled(sources.default)?,
            tool_use: compiled(sources.tool_use)?,
            special_tokens: sources.special_tokens.into_iter().map(|(name, text)| (Value::from(name), text)).collect(),
        })
    }

    /// Whether no template is present.
    pub(super) fn is_empty(&self) -> bool {
        self.default.is_none() && self.tool_use.is_none()
    }

    /// Renders the conversation.
    pub(super) fn render(&self, parts: &ChatParts, media: MediaForm<'_>) -> Result<String, NoTokens> {
        chat::refused(parts)?;
        let template = self.template_for(parts)?;
        let chat = chat::read(parts, template.format, media)?;
        if (chat.messages.len() * chat.bytes) as u64 > MESSAGE_BYTES_PRODUCT_MAX {
            return Err(NoTokens::TOO_LONG);
        }
        if chat.continue_final_message { self.continued(template, chat) } else { self.rendered(template, chat) }
    }

    /// Whether all templates render a system message between turns.
    pub(super) fn take_inline_system(&self) -> bool {
        const TEXT: &str = "a system message between turns";
        let messages = json!([
            { "role": "system", "content": "." },
            { "role": "user", "content": "." },
            { "role": "system", "content": TEXT },
            { "role": "user", "content": "." },
        ]);
        let parts = ChatParts { messages: messages.to_string().into(), ..ChatParts::default() };
        [&self.default, &self.tool_use].into_iter().flatten().all(|template| {
            let chat = chat::read(&parts, template.format, MediaForm::Rejected);
            chat.and_then(|chat| self.rendered(template, chat)).is_ok_and(|text| text.contains(TEXT))
        })
    }

    /// Content format of the template for the conversation.
    pub(super) fn format_for(&self, parts: &ChatParts) -> Result<ContentFormat, NoTokens> {
        self.template_for(parts).map(|template| template.format)
    }

    fn template_for(&self, parts: &ChatParts) -> Result<&Template, NoTokens> {
        let special = self.tool_use.as_ref().filter(|_| chat::has_tools(parts));
        special.or(self.default.as_ref()).ok_or(NoTokens::NO_TEMPLATE)
    }

    fn rendered(&self, template: &Template, chat: Chat) -> Result<String, NoTokens> {
        let given = [
            ("messages", Value::from(chat.messages)),
            ("tools", chat.tools),
            ("documents", chat.documents),
            ("add_generation_prompt", Value::from(chat.add_generation_prompt)),
        ];
        let given = given.into_iter().map(|(name, value)| (Value::from(name), value));
        // Later values override: the client's variables override special tokens, and the request's own fields override
        // both.
        let all = self.special_tokens.iter().cloned().chain(chat.variables).chain(given);
        template.render(Value::from_pairs(all), chat.bytes)
    }

    /// Renders up to the end of the final message's text.
    fn continued(&self, template: &Template, mut chat: Chat) -> Result<String, NoTokens> {
        if chat.add_generation_prompt {
            return Err(NoTokens::TEMPLATE_ERROR);
        }
        let last = chat.messages.pop().ok_or(NoTokens::TEMPLATE_ERROR)?;
        let (last, text) = marked(&last).ok_or(NoTokens::TEMPLATE_ERROR)?;
        chat.messages.push(last);
        let mut rendered = self.rendered(template, chat)?;
        let at = rendered.rfind(END_MARK.trim_end()).ok_or(NoTokens::TEMPLATE_ERROR)?;
        if !rendered.contains(text.trim()) {
            return Err(NoTokens::TEMPLATE_ERROR);
        }
        let keeps_spaces = rendered[at..].starts_with(END_MARK);
        rendered.truncate(at);
        if !keeps_spaces {
            rendered.truncate(rendered.trim_end().len());
        }
        Ok(rendered)
    }
}

/// The message with the mark after its last text, and that text.
fn marked(message: &Value) -> Option<(Value, String)> {
    let content = message.get_attr("content").ok()?;
    let (content, text) = match content.as_str() {
        Some(text) => (Value::from(format!("{text}{END_MARK}")), text.to_owned()),
        None => {
            let mut parts: Vec<Value> = content.try_iter().ok()?.collect();
            let text = parts.pop()?.get_attr("text").ok()?.as_str()?.to_owned();
            parts.push(Value::from_pairs([("type", "text".to_owned()), ("text", format!("{text}{END_MARK}"))]));
            (Value::from(parts), text)
        }
    };
    Some((chat::with(message, "content", content).ok()?, text))
}

impl Template {
    fn compile(source: &str, clock: Clock) -> Result<Self, Error> {
        let mut env = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        env.set_syntax(syntax?);
        env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        env.set_unknown_method_callback(unknown_method_callback);
        env.set_fuel(Some(FUEL));
        env.set_recursion_limit(DEPTH_MAX);
        env.set_debug(false);
        env.add_filter("tojson", tojson);
        env.add_function("raise_exception", |message: Option<String>, _: Kwargs| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message.unwrap_or_default()))
        });
        env.add_function("strftime_now", move |format: String| strftime(&format, clock()));
        env.add_template_owned("chat", without_generation_tags(source))?;
        Ok(Self { env, format: ContentFormat::of(source) })
    }

    /// Renders a text of about this many bytes.
    fn render(&self, variables: Value, bytes: usize) -> Result<String, NoTokens> {
        let template = self.env.get_template("chat").expect("the constructor added this template");
        let mut out = Bounded { bytes: Vec::with_capacity(bytes), is_full: false };
        // The error may quote the conversation, so it is counted but not logged.
        let failed = template.render_captured_to(variables, &mut out).is_err();
        if out.is_full {
            return Err(NoTokens::TOO_LONG);
        }
        if failed {
            return Err(NoTokens::TEMPLATE_ERROR);
        }
        String::from_utf8(out.bytes).map_err(|_| NoTokens::TEMPLATE_ERROR)
    }
}

/// Output with a size limit.
struct Bounded {
    bytes: Vec<u8>,
    is_full: bool,
}

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + bytes.len() > PROMPT_BYTES_MAX {
            self.is_full = true;
            return Err(io::Error::other("the rendered conversation is too long"));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Replaces `{% generation %}` blocks, which only mark training data, by unconditional blocks, to preserve the
/// whitespace handling of their tags.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at + 2);
        out.push_str(before);
        let Some(end) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let inside = &tag[..end];
        match inside.trim_matches(['-', '+']).trim() {
            "generation" => out.push_str(&inside.replace("generation", "if true")),
            "endgeneration" => out.push_str(&inside.replace("endgeneration", "endif")),
            _ => out.push_str(inside),
        }
        rest = &tag[end..];
    }
    out.push_str(rest);
    out
}
