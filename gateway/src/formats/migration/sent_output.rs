//! Output of a stream that the client has received.

/// Output that the client has received.
#[derive(Clone, Debug, Default)]
pub struct SentOutput {
    pub(super) text: String,
    /// Ids of the tokens of the text, then of tokens without text yet.
    pub(super) ids: Vec<u32>,
    /// Length of the first part of the ids.
    pub(super) ids_sent: usize,
    /// Whether an event with text had no ids.
    pub(super) lacks_ids: bool,
    pub(super) tokens: u32,
}

impl SentOutput {
    /// The text.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Token ids of the text; `None` if not all are known.
    #[must_use]
    pub fn token_ids(&self) -> Option<&[u32]> {
        (!self.lacks_ids).then(|| &self.ids[..self.ids_sent])
    }

    /// Number of tokens: by token ids or by the engine's usage if the stream has them, otherwise the number of events.
    #[must_use]
    pub fn tokens(&self) -> u32 {
        self.tokens
    }

    pub(super) fn clear(&mut self) {
        *self = Self { tokens: self.tokens, lacks_ids: true, ..Self::default() };
    }
}
