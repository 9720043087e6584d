//! Reasons for prompts without tokens, as metric labels.
//!
//! No reason contains text of the prompt.

const ENGINE_REMEDY: &str = "set tokens.tokenizer_file (--tokenizer), or raise tokens.engine_timeout_ms";

/// Reason for routing by load alone. The parser of prompts has further ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NoTokens {
    /// Label value in metrics.
    pub(super) name: &'static str,
    /// The setting that helps, if one does.
    pub(super) remedy: Option<&'static str>,
    /// Least number of tokens of a text that exceeds the context length.
    pub(super) tokens_min: Option<u32>,
}

impl NoTokens {
    /// A message has content other than text; only the engine knows its tokens.
    pub(super) const MULTIMODAL: Self =
        Self::with("multimodal", "set tokens.tokenizer_file (--tokenizer) and tokens.media_placeholder");
    /// The client sends its own chat template.
    pub(super) const OWN_TEMPLATE: Self = Self::of("own_template");
    /// No chat template is configured.
    pub(super) const NO_TEMPLATE: Self = Self::with("no_template", "set tokens.chat_template_file (--chat-template)");
    /// The chat template rejected the conversation, failed, or exceeded its limits.
    pub(super) const TEMPLATE_ERROR: Self =
        Self::with("template_error", "compare tokens.chat_template_file with the engine's template");
    /// Messages or tools have an unknown shape.
    pub(super) const MALFORMED: Self = Self::of("malformed");
    /// The tokenizer rejected the text.
    pub(super) const TOKENIZER_ERROR: Self = Self::of("tokenizer_error");
    /// A defect: the task was lost.
    pub(super) const PANICKED: Self = Self::of("panicked");
    /// Text above the size limit.
    pub(super) const TOO_LONG: Self = Self::of("too_long");
    /// The queue is full, or the wait was too long.
    pub(super) const BUSY: Self = Self::with("busy", "raise tokens.threads or tokens.wait_ms");
    /// The engine's `/tokenize` does not support a part of the request.
    pub(super) const UNSUPPORTED: Self = Self::with("unsupported", "set tokens.tokenizer_file (--tokenizer)");
    /// No worker available.
    pub(super) const NO_WORKER: Self = Self::of("no_worker");
    /// The queried workers returned no tokens.
    pub(super) const ENGINE_FAILED: Self = Self::with("engine_failed", ENGINE_REMEDY);
    /// The engine is paused after repeated failures.
    pub(super) const ENGINE_PAUSED: Self = Self::with("engine_paused", ENGINE_REMEDY);
    /// The source of the model is `none`.
    pub(super) const OFF: Self = Self::of("off");

    /// Text longer than all tokens that the model takes.
    pub(super) const fn over_context(tokens_min: u32) -> Self {
        Self { tokens_min: Some(tokens_min), ..Self::of("over_context") }
    }

    /// A reason that no setting removes.
    pub(super) const fn of(name: &'static str) -> Self {
        Self { name, remedy: None, tokens_min: None }
    }

    const fn with(name: &'static str, remedy: &'static str) -> Self {
        Self { remedy: Some(remedy), ..Self::of(name) }
    }
}
