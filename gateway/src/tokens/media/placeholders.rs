//! Placeholder tokens of media in a tokenizer.
//!
//! A chat template emits one placeholder per item, and the engine expands it. The expansion is known only if it repeats
//! one token.

use tokenizers::Tokenizer;

/// Placeholders of images that engines replace by repetitions of the same token: Qwen2-VL and later, LLaVA.
const REPEATED: [&str; 2] = ["<|image_pad|>", "<image>"];

/// Tokens that show a structured expansion of `<image>` (Idefics, SmolVLM).
const STRUCTURED: [&str; 2] = ["<fake_token_around_image>", "<row_1_col_1>"];

/// Further placeholders. The engine replaces them by a sequence that also contains other tokens.
const OTHERS: &str = "<|video_pad|> <|audio_pad|> <video> <audio> <|IMAGE|> <|VIDEO|> <|AUDIO|> <|image|> \
    <|video|> <|audio|> <start_of_image> <start_of_audio> <image_soft_token> <audio_soft_token> [IMG]";

/// The placeholder tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::tokens) struct Placeholders {
    /// Placeholder of an image that the engine repeats.
    pub(super) image: Option<u32>,
    /// All placeholders.
    pub(super) all: Vec<u32>,
    /// Text of the image placeholder, for templates without parts.
    text: Option<String>,
}

impl Placeholders {
    /// The placeholders of a tokenizer. `configured` replaces the known image placeholders. `None` if the tokenizer
    /// has none.
    pub(in crate::tokens) fn of(tokenizer: &Tokenizer, configured: Option<&str>) -> Option<Self> {
        let added = tokenizer.get_added_vocabulary();
        let id = |text: &str| added.get_vocab().get(text).copied();
        let is_structured = STRUCTURED.iter().any(|text| id(text).is_some());
        let text = match configured {
            Some(text) => id(text).map(|_| text),
            None => REPEATED.into_iter().find(|text| id(text).is_some()),
        };
        let known = REPEATED.into_iter().chain(OTHERS.split(' ')).chain(text);
        let mut all: Vec<u32> = known.filter_map(id).collect();
        all.sort_unstable();
        all.dedup();
        let image = text.filter(|_| configured.is_some() || !is_structured).and_then(id);
        (!all.is_empty()).then(|| Self { image, all, text: text.map(str::to_owned) })
    }

    /// Text of the image placeholder, for templates without parts. Absent for `<|image_pad|>`, which engines surround by
    /// other tokens.
    pub(in crate::tokens) fn text(&self) -> Option<&str> {
        self.text.as_deref().filter(|text| *text != REPEATED[0])
    }
}
