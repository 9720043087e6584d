//! Prompt in the client's form.

use std::ops::Range;

use axum::body::Bytes;

/// Prompt in the client's form.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClientPrompt {
    /// Token ids.
    Tokens(Vec<u32>),
    /// Text.
    Text(String),
    /// Messages for a chat template.
    Chat(Box<ChatParts>),
    /// Prompt without computable tokens, with the reason as a metric label. The request is routed by load alone.
    Opaque(&'static str),
}

/// How the engines of a model prepare a chat for its template.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChatStyle {
    /// Whether they are SGLang; else as vLLM.
    pub is_sglang: bool,
    /// Whether the template takes system messages after the first; `None` if unknown.
    pub takes_inline_system: Option<bool>,
}

impl ChatStyle {
    /// Whether the engine moves the system messages of `/v1/responses` to the beginning.
    pub(super) fn gathers_system(self) -> bool {
        self.is_sglang && self.takes_inline_system != Some(true)
    }
}

/// Inputs of a chat template, each as JSON.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChatParts {
    /// The list of messages.
    pub messages: Bytes,
    /// The list of tools.
    pub tools: Option<Bytes>,
    /// The list of documents.
    pub documents: Option<Bytes>,
    /// Further variables of the template (`chat_template_kwargs`).
    pub template_kwargs: Option<Bytes>,
    /// Template variable `reasoning_effort`, which engines pass beside `template_kwargs`.
    pub reasoning_effort: Option<Bytes>,
    /// Whether the template opens the assistant's turn. Default true.
    pub add_generation_prompt: Option<bool>,
    /// Whether the last message stays open for continuation. Default false.
    pub continue_final_message: Option<bool>,
    /// Whether the client sends its own template (`chat_template`).
    pub has_own_template: bool,
    /// Whether the engine is SGLang, which prepares messages and tools differently from vLLM.
    pub is_sglang: bool,
    /// Whether the client sends options of media processing, which affect the engine's names of media.
    pub has_media_options: bool,
}

/// Name of a media part, inserted into the part's JSON.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MediaName {
    /// Replaced bytes of [`ChatParts::messages`]; empty for an insertion.
    pub at: Range<usize>,
    /// The new JSON.
    pub json: String,
}
