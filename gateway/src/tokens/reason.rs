//! Reasons for prompts without tokens, as metric labels.
//!
//! No reason contains text of the prompt.

/// Reason for routing by load alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoTokens {
    /// The parser found no text to tokenize, with its reason.
    Opaque(&'static str),
    /// A message has content other than text; only the engine knows its tokens.
    Multimodal,
    /// The client sends its own chat template.
    OwnTemplate,
    /// No chat template is configured.
    NoTemplate,
    /// The chat template rejected the conversation, failed, or exceeded its limits.
    TemplateError,
    /// Messages or tools have an unknown shape.
    Malformed,
    /// The tokenizer rejected the text.
    TokenizerError,
    /// A defect: the task was lost.
    Panicked,
    /// Text above the size limit.
    TooLong,
    /// The queue is full, or the wait was too long.
    Busy,
    /// The engine's `/tokenize` does not support a part of the request.
    Unsupported,
    /// No worker available.
    NoWorker,
    /// The queried workers returned no tokens.
    EngineFailed,
    /// The engine is paused after repeated failures.
    EnginePaused,
    /// The source of the model is `none`.
    Off,
}

impl NoTokens {
    /// The setting that helps, if one does.
    pub(super) fn remedy(self) -> Option<&'static str> {
        match self {
            Self::Multimodal => Some("set tokens.tokenizer_file (--tokenizer) and tokens.media_placeholder"),
            Self::NoTemplate => Some("set tokens.chat_template_file (--chat-template)"),
            Self::TemplateError => Some("compare tokens.chat_template_file with the engine's template"),
            Self::Busy => Some("raise tokens.threads"),
            Self::EngineFailed | Self::EnginePaused => {
                Some("set tokens.tokenizer_file (--tokenizer), or raise tokens.engine_timeout_ms")
            }
            Self::Unsupported => Some("set tokens.tokenizer_file (--tokenizer)"),
            _ => None,
        }
    }

    /// Label value in metrics.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Opaque(reason) => reason,
            Self::Multimodal => "multimodal",
            Self::OwnTemplate => "own_template",
            Self::NoTemplate => "no_template",
            Self::TemplateError => "template_error",
            Self::Malformed => "malformed",
            Self::TokenizerError => "tokenizer_error",
            Self::Panicked => "panicked",
            Self::TooLong => "too_long",
            Self::Busy => "busy",
            Self::Unsupported => "unsupported",
            Self::NoWorker => "no_worker",
            Self::EngineFailed => "engine_failed",
            Self::EnginePaused => "engine_paused",
            Self::Off => "off",
        }
    }
}
