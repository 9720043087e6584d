//! Cut points of a text: parts that can be tokenized independently.
//!
//! The tokens of the parts, concatenated, equal the tokens of the whole. [`cache`](super::cache) stores them.
//!
//! A tokenizer first finds added tokens that are not normalized, leftmost first and longest among those, and then
//! processes the pieces between them with normalizer, pre-tokenizer and model. Text after such a token therefore does
//! not affect the tokens before its end. There are three exceptions. A token that absorbs the following spaces
//! (`rstrip`) is no cut point. With a token that must be a separate word (`single_word`) nothing is cut. A tokenizer
//! may treat the beginning of a text specially; so a part is tokenized together with the token before it, whose id is
//! then dropped.

use std::ops::Range;

use aho_corasick::{AhoCorasick, MatchKind};
use tokenizers::Tokenizer;

/// Minimum length of a part, so that short messages do not create many entries.
pub(super) const CHUNK_BYTES_MIN: usize = 512;

/// A part of a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Chunk {
    /// Position in the text.
    pub(super) at: Range<usize>,
    /// The special token before the part; `None` at the beginning of the text.
    pub(super) after: Option<CutToken>,
    /// Whether the part ends with a special token. Other parts continue in the next turn.
    pub(super) is_closed: bool,
}

/// A special token in a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CutToken {
    /// Position of its first byte.
    pub(super) start: usize,
    /// Its token id.
    pub(super) id: u32,
}

/// Splits texts at special tokens.
pub(super) struct Cutter {
    tokens: AhoCorasick,
    /// Id per special token; `None` if no cut may follow it.
    cuts: Vec<Option<u32>>,
    /// Texts of these special tokens.
    pub(super) cut_texts: Vec<String>,
}

impl Cutter {
    /// `None` for a tokenizer without valid cut points.
    pub(super) fn of(tokenizer: &Tokenizer) -> Option<Self> {
        let added = tokenizer.get_added_tokens_decoder();
        let mut added: Vec<_> =
            added.into_iter().filter(|(_, token)| !token.normalized && !token.content.is_empty()).collect();
        added.sort_unstable_by_key(|(id, _)| *id);
        let can_be_cut = !tokenizer.get_encode_special_tokens() && !added.iter().any(|(_, token)| token.single_word);
        let cuts: Vec<_> = added.iter().map(|(id, token)| (token.special && !token.rstrip).then_some(*id)).collect();
        if !can_be_cut || cuts.iter().all(Option::is_none) {
            return None;
        }
        let of_cuts = added.iter().zip(&cuts).filter(|(_, cut)| cut.is_some());
        let cut_texts = of_cuts.map(|((_, token), _)| token.content.clone()).collect();
        let contents = added.iter().map(|(_, token)| token.content.as_str());
        let tokens = AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(contents).ok()?;
        Some(Self { tokens, cuts, cut_texts })
    }

    /// Splits the text into parts of at least `bytes_min` bytes, except the last. Each cut depends only on the text
    /// before it, so texts with a common beginning share their first parts.
    pub(super) fn chunks(&self, text: &str, bytes_min: usize) -> Vec<Chunk> {
        let (mut chunks, mut start, mut after) = (Vec::new(), 0, None);
        for found in self.tokens.find_iter(text) {
            let Some(id) = self.cuts[found.pattern().as_usize()] else { continue };
            if found.end() - start < bytes_min {
                continue;
            }
            chunks.push(Chunk { at: start..found.end(), after, is_closed: true });
            after = Some(CutToken { start: found.start(), id });
            start = found.end();
        }
        if start < text.len() {
            chunks.push(Chunk { at: start..text.len(), after, is_closed: false });
        }
        chunks
    }
}
