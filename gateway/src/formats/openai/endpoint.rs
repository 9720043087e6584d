//! Endpoints that are routed by prompt.

named! {
/// A routed endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// `/v1/chat/completions`.
    Chat = "chat",
    /// `/v1/completions`.
    Completions = "completions",
    /// `/v1/embeddings`.
    Embeddings = "embeddings",
    /// `/v1/responses`.
    Responses = "responses",
    /// `/v1/messages`, in Anthropic's format.
    Messages = "messages",
    /// `/v1/messages/count_tokens`, in Anthropic's format.
    CountTokens = "count_tokens",
    /// `/v1/rerank`.
    Rerank = "rerank",
    /// `/v1/score`.
    Score = "score",
    /// `/tokenize`.
    Tokenize = "tokenize",
    /// `/detokenize`.
    Detokenize = "detokenize",
}
}

impl Endpoint {
    /// The endpoint with this path.
    #[must_use]
    pub fn of_path(path: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|endpoint| endpoint.path() == path)
    }

    /// Path of the endpoint, at the gateway and at workers.
    #[must_use]
    pub fn path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
            Self::Embeddings => "/v1/embeddings",
            Self::Responses => "/v1/responses",
            Self::Messages => "/v1/messages",
            Self::CountTokens => "/v1/messages/count_tokens",
            Self::Rerank => "/v1/rerank",
            Self::Score => "/v1/score",
            Self::Tokenize => "/tokenize",
            Self::Detokenize => "/detokenize",
        }
    }

    /// Whether the response is a sequence of generated tokens, which can be streamed.
    #[must_use]
    pub fn generates(self) -> bool {
        matches!(self, Self::Chat | Self::Completions | Self::Responses | Self::Messages)
    }

    /// Whether a request causes work on the accelerator of an engine. Tokenization causes none.
    #[must_use]
    pub fn has_engine_work(self) -> bool {
        !matches!(self, Self::CountTokens | Self::Tokenize | Self::Detokenize)
    }

    /// Whether responses have one format at all engines, which can be validated.
    #[must_use]
    pub fn has_known_response(self) -> bool {
        !matches!(self, Self::Rerank | Self::Score | Self::Tokenize | Self::Detokenize)
    }

    /// Whether requests, responses and errors have Anthropic's format.
    #[must_use]
    pub fn is_anthropic(self) -> bool {
        matches!(self, Self::Messages | Self::CountTokens)
    }
}
