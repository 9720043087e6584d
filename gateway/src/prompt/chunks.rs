//! Where a text can be cut so that its parts are tokenised one by one.
//!
//! Owns the places. Promises that the tokens of the parts, one after the other, are the tokens of the whole. Leaves
//! keeping tokens to [`cache`](super::cache).
//!
//! A tokenizer first looks for added tokens that are not normalised, leftmost first and longest of those, and puts what
//! stands between them through normaliser, pre-tokeniser and model piece by piece. So nothing that stands after such a
//! token has a part in the tokens before its end. Three things would: a token that takes the spaces after it
//! (`rstrip`), which is no place to cut; a token that must stand alone as a word (`single_word`), with which nothing is
//! cut at all; and whatever a tokenizer does at a text's very beginning. For the last, a part is tokenised together with
//! the token before it, whose id is dropped.

use std::ops::Range;

use aho_corasick::{AhoCorasick, MatchKind};
use tokenizers::Tokenizer;

/// Parts are no shorter, so that short messages do not make many entries.
pub(super) const CHUNK_BYTES_MIN: usize = 512;

/// A part of a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Chunk {
    /// Where it stands.
    pub(super) at: Range<usize>,
    /// The special token that ends where it begins; `None` at the text's beginning.
    pub(super) after: Option<Mark>,
    /// Whether it ends with a special token. What does not goes on in the next turn.
    pub(super) is_closed: bool,
}

/// A special token in a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mark {
    /// Where it begins.
    pub(super) start: usize,
    /// Its token.
    pub(super) id: u32,
}

/// Cuts texts.
pub(super) struct Cutter {
    tokens: AhoCorasick,
    /// For each of them its id, where a text may be cut after it.
    cuts: Vec<Option<u32>>,
    /// The texts of those.
    marks: Vec<String>,
}

impl Cutter {
    /// `None` for a tokenizer whose texts cannot be cut.
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
        let marks = of_cuts.map(|((_, token), _)| token.content.clone()).collect();
        let contents = added.iter().map(|(_, token)| token.content.as_str());
        let tokens = AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(contents).ok()?;
        Some(Self { tokens, cuts, marks })
    }

    /// The special tokens after which a text may be cut.
    pub(super) fn marks(&self) -> &[String] {
        &self.marks
    }

    /// The text in parts of at least `bytes_min` bytes, but for the last. Each cut depends on nothing after it, so that
    /// texts with a common beginning have common first parts.
    pub(super) fn chunks(&self, text: &str, bytes_min: usize) -> Vec<Chunk> {
        let (mut chunks, mut start, mut after) = (Vec::new(), 0, None);
        for found in self.tokens.find_iter(text) {
            let Some(id) = self.cuts[found.pattern().as_usize()] else { continue };
            if found.end() - start < bytes_min {
                continue;
            }
            chunks.push(Chunk { at: start..found.end(), after, is_closed: true });
            after = Some(Mark { start: found.start(), id });
            start = found.end();
        }
        if start < text.len() {
            chunks.push(Chunk { at: start..text.len(), after, is_closed: false });
        }
        chunks
    }
}
