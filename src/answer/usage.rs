//! Token counts that an engine reports for a request.

/// Token counts of a request as reported by the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Prompt length: `prompt_tokens` or `input_tokens`, with the cache tokens of the Messages API.
    pub prompt_tokens: Option<u32>,
    /// Output length: `completion_tokens` or `output_tokens`.
    pub output_tokens: Option<u32>,
    /// Cached prompt tokens, if the engine is configured to report them: `cached_tokens` in the details, or
    /// `cache_read_input_tokens`.
    pub cached_tokens: Option<u32>,
}
