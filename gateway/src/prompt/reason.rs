//! Why a prompt has no tokens.
//!
//! Owns the reasons, as metrics name them. Promises that none of them carries a part of the prompt.

/// Why a request goes by load alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoTokens {
    /// The parser found nothing to tokenise, and says why.
    Opaque(&'static str),
    /// A message has more than text, whose tokens only the engine knows.
    Multimodal,
    /// The client brings a chat template of its own.
    OwnTemplate,
    /// The model has no chat template here.
    NoTemplate,
    /// The chat template refused the conversation, failed, or did more than it may.
    TemplateError,
    /// Messages or tools are not of the shape that engines take.
    Malformed,
    /// The tokenizer refused the text.
    TokenizerError,
    /// A defect: whatever worked on it is gone.
    Panicked,
    /// More text than is tokenised here.
    TooLong,
    /// Too many prompts wait for a thread, or this one waited too long.
    Busy,
    /// The engine cannot be asked with what the request has.
    Unsupported,
    /// There is no worker to ask.
    NoWorker,
    /// The workers that were asked did not answer with tokens.
    EngineFailed,
    /// The engine failed so often that it is left alone for a while.
    EnginePaused,
    /// The model's source is `none`.
    Off,
}

impl NoTokens {
    /// As metrics call it.
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
