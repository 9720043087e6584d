//! Ids of a text by byte-level BPE, equal to those of the tokenizer and about ten times cheaper.
//!
//! The steps are those of the tokenizer, with its own patterns and model: added tokens, normalizer, added tokens with
//! normalized text, patterns, model. The tokenizer keeps the position of every character through all steps, which is
//! most of its cost. Here frequent words come from a small cache. [`Words::of`] compares each file with the tokenizer;
//! other kinds have no such form.

use std::borrow::Cow;

use ahash::RandomState;
use aho_corasick::{AhoCorasick, MatchKind};
use parking_lot::Mutex;
use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::split::SplitPattern;
use tokenizers::utils::SysRegex;
use tokenizers::{
    AddedToken, Model as _, ModelWrapper, NormalizedString, Normalizer as _, NormalizerWrapper, PreTokenizerWrapper,
    Result, SplitDelimiterBehavior, Tokenizer,
};

use super::ascii::{Ascii, GPT_2};

/// Slots of a cache of words: 512 KiB.
const WORDS: usize = 1 << 14;

/// Text that is compared at the start.
const COMPARED: &str = "Dr. O'Neil isn't sure: we'LL pay $1,234.50 (12345678 + 9)…  \n\n\tfn main() { let x_y = [0u8; 16]; }\r\n  \
    é e\u{301} \u{1e0b}\u{323} q\u{323}\u{307} ＡＢ ﬁ ½ ² Å \u{212b} 東京タワー ガ \u{30ab}\u{3099} 안녕하세요 \u{1112}\u{1161}\u{11ab} \
    Привет, мир! Ελληνικά שָׁלוֹם مرحبا नमस्ते ไทย 🙂👩‍👩‍👧 \u{200d}\u{feff}\u{a0}\u{2028}\u{3000}\u{0} https://x.org/a?b=c&d=%20 \
    <|x|> </s> ▁a   b        c\t\td\n \n  \n";

/// Added tokens in this text.
const COMPARED_TOKENS_MAX: usize = 64;

/// See the module documentation.
pub(super) struct Words {
    /// Added tokens in the text, and those in the normalized text.
    added: [Added; 2],
    /// Each pattern divides the pieces of the pattern before it.
    patterns: Vec<Pattern>,
    /// The characters of the bytes in the vocabulary.
    chars: [char; 256],
    seeds: [u64; 2],
    /// Caches of words, one for each call at the same time.
    known: Mutex<Vec<Vec<Word>>>,
}

struct Pattern {
    regex: SysRegex,
    /// Present for a common pattern.
    ascii: Option<Ascii>,
}

/// Added tokens, found as by the tokenizer: leftmost first, and longest among those.
struct Added {
    texts: AhoCorasick,
    ids: Vec<u32>,
}

/// A word with at most 3 ids.
#[derive(Clone, Copy, Default)]
struct Word {
    key: u128,
    ids: [u32; 3],
    count: u32,
}

/// One call.
struct Run<'a> {
    tokenizer: &'a Tokenizer,
    model: &'a BPE,
    known: Vec<Word>,
    /// A word in the characters of the vocabulary.
    mapped: String,
    ids: Vec<u32>,
}

impl Words {
    /// `None` for a tokenizer of another kind, or if a sample has other ids.
    pub(super) fn of(tokenizer: &Tokenizer) -> Option<Self> {
        let ModelWrapper::BPE(BPE { dropout: None, .. }) = tokenizer.get_model() else { return None };
        let mut added: Vec<_> = tokenizer.get_added_tokens_decoder().into_iter().collect();
        added.sort_unstable_by_key(|(id, _)| *id);
        let is_plain = |token: &AddedToken| !token.single_word && !token.lstrip && !token.rstrip;
        if tokenizer.get_encode_special_tokens() || !added.iter().all(|(_, token)| is_plain(token)) {
            return None;
        }
        let words = Self {
            added: [Added::of(tokenizer, &added, false)?, Added::of(tokenizer, &added, true)?],
            patterns: patterns(tokenizer.get_pre_tokenizer()?)?,
            chars: std::array::from_fn(|byte| char_of(byte as u8)),
            seeds: [0, 1].map(|n| RandomState::new().hash_one(n)),
            known: Mutex::default(),
        };
        let around = |(_, token): &(u32, AddedToken)| format!("{0} a{0}\u{301}b{0}{0} ", token.content);
        let text: String =
            [COMPARED.to_owned()].into_iter().chain(added.iter().take(COMPARED_TOKENS_MAX).map(around)).collect();
        let expected = tokenizer.encode_fast(text.as_str(), false).ok()?;
        // The second time from the cache.
        let is_equal = || words.encode(tokenizer, &text).is_ok_and(|ids| ids == expected.get_ids());
        (is_equal() && is_equal()).then_some(words)
    }

