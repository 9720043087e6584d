//! Frames of a stream that have passed and may have to be read later.
//!
//! Each frame is kept as its difference from the one before it, which is the text of a token in most streams. The cost of
//! a frame is a comparison of bytes, and a thousand of them take a few kilobytes. Frames are copied, because each refers
//! to the whole buffer of its read.

/// Number of bytes that are compared at once.
const STRIDE: usize = 16;

/// Maximum length of a frame, so that lengths have two bytes.
const FRAME_BYTES_MAX: usize = u16::MAX as usize;

/// Text of every chunk, and text that may be an error.
const CHUNK: &str = "\"choices\"";
const ERROR: &str = "error";

/// The end mark of a stream as a frame.
const END: &[u8] = b"data: [DONE]\n\n";

#[derive(Clone, Debug, Default)]
pub(super) struct UnreadFrames {
    last: Vec<u8>,
    /// Position after [`CHUNK`] in the last frame.
    chunk_end: usize,
    has_end: bool,
    /// Per frame the lengths of the start that equals the last frame's, of the difference, and of the equal end; then the
    /// difference.
    differences: Vec<u8>,
}

impl UnreadFrames {
    /// Size in bytes without the last frame.
    pub(super) fn bytes(&self) -> usize {
        self.differences.len()
    }

    /// Adds a frame of chunks without an error, or the first end mark. Returns whether it is one; others are not added.
    pub(super) fn push(&mut self, frame: &[u8]) -> bool {
        let Ok(text) = str::from_utf8(frame) else { return false };
        let is_second_end = frame.ends_with(END) && std::mem::replace(&mut self.has_end, true);
        if frame.len() > FRAME_BYTES_MAX || is_second_end {
            return false;
        }
        let start = equal_start(&self.last, frame);
        let end = equal_end(&self.last[start..], &frame[start..]);
        let changed = start..frame.len() - end;
        if frame == END {
            self.chunk_end = 0;
        } else if self.chunk_end == 0 || changed.start < self.chunk_end {
            let Some(at) = text.find(CHUNK).filter(|_| !text.contains(ERROR)) else { return false };
            self.chunk_end = at + CHUNK.len();
        } else {
            // The last frame has no error, so that a new one begins or ends in the difference.
            let context = changed.start.saturating_sub(ERROR.len())..frame.len().min(changed.end + ERROR.len());
            if frame[context].windows(ERROR.len()).any(|bytes| bytes == ERROR.as_bytes()) {
                return false;
            }
        }
        for length in [start, changed.len(), end] {
            self.differences.extend_from_slice(&u16::try_from(length).unwrap_or(u16::MAX).to_le_bytes());
        }
        self.differences.extend_from_slice(&frame[changed]);
        self.last.clear();
        self.last.extend_from_slice(frame);
        true
    }

    /// Removes and returns all frames in order.
    pub(super) fn take(&mut self) -> Vec<Vec<u8>> {
        let Self { differences, .. } = std::mem::take(self);
        let (mut rest, mut frames) = (&differences[..], Vec::<Vec<u8>>::new());
        while let Some((lengths, bytes)) = rest.split_at_checked(6) {
            let length = |n: usize| usize::from(u16::from_le_bytes([lengths[2 * n], lengths[2 * n + 1]]));
            let (changed, after) = bytes.split_at(length(1));
            let last = frames.last().map_or(&[][..], |last| last);
            frames.push([&last[..length(0)], changed, &last[last.len() - length(2)..]].concat());
            rest = after;
        }
        frames
    }
}

/// Number of equal bytes at the start.
fn equal_start(one: &[u8], other: &[u8]) -> usize {
    let strides = one.chunks_exact(STRIDE).zip(other.chunks_exact(STRIDE)).take_while(|(one, other)| one == other);
    let whole = strides.count() * STRIDE;
    whole + one[whole..].iter().zip(&other[whole..]).take_while(|(one, other)| one == other).count()
}

/// Number of equal bytes at the end.
fn equal_end(one: &[u8], other: &[u8]) -> usize {
    let strides = one.rchunks_exact(STRIDE).zip(other.rchunks_exact(STRIDE)).take_while(|(one, other)| one == other);
    let whole = strides.count() * STRIDE;
    let (one, other) = (&one[..one.len() - whole], &other[..other.len() - whole]);
    whole + one.iter().rev().zip(other.iter().rev()).take_while(|(one, other)| one == other).count()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn frames_are_returned_as_they_were(
            frames in prop::collection::vec(("[ab]{0,40}", "[abr]{0,3}|error", "[ab]{0,40}"), 0..20),
        ) {
            let (mut unread, mut kept) = (UnreadFrames::default(), Vec::new());
            for (start, middle, end) in frames {
                let frame = format!("{start}\"choices\"{middle}er{middle}{end}");
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
