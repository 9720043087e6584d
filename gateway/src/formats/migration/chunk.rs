//! Parsed fields of one event of a streamed chat or completion.

use std::borrow::Cow;

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;

/// Parsed fields of a chunk.
#[derive(Deserialize)]
pub(super) struct Chunk<'a> {
    pub(super) id: Option<&'a RawValue>,
    pub(super) created: Option<&'a RawValue>,
    pub(super) model: Option<&'a RawValue>,
    pub(super) object: Option<&'a RawValue>,
    #[serde(borrow, default)]
    pub(super) choices: Option<Vec<Choice<'a>>>,
    pub(super) usage: Option<&'a RawValue>,
    pub(super) prompt_token_ids: Option<&'a RawValue>,
    error: Option<&'a RawValue>,
}

impl Chunk<'_> {
    /// Whether the event is an error.
    pub(super) fn is_error(&self) -> bool {
        self.error.is_some() || self.object.is_some_and(|object| object.get() == "\"error\"")
    }
}

/// Parsed fields of a choice.
#[derive(Deserialize)]
pub(super) struct Choice<'a> {
    #[serde(default)]
    pub(super) index: u32,
    #[serde(borrow)]
    text: Option<Text<'a>>,
    pub(super) delta: Option<Delta<'a>>,
    pub(super) finish_reason: Option<IgnoredAny>,
    pub(super) token_ids: Option<&'a RawValue>,
    pub(super) prompt_token_ids: Option<&'a RawValue>,
}

/// Parsed fields of a delta.
#[derive(Deserialize)]
pub(super) struct Delta<'a> {
    role: Option<IgnoredAny>,
    #[serde(borrow)]
    content: Option<Text<'a>>,
    tool_calls: Option<&'a RawValue>,
    reasoning: Option<&'a RawValue>,
    reasoning_content: Option<&'a RawValue>,
    function_call: Option<&'a RawValue>,
    refusal: Option<&'a RawValue>,
    audio: Option<&'a RawValue>,
}

/// A text, copied only if it contains escapes.
#[derive(Deserialize)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

/// Usage of a response.
#[derive(Clone, Copy, Deserialize)]
pub(super) struct Usage {
    pub(super) prompt_tokens: Option<u32>,
    pub(super) completion_tokens: Option<u32>,
}

impl Choice<'_> {
    /// The text of the choice.
    pub(super) fn text(&self) -> &str {
        let content = self.delta.as_ref().and_then(|delta| delta.content.as_ref());
        self.text.as_ref().or(content).map_or("", |Text(text)| text)
    }

    /// Whether the chunk has output other than text.
    pub(super) fn has_other_output(&self) -> bool {
        let Some(delta) = &self.delta else { return false };
        let others = [
            delta.tool_calls,
            delta.reasoning,
            delta.reasoning_content,
            delta.function_call,
            delta.refusal,
            delta.audio,
        ];
        others.into_iter().flatten().any(|json| !matches!(json.get(), "[]" | "\"\""))
    }

    /// Whether the chunk only opens the message.
    pub(super) fn is_opening(&self) -> bool {
        let has_role = self.delta.as_ref().is_some_and(|delta| delta.role.is_some());
        has_role && self.text().is_empty() && !self.has_other_output() && self.finish_reason.is_none()
    }
}