    /// Ids of a text without those around it.
    ///
    /// # Errors
    /// An error of the model.
    pub(super) fn encode(&self, tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>> {
        let ModelWrapper::BPE(model) = tokenizer.get_model() else { return Ok(Vec::new()) };
        let known = self.known.lock().pop().unwrap_or_else(|| vec![Word::default(); WORDS]);
        let ids = Vec::with_capacity(text.len() / 4 + 1);
        let mut run = Run { tokenizer, model, known, mapped: String::new(), ids };
        let encoded = self.added[0].split(text, &mut run, |run, piece| {
            let normalized = normalized(run.tokenizer, piece)?;
            self.added[1].split(&normalized, run, |run, piece| self.divide(&self.patterns, run, piece))
        });
        self.known.lock().push(run.known);
        encoded.map(|()| run.ids)
    }

    fn divide(&self, patterns: &[Pattern], run: &mut Run<'_>, piece: &str) -> Result<()> {
        let Some((Pattern { regex, ascii }, rest)) = patterns.split_first() else { return self.word(run, piece) };
        let mut start = 0;
        if let Some(ascii) = ascii {
            while start < piece.len() {
                let next = || regex.find_iter(&piece[start..]).next().map_or(piece.len(), |(_, to)| start + to);
                let end = ascii.end(piece.as_bytes(), start).unwrap_or_else(next);
                self.divide(rest, run, &piece[start..end])?;
                start = end;
            }
            return Ok(());
        }
        for (from, to) in regex.find_iter(piece) {
            // Text between the matches is a piece as well.
            if start < from {
                self.divide(rest, run, &piece[start..from])?;
            }
            self.divide(rest, run, &piece[from..to])?;
            start = to;
        }
        if start < piece.len() { self.divide(rest, run, &piece[start..]) } else { Ok(()) }
    }

    fn word(&self, run: &mut Run<'_>, word: &str) -> Result<()> {
        let key = key(word.as_bytes());
        let slot = key.map_or(0, |key| self.slot(key));
        if let Some(Word { ids, count, .. }) = run.known.get(slot).filter(|known| Some(known.key) == key) {
            run.ids.extend(ids.iter().take(*count as usize));
            return Ok(());
        }
        run.mapped.clear();
        run.mapped.extend(word.bytes().map(|byte| self.chars[usize::from(byte)]));
        let tokens = run.model.tokenize(&run.mapped)?;
        run.ids.extend(tokens.iter().map(|token| token.id));
        if let (Some(key), 0..=3) = (key, tokens.len()) {
            let mut ids = [0; 3];
            ids.iter_mut().zip(&tokens).for_each(|(id, token)| *id = token.id);
            run.known[slot] = Word { key, ids, count: tokens.len() as u32 };
        }
        Ok(())
    }

    fn slot(&self, key: u128) -> usize {
        let [low, high] = [key as u64 ^ self.seeds[0], (key >> 64) as u64 ^ self.seeds[1]].map(u128::from);
        let product = low * high;
        (product ^ (product >> 64)) as usize % WORDS
    }
}

/// Text of a word of at most 15 bytes, and its length.
fn key(word: &[u8]) -> Option<u128> {
    let text = || word.iter().fold(0, |text, byte| (text << 8) | u128::from(*byte));
    (word.len() < 16).then(|| (text() << 8) | word.len() as u128)
}

impl Added {
    /// Those tokens that are found in the normalized text, or those that are found before.
    fn of(tokenizer: &Tokenizer, added: &[(u32, AddedToken)], is_normalized: bool) -> Option<Self> {
        let added = added.iter().filter(|(_, token)| token.normalized == is_normalized);
        let text = |token: &AddedToken| match is_normalized {
            true => normalized(tokenizer, &token.content).ok().map(Cow::into_owned),
            false => Some(token.content.clone()),
        };
        let texts: Vec<String> = added.clone().map(|(_, token)| text(token)).collect::<Option<_>>()?;
        let is_empty = texts.iter().any(String::is_empty);
        let texts = AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(texts).ok()?;
        Some(Self { texts, ids: added.map(|(id, _)| *id).collect() }).filter(|_| !is_empty)
    }

