//! Toy tokenizer without a model or tables, equal on every platform.
//!
//! The tokens of a text are a prefix of the tokens of any longer text, except for the last piece, which may grow. The
//! text of generated tokens gives the same tokens again. Therefore the next turn of a conversation finds the blocks of
//! the previous turn in the cache. The tokenizer does not reproduce a real vocabulary.
//!
//! A text is split into pieces: a word with the one space before it, in parts of at most [`PIECE_BYTES_MAX`] bytes, and
//! every other whitespace character on its own. A piece is one token, its FNV-1a hash reduced to [`VOCABULARY_BITS`]. A
//! piece like ` t42`, the text of token 42, is token 42.

/// Maximum size of a piece in bytes; longer words are several tokens.
const PIECE_BYTES_MAX: usize = 8;

/// Hashed tokens are below 2 to this power: 131,072, a common vocabulary size.
const VOCABULARY_BITS: u32 = 17;

/// Tokenizes a text.
///
/// ```
/// use pointsman_trial::mock::{detokenize, tokenize};
///
/// assert_eq!(tokenize("One two\nthree").len(), 4);
/// assert_eq!(tokenize(&detokenize(&[7, 4_000_000_000])), [7, 4_000_000_000]);
/// ```
#[must_use]
pub fn tokenize(text: &str) -> Vec<u32> {
    let mut tokens = Vec::with_capacity(text.len() / 4);
    let mut rest = text;
    while let Some(end) = piece_end(rest) {
        let (piece, behind) = rest.split_at(end);
        match spelled_out(piece) {
            Some(token) => tokens.push(token),
            None => cut(piece, &mut tokens),
        }
        rest = behind;
    }
    tokens
}

/// Text of tokens.
#[must_use]
pub fn detokenize(tokens: &[u32]) -> String {
    tokens.iter().map(|token| format!(" t{token}")).collect()
}

/// Text of a chat: each message's role and content on separate lines, then the role of the answer.
///
/// ```
/// use pointsman_trial::mock::chat_text;
///
/// assert_eq!(chat_text([("user", "Hello.")]), "user\nHello.\nassistant\n");
/// ```
pub fn chat_text<'a>(messages: impl IntoIterator<Item = (&'a str, &'a str)>) -> String {
    let mut text = String::new();
    for (role, content) in messages {
        text.extend([role, "\n", content, "\n"]);
    }
    text + "assistant\n"
}

/// End of the first piece; none for an empty text.
fn piece_end(text: &str) -> Option<usize> {
    let first = text.chars().next()?;
    let word_at = match (first, text[first.len_utf8()..].chars().next()) {
        (' ', Some(next)) if !next.is_whitespace() => 1,
        (first, _) if first.is_whitespace() => return Some(first.len_utf8()),
        _ => 0,
    };
    Some(text[word_at..].find(char::is_whitespace).map_or(text.len(), |len| word_at + len))
}

/// The token that a piece spells, only in the exact form that [`detokenize`] writes.
fn spelled_out(piece: &str) -> Option<u32> {
    let digits = piece.strip_prefix(" t")?;
    let is_canonical = digits == "0" || digits.starts_with(|c: char| matches!(c, '1'..='9'));
    if is_canonical { digits.parse().ok() } else { None }
}

/// Splits a word into tokens of at most [`PIECE_BYTES_MAX`] bytes.
fn cut(mut word: &str, tokens: &mut Vec<u32>) {
    while !word.is_empty() {
        let end = (0..=PIECE_BYTES_MAX.min(word.len())).rev().find(|at| word.is_char_boundary(*at)).unwrap_or(0);
        let (piece, rest) = word.split_at(end);
        tokens.push(hashed(piece));
        word = rest;
    }
}

fn hashed(piece: &str) -> u32 {
    let hash = piece.bytes().fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    (hash ^ (hash >> VOCABULARY_BITS)) & ((1 << VOCABULARY_BITS) - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_words_with_a_leading_space_or_single_whitespace() {
        let pieces = |mut text: &'static str| {
            let mut pieces = Vec::new();
            while let Some(end) = piece_end(text) {
                pieces.push(&text[..end]);
                text = &text[end..];
            }
            pieces
        };
        assert_eq!(pieces("user\n a  b\n"), ["user", "\n", " a", " ", " b", "\n"]);
        assert_eq!(pieces(" "), [" "]);
        assert!(pieces("").is_empty());
    }

    #[test]
    fn long_words_are_split_at_character_boundaries() {
        assert_eq!(tokenize("abcdefghijkl").len(), 2);
        assert_eq!(tokenize("日本語日本語").len(), 3);
        assert!(tokenize("One two three").iter().all(|token| *token < 1 << VOCABULARY_BITS));
    }

    #[test]
    fn generated_text_round_trips_after_any_prompt() {
        for prompt in ["", "Say: ", "user\nhi\nassistant\n", "word"] {
            let generated = [0, 5, 131_071, u32::MAX];
            let mut expected = tokenize(prompt);
            expected.extend(generated);
            assert_eq!(tokenize(&format!("{prompt}{}", detokenize(&generated))), expected, "{prompt:?}");
        }
        assert!(![" t007", " t", " t4294967296", " t+1"].into_iter().any(|piece| spelled_out(piece).is_some()));
    }

    #[test]
    fn a_turn_begins_with_the_tokens_of_the_previous_turn() {
        let first = chat_text([("user", "What is a block?")]);
        let answer = detokenize(&[9, 8, 7]);
        let next = chat_text([("user", "What is a block?"), ("assistant", &answer), ("user", "And a rank?")]);
        let mut held = tokenize(&first);
        held.extend([9, 8, 7]);
        assert_eq!(tokenize(&next)[..held.len()], held);
    }
}
