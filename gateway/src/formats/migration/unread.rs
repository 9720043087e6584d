//! Frames of a stream that have passed and may have to be read later.
//!
//! Most frames of a stream differ in one place, the text of a token. A frame is kept as its difference from a template,
//! an earlier frame, whose bytes around that place are equal. The cost of a frame is two comparisons and the copy of a few
//! bytes, and a thousand of them take a few kilobytes. Frames are copied, because each refers to the whole buffer of its
//! read.

/// Maximum length of a frame, so that lengths have two bytes.
const FRAME_BYTES_MAX: usize = u16::MAX as usize;

/// Maximum length of a difference. With a longer one, the frame becomes the template.
const DIFFERENCE_BYTES_MAX: usize = 128;

/// Text of every chunk, and text that may be an error.
const CHUNK: &str = "\"choices\"";
const ERROR: &str = "error";

/// The end mark of a stream as a frame.
const END: &[u8] = b"data: [DONE]\n\n";

#[derive(Clone, Debug, Default)]
pub(super) struct UnreadFrames {
    template: Vec<u8>,
    /// Position after [`CHUNK`] in the template; 0 without one.
    chunk_end: usize,
    /// Numbers of bytes at the start and at the end that all frames since the template have.
    equal: (usize, usize),
    has_end: bool,
    /// Per frame the lengths of the equal start, of the difference, and of the equal end; then the difference. A template
    /// has no equal bytes.
    differences: Vec<u8>,
}

impl UnreadFrames {
    /// Size in bytes without the template.
    pub(super) fn bytes(&self) -> usize {
        self.differences.len()
    }

    /// Adds a frame of chunks without an error, or the first end mark. Returns whether it is one; others are not added.
    pub(super) fn push(&mut self, frame: &[u8]) -> bool {
        if frame.len() > FRAME_BYTES_MAX || (frame.ends_with(END) && std::mem::replace(&mut self.has_end, true)) {
            return false;
        }
        if !self.has_equal_ends(frame) {
            let (template, (start, end)) = (&self.template, self.equal);
            let start = equal(&template[..start], frame);
            let end = equal(template[template.len() - end..].iter().rev(), frame[start..].iter().rev());
            self.equal = (start, end);
            if !self.has_equal_ends(frame) {
                return self.set_template(frame);
            }
        }
        let (start, end) = (self.equal.0, frame.len() - self.equal.1);
        // The template has no error, so that a new one begins or ends in the difference.
        let is_chunk = !has_error(&frame[start.saturating_sub(ERROR.len())..frame.len().min(end + ERROR.len())]);
        if is_chunk {
            self.add(self.equal, &frame[start..end]);
        }
        is_chunk
    }

    fn has_equal_ends(&self, frame: &[u8]) -> bool {
        let (template, (start, end)) = (&self.template, self.equal);
        let is_similar = (start + end..=start + end + DIFFERENCE_BYTES_MAX).contains(&frame.len());
        let has_chunk = (1..=start).contains(&self.chunk_end);
        has_chunk
            && is_similar
            && frame.starts_with(&template[..start])
            && frame.ends_with(&template[template.len() - end..])
    }

    fn set_template(&mut self, frame: &[u8]) -> bool {
        let Ok(text) = str::from_utf8(frame) else { return false };
        self.chunk_end = match text.find(CHUNK) {
            Some(at) if !text.contains(ERROR) => at + CHUNK.len(),
            None if frame == END => 0,
            _ => return false,
        };
        self.template.clear();
        self.template.extend_from_slice(frame);
        self.equal = (frame.len(), frame.len());
        self.add((0, 0), frame);
        true
    }

    fn add(&mut self, (start, end): (usize, usize), difference: &[u8]) {
        let lengths =
            [start, difference.len(), end].map(|length| u16::try_from(length).unwrap_or(u16::MAX).to_le_bytes());
        self.differences.extend_from_slice(lengths.as_flattened());
        self.differences.extend_from_slice(difference);
    }

    /// Removes and returns all frames in order.
    pub(super) fn take(&mut self) -> Vec<Vec<u8>> {
        let Self { differences, .. } = std::mem::take(self);
        let (mut rest, mut template, mut frames) = (&differences[..], &[][..], Vec::new());
        while let Some((lengths, bytes)) = rest.split_at_checked(6) {
            let length = |n: usize| usize::from(u16::from_le_bytes([lengths[2 * n], lengths[2 * n + 1]]));
            let (difference, after) = bytes.split_at(length(1));
            frames.push([&template[..length(0)], difference, &template[template.len() - length(2)..]].concat());
            if length(0) == 0 {
                template = difference;
            }
            rest = after;
        }
        frames
    }
}

/// Number of equal items at the start.
fn equal<'a>(one: impl IntoIterator<Item = &'a u8>, other: impl IntoIterator<Item = &'a u8>) -> usize {
    one.into_iter().zip(other).take_while(|(one, other)| one == other).count()
}

/// Whether the bytes contain [`ERROR`]. Of two neighbours in it, one is at an odd position and an `r`.
fn has_error(bytes: &[u8]) -> bool {
    bytes.chunks_exact(2).any(|pair| pair[1] == b'r') && bytes.windows(ERROR.len()).any(|part| part == ERROR.as_bytes())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn frames_are_returned_as_they_were(
            frames in prop::collection::vec(("[ab]{0,40}", "[abr]{0,3}|error", "[ab]{0,40}", 1..3_usize), 0..20),
        ) {
            let (mut unread, mut kept) = (UnreadFrames::default(), Vec::new());
            for (start, middle, end, times) in frames {
                let frame = format!("{start}\"choices\"{middle}er{middle}{end}").repeat(times);
                prop_assert_eq!(unread.push(frame.as_bytes()), !frame.contains("error"), "{}", frame);
                if !frame.contains("error") {
                    kept.push(frame.into_bytes());
                }
            }
            for is_first in [true, false] {
                prop_assert_eq!(unread.push(END), is_first);
            }
            kept.push(END.to_vec());
            prop_assert_eq!(unread.take(), kept);
            prop_assert!(!unread.push(b"data: {}"), "no chunk");
        }
    }

    #[test]
    fn a_token_takes_few_bytes() {
        let mut unread = UnreadFrames::default();
        for n in 1_000..2_000 {
            assert!(unread.push(format!("data: {{\"id\":\"x\",\"choices\":[{{\"text\":\" {n}\"}}]}}\n\n").as_bytes()));
        }
        assert!(unread.bytes() < 12 * 1_000, "{}", unread.bytes());
    }
}