    /// Appends the ids of the added tokens, and calls `each` for the text between them.
    fn split<'a>(
        &self,
        text: &str,
        run: &mut Run<'a>,
        mut each: impl FnMut(&mut Run<'a>, &str) -> Result<()>,
    ) -> Result<()> {
        let mut start = 0;
        // Without patterns the search would still read every byte.
        let found = (!self.ids.is_empty()).then(|| self.texts.find_iter(text));
        for found in found.into_iter().flatten() {
            if start < found.start() {
                each(run, &text[start..found.start()])?;
            }
            run.ids.push(self.ids[found.pattern().as_usize()]);
            start = found.end();
        }
        if start < text.len() { each(run, &text[start..]) } else { Ok(()) }
    }
}

impl Pattern {
    fn of(pattern: &str) -> Option<Self> {
        Some(Self { regex: SysRegex::new(pattern).ok()?, ascii: Ascii::of(pattern) })
    }
}

/// The patterns of a byte-level pre-tokenizer.
fn patterns(step: &PreTokenizerWrapper) -> Option<Vec<Pattern>> {
    let steps = match step {
        PreTokenizerWrapper::Sequence(steps) => steps.as_ref(),
        step => std::slice::from_ref(step),
    };
    let Some((PreTokenizerWrapper::ByteLevel(bytes), steps)) = steps.split_last() else { return None };
    let pattern = |step: &PreTokenizerWrapper| match step {
        PreTokenizerWrapper::Split(split) if split.behavior == SplitDelimiterBehavior::Isolated => {
            match &split.pattern {
                SplitPattern::Regex(pattern) => Pattern::of(pattern),
                SplitPattern::String(_) => None,
            }
        }
        _ => None,
    };
    let of_bytes = bytes.use_regex.then(|| Pattern::of(GPT_2));
    let patterns = steps.iter().map(pattern).chain(of_bytes).collect::<Option<_>>();
    patterns.filter(|_| !bytes.add_prefix_space)
}

fn normalized<'a>(tokenizer: &Tokenizer, piece: &'a str) -> Result<Cow<'a, str>> {
    match tokenizer.get_normalizer() {
        None => Ok(Cow::Borrowed(piece)),
        Some(NormalizerWrapper::NFC(_)) if piece.is_ascii() || piece.chars().all(is_composed) => {
            Ok(Cow::Borrowed(piece))
        }
        Some(normalizer) => {
            let mut text = NormalizedString::from(piece);
            normalizer.normalize(&mut text)?;
            Ok(Cow::Owned(text.get().to_owned()))
        }
    }
}

/// Whether NFC leaves the character unchanged between such characters: Latin, Cyrillic, punctuation, kana, CJK and Hangul.
fn is_composed(char: char) -> bool {
    matches!(char, '\0'..='\u{2ff}' | '\u{400}'..='\u{482}' | '\u{2010}'..='\u{2027}' | '\u{2030}'..='\u{205e}'
        | '\u{3001}'..='\u{3029}' | '\u{3041}'..='\u{3096}' | '\u{30a0}'..='\u{30ff}' | '\u{3400}'..='\u{4db5}'
        | '\u{4e00}'..='\u{9fa5}' | '\u{ac00}'..='\u{d7a3}' | '\u{ff01}'..='\u{ff5e}')
}

/// Printable bytes are themselves, the others follow each other from 256.
fn char_of(byte: u8) -> char {
    let is_printable = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if is_printable(&byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|byte| !is_printable(byte)).count();
    char::from_u32(256 + before as u32).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use tokenizers::normalizers::NFC;

    use super::*;

    #[test]
    fn composed_characters_stay_with_any_neighbour() {
        let composed: Vec<char> = ('\0'..=char::MAX).filter(|char| is_composed(*char)).collect();
        let nfc = |text: &str| {
            let mut normalized = NormalizedString::from(text);
            NFC.normalize(&mut normalized).unwrap();
            normalized.get().to_owned()
        };
        let all: String = composed.iter().collect();
        assert_eq!(nfc(&all), all);
        // Each beside characters of all ranges.
        let some: Vec<char> = composed.iter().copied().step_by(701).collect();
        let pairs: String = composed.iter().step_by(7).flat_map(|a| some.iter().flat_map(|b| [*a, *b])).collect();
        assert_eq!(nfc(&pairs), pairs);
    }

    #[test]
    fn the_alphabet_is_that_of_byte_level_tokenizers() {
        use tokenizers::pre_tokenizers::byte_level::ByteLevel;
        let chars: Vec<char> = (0..=255).map(char_of).collect();
        assert!(chars.iter().all(|char| ByteLevel::alphabet().contains(char)));
        assert_eq!((chars[0], chars[32], chars[255], chars[173]), ('\u{100}', 'Ġ', 'ÿ', '\u{143}'));
    }
}
