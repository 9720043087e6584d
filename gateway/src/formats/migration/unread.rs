//! Frames of a stream that have passed and may have to be read later.
//!
//! Most frames of a stream differ in one place, the text of a token, which the reader of the response has found. Of such a
//! frame the text is kept, and of any other one all bytes: a thousand tokens take a few kilobytes. Frames are copied,
//! because each refers to the whole buffer of its read.

use std::ops::Range;

/// Text of every chunk, and text that may be an error.
const CHUNK: &str = "\"choices\"";
const ERROR: &str = "error";

/// The end mark of a stream as a frame.
const END: &[u8] = b"data: [DONE]\n\n";

#[derive(Clone, Debug, Default)]
pub(super) struct UnreadFrames {
    /// Each whole frame, then the JSON texts of the frames that repeat it, each with its closing quote.
    bytes: Vec<u8>,
    /// The whole frames in order.
    whole: Vec<WholeFrame>,
    has_end: bool,
}

#[derive(Clone, Debug)]
struct WholeFrame {
    /// Position in the bytes.
    at: Range<usize>,
    /// Lengths of its start and its end that the frames after it have as well; zero without such frames.
    equal: (usize, usize),
}

impl UnreadFrames {
    /// Size in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Adds a frame that is the last parsed event with another text at this position, if that event is the last whole
    /// frame. One comparison shows it for all such frames until the next whole one.
    pub(super) fn repeat(&mut self, frame: &[u8], text: Range<usize>) -> bool {
        let equal = (text.start, frame.len() - text.end);
        let (Some(whole), Some(text)) = (self.whole.last_mut(), frame.get(text.start..=text.end)) else { return false };
        if whole.equal != equal {
            let bytes = &self.bytes[whole.at.clone()];
            let is_repeated = whole.equal == (0, 0)
                && bytes.len() > equal.0 + equal.1
                && bytes.starts_with(&frame[..equal.0])
                && bytes.ends_with(&frame[frame.len() - equal.1..]);
            if !is_repeated {
                return false;
            }
            whole.equal = equal;
        }
        self.bytes.extend_from_slice(text);
        true
    }

    /// Adds a frame of chunks without an error, or the first end mark. Returns whether it is one; others are not added.
    pub(super) fn push(&mut self, frame: &[u8]) -> bool {
        if frame.ends_with(END) && std::mem::replace(&mut self.has_end, true) {
            return false;
        }
        let is_chunk = |text: &str| text.contains(CHUNK) && !text.contains(ERROR);
        if frame != END && !str::from_utf8(frame).is_ok_and(is_chunk) {
            return false;
        }
        let start = self.bytes.len();
        self.bytes.extend_from_slice(frame);
        self.whole.push(WholeFrame { at: start..self.bytes.len(), equal: (0, 0) });
        true
    }

    /// Removes and returns all frames in order.
    pub(super) fn take(&mut self) -> Vec<Vec<u8>> {
        let Self { bytes, whole, .. } = std::mem::take(self);
        let ends = whole.iter().skip(1).map(|next| next.at.start).chain([bytes.len()]);
        let mut frames = Vec::new();
        for (WholeFrame { at, equal: (start, end) }, texts_end) in whole.iter().zip(ends) {
            let (whole, mut texts) = (&bytes[at.clone()], &bytes[at.end..texts_end]);
            frames.push(whole.to_vec());
            while let Some(length) = text_end(texts) {
                frames.push([&whole[..*start], &texts[..length], &whole[whole.len() - end..]].concat());
                texts = &texts[length + 1..];
            }
        }
        frames
    }
}

/// Length of a JSON text up to its closing quote.
fn text_end(bytes: &[u8]) -> Option<usize> {
    let mut is_escaped = false;
    bytes.iter().position(|byte| {
        let is_end = *byte == b'"' && !is_escaped;
        is_escaped = *byte == b'\\' && !is_escaped;
        is_end
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// JSON texts without quotes.
    const TEXT: &str = r#"([abr]|\\"|\\\\|é){1,3}|error"#;

    proptest! {
        #[test]
        fn frames_are_returned_as_they_were(
            frames in prop::collection::vec(("[ab]{1,9}", prop::collection::vec(TEXT, 0..5), "[ab]{0,9}"), 0..20),
        ) {
            let (mut unread, mut taken, mut kept) = (UnreadFrames::default(), Vec::new(), Vec::new());
            for (start, texts, end) in frames {
                for (n, text) in texts.into_iter().enumerate() {
                    let frame = format!("{start}\"choices\"{text}\"{end}");
                    let end = frame.len() - end.len() - 1;
                    let at = end - text.len()..end;
                    // The first event of its form is parsed.
                    if n > 0 && unread.repeat(frame.as_bytes(), at) || unread.push(frame.as_bytes()) {
                        kept.push(frame.into_bytes());
                    } else {
                        prop_assert_eq!(text, "error");
                        taken.extend(unread.take());
                    }
                }
            }
            for is_first in [true, false] {
                prop_assert_eq!(unread.push(END), is_first);
            }
            kept.push(END.to_vec());
            taken.extend(unread.take());
            prop_assert_eq!(taken, kept);
            prop_assert!(!unread.push(b"data: {}"), "no chunk");
        }
    }

    #[test]
    fn a_token_takes_few_bytes() {
        let mut unread = UnreadFrames::default();
        for n in 1_000..2_000 {
            let frame = format!("data: {{\"id\":\"x\",\"choices\":[{{\"text\":\" {n}\"}}]}}\n\n");
            let text = frame.len() - 11..frame.len() - 6;
            assert_eq!(unread.repeat(frame.as_bytes(), text), n > 1_000);
            assert!(n > 1_000 || unread.push(frame.as_bytes()));
        }
        assert!(unread.bytes() < 12 * 1_000, "{}", unread.bytes());
    }
}
