//! Matches of two common patterns in ASCII text, for a tenth of the cost of the regular expression.
//!
//! GPT-2's pattern, and that of cl100k, Llama 3 and Qwen. Both match every character, and only look ahead: a match
//! depends on the text from its start to the character after its end. If one of these is not ASCII, the regular
//! expression decides.

/// Pattern of the pre-tokenizer `ByteLevel` with `use_regex`.
pub(super) const GPT_2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// The other pattern, before and after the number of its digits.
const CL100K: [&str; 2] = [
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
];

/// A pattern.
#[derive(Clone, Copy)]
pub(super) struct Ascii {
    is_gpt_2: bool,
    digits_max: usize,
}

/// Kind of a character, or the end of the text.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Letter,
    Digit,
    /// White space that ends no line.
    Blank,
    Newline,
    Other,
    NotAscii,
    End,
}

use Kind::{Blank, Digit, End, Letter, Newline, NotAscii, Other};

/// The kinds of all bytes.
static KINDS: [Kind; 256] = {
    let (mut kinds, mut byte) = ([NotAscii; 256], 0);
    while byte < 0x80 {
        kinds[byte] = match byte as u8 {
            b'a'..=b'z' | b'A'..=b'Z' => Letter,
            b'0'..=b'9' => Digit,
            b' ' | b'\t' | 0x0b | 0x0c => Blank,
            b'\n' | b'\r' => Newline,
            _ => Other,
        };
        byte += 1;
    }
    kinds
};

fn kind(text: &[u8], at: usize) -> Kind {
    text.get(at).map_or(End, |byte| KINDS[usize::from(*byte)])
}

/// End of the characters of this kind; `None` before one that is not ASCII.
fn run(text: &[u8], from: usize, is_kind: impl Fn(Kind) -> bool) -> Option<usize> {
    let rest = &text[from..];
    let end = from + rest.iter().position(|byte| !is_kind(KINDS[usize::from(*byte)])).unwrap_or(rest.len());
    Some(end).filter(|end| kind(text, *end) != NotAscii)
}

impl Ascii {
    /// `None` for another pattern.
    pub(super) fn of(pattern: &str) -> Option<Self> {
        if pattern == GPT_2 {
            return Some(Self { is_gpt_2: true, digits_max: usize::MAX });
        }
        let digits_max = match pattern.strip_prefix(CL100K[0])?.strip_suffix(CL100K[1])? {
            "" => 1,
            "{1,3}" => 3,
            "+" => usize::MAX,
            _ => return None,
        };
        Some(Self { is_gpt_2: false, digits_max })
    }

    /// End of the match that starts here; `None` if it depends on a character that is not ASCII, and at the end.
    pub(super) fn end(self, text: &[u8], at: usize) -> Option<usize> {
        let (first, second, is_space) = (kind(text, at), kind(text, at + 1), text.get(at) == Some(&b' '));
        if matches!(first, NotAscii | End) || second == NotAscii {
            return None;
        }
        if text[at] == b'\''
            && let Some(end) = self.contraction(text, at)
        {
            return Some(end);
        }
        let is_before_word = if self.is_gpt_2 { is_space } else { matches!(first, Blank | Other) };
        if first == Letter || second == Letter && is_before_word {
            return run(text, at + 1, |kind| kind == Letter);
        }
        if first == Digit || second == Digit && is_space && self.is_gpt_2 {
            let from = at + usize::from(first != Digit);
            // A longer text of digits would be read again for each match.
            let text = &text[..text.len().min(from.saturating_add(self.digits_max))];
            return run(text, from, |kind| kind == Digit);
        }
        if first == Other || second == Other && is_space {
            let end = run(text, at + 1, |kind| kind == Other)?;
            return if self.is_gpt_2 { Some(end) } else { run(text, end, |kind| kind == Newline) };
        }
        let end = run(text, at, |kind| matches!(kind, Blank | Newline))?;
        let newline = text[at..end].iter().rposition(|byte| matches!(byte, b'\n' | b'\r'));
        match newline.filter(|_| !self.is_gpt_2) {
            Some(newline) => Some(at + newline + 1),
            // The last space belongs to the word after it.
            None if end < text.len() && end > at + 1 => Some(end - 1),
            None => Some(end),
        }
    }

    /// End of `'s`, `'t`, `'re`, `'ve`, `'m`, `'ll` and `'d`.
    fn contraction(self, text: &[u8], at: usize) -> Option<usize> {
        let letter =
            |n: usize| text.get(at + n).map(|byte| if self.is_gpt_2 { *byte } else { byte.to_ascii_lowercase() });
        match (text[at], letter(1)?, letter(2)) {
            (b'\'', b's' | b't' | b'm' | b'd', _) => Some(at + 2),
            (b'\'', b'r' | b'v', Some(b'e')) | (b'\'', b'l', Some(b'l')) => Some(at + 3),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tokenizers::tokenizer::pattern::Pattern as _;
    use tokenizers::utils::SysRegex;

    use super::*;

    fn matches(pattern: &str, text: &str) -> Vec<usize> {
        let (regex, ascii) = (SysRegex::new(pattern).unwrap(), Ascii::of(pattern).unwrap());
        let (mut ends, mut at) = (Vec::new(), 0);
        while at < text.len() {
            let next = || regex.find_iter(&text[at..]).next().map(|(_, to)| at + to).unwrap();
            at = ascii.end(text.as_bytes(), at).unwrap_or_else(next);
            ends.push(at);
        }
        ends
    }

    proptest! {
        #[test]
        fn matches_are_those_of_the_regular_expression(
            pieces in prop::collection::vec(
                prop_oneof![
                    4 => "[\\x00-\\x7f]{1,3}",
                    3 => prop::sample::select(&["'s", "'T", "'re", "'LL", "'x", " ", "  ", "\n", "\r\n", "\t", "a", "Bc", "1", "1234", "(", ".\n"][..]).prop_map(str::to_owned),
                    1 => prop::sample::select(&["é", "\u{301}", "\u{a0}", "\u{2028}", "\u{3000}", "ſ", "東", "²", "١", "🙂", "\u{212a}"][..]).prop_map(str::to_owned),
                ],
                0..16,
            ),
        ) {
            let text = pieces.concat();
            for digits in ["", "{1,3}", "+"] {
                let pattern = CL100K.join(digits);
                let expected: Vec<_> = (&SysRegex::new(&pattern).unwrap()).find_matches(&text).unwrap();
                let expected: Vec<usize> = expected.into_iter().map(|((_, end), _)| end).filter(|end| *end > 0).collect();
                prop_assert_eq!(matches(&pattern, &text), expected, "{:?}", text);
            }
            let expected: Vec<_> = (&SysRegex::new(GPT_2).unwrap()).find_matches(&text).unwrap();
            let expected: Vec<usize> = expected.into_iter().map(|((_, end), _)| end).filter(|end| *end > 0).collect();
            prop_assert_eq!(matches(GPT_2, &text), expected, "{:?}", text);
        }
    }
}
