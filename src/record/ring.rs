//! The last recorded entries, within a number of bytes and an age.
//!
//! Entries are kept in segments, each of which begins with a keyframe and can be replayed alone. The oldest segments are
//! dropped. Sealed segments are immutable and shared, so that a reader or a writer of files takes them without a copy.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use crate::config::RecorderConfig;
use crate::protocol::Timestamp;

/// Least bytes of a segment before the next one begins.
const SEGMENT_BYTES_MIN: usize = 64 << 10;

/// Size of a segment as a multiple of its keyframe, so that keyframes take at most a ninth of the memory.
const KEYFRAME_MULTIPLE: usize = 8;

/// Part of the memory that one segment may take.
const SEGMENT_SHARE: usize = 4;

/// Consecutive entries that begin with a keyframe.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecordSegment {
    /// Number of the segment, counted from 0.
    pub sequence: u64,
    /// Time of its first entries.
    pub began_at: Timestamp,
    /// Time of its last entries.
    pub ended_at: Timestamp,
    /// The entries.
    pub bytes: Vec<u8>,
    /// Ends of groups of entries in `bytes`, in order. A group is read as a whole.
    pub ends: Vec<u32>,
}

impl RecordSegment {
    fn push(&mut self, bytes: &[u8], now: Timestamp) {
        if !bytes.is_empty() {
            self.bytes.extend_from_slice(bytes);
            self.ends.push(u32::try_from(self.bytes.len()).unwrap_or(u32::MAX));
            self.ended_at = now;
        }
    }

    /// Whether a text occurs in the entries.
    #[must_use]
    pub fn mentions(&self, text: &str) -> bool {
        let Some((first, rest)) = text.as_bytes().split_first() else { return true };
        let mut bytes = self.bytes.as_slice();
        while let Some(at) = bytes.iter().position(|byte| byte == first) {
            bytes = &bytes[at + 1..];
            if bytes.starts_with(rest) {
                return true;
            }
        }
        false
    }

    fn memory(&self) -> usize {
        self.bytes.len() + self.ends.len() * size_of::<u32>()
    }
}

/// The last entries of one scheduler. See the module documentation.
///
/// ```
/// use pointsman::internals::config::RecorderConfig;
/// use pointsman::protocol::Timestamp;
/// use pointsman::internals::record::DecisionRing;
///
/// let mut ring = DecisionRing::new(&RecorderConfig::default());
/// ring.push(b"keyframe", Some(0), Timestamp(1));
/// ring.push(b"batch", None, Timestamp(2));
/// assert_eq!(ring.segments()[0].bytes, b"keyframebatch");
/// ```
#[derive(Debug, Default)]
pub struct DecisionRing {
    bytes_max: usize,
    age_max: Duration,
    sealed: VecDeque<Arc<RecordSegment>>,
    open: Option<RecordSegment>,
    /// Length at which the open segment is to end.
    open_bytes_max: usize,
    sealed_bytes: usize,
    next_sequence: u64,
}

impl DecisionRing {
    /// An empty ring.
    #[must_use]
    pub fn new(config: &RecorderConfig) -> Self {
        Self {
            bytes_max: usize::try_from(config.bytes_max).unwrap_or(usize::MAX),
            age_max: Duration::from_millis(config.age_max_ms),
            ..Self::default()
        }
    }

    /// Adds entries with a keyframe at `keyframe_at`, or none. Returns whether the next segment should begin soon.
    /// Entries before the first keyframe are dropped.
    pub fn push(&mut self, bytes: &[u8], keyframe_at: Option<usize>, now: Timestamp) -> bool {
        let (before, after) = bytes.split_at(keyframe_at.unwrap_or(bytes.len()).min(bytes.len()));
        if let Some(open) = &mut self.open {
            open.push(before, now);
        }
        if keyframe_at.is_some() {
            self.seal();
            let mut open = RecordSegment { sequence: self.next_sequence, began_at: now, ..RecordSegment::default() };
            self.next_sequence += 1;
            open.push(after, now);
            let wanted = (open.memory() * KEYFRAME_MULTIPLE).max(SEGMENT_BYTES_MIN);
            self.open_bytes_max = wanted.min(self.bytes_max / SEGMENT_SHARE);
            self.open = Some(open);
        }
        let open_bytes = self.open.as_ref().map_or(0, RecordSegment::memory);
        while self.sealed.front().is_some_and(|oldest| {
            self.sealed_bytes + open_bytes > self.bytes_max || now.since(oldest.ended_at) >= self.age_max
        }) {
            self.sealed_bytes -= self.sealed.pop_front().map_or(0, |oldest| oldest.memory());
        }
        if open_bytes > self.bytes_max {
            self.open = None; // no keyframe came in time
        }
        open_bytes > self.open_bytes_max
    }

    fn seal(&mut self) {
        if let Some(mut open) = self.open.take() {
            open.bytes.shrink_to_fit();
            self.sealed_bytes += open.memory();
            self.sealed.push_back(Arc::new(open));
        }
    }

    /// Bytes in memory.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.sealed_bytes + self.open.as_ref().map_or(0, RecordSegment::memory)
    }

    /// All segments, oldest first, with a copy of the open one.
    #[must_use]
    pub fn segments(&self) -> Vec<Arc<RecordSegment>> {
        self.sealed.iter().cloned().chain(self.open.clone().map(Arc::new)).collect()
    }

    /// The entries after `cursor`, which is advanced, and the number of segments from which entries were dropped before.
    #[must_use]
    pub fn parts_after(&self, cursor: &mut RecordCursor) -> (Vec<RecordPart>, u64) {
        if cursor.sequence >= self.next_sequence {
            *cursor = RecordCursor::default(); // of another ring
        }
        let all = self.sealed.iter().map(|segment| &**segment).chain(&self.open);
        let oldest = all.clone().next().map_or(self.next_sequence, |segment| segment.sequence);
        let lost = oldest.saturating_sub(cursor.sequence);
        let mut parts = Vec::new();
        let RecordCursor { sequence, groups } = *cursor;
        for segment in all.filter(|segment| segment.sequence >= sequence) {
            let first = if segment.sequence == sequence { groups } else { 0 };
            *cursor = RecordCursor { sequence: segment.sequence, groups: segment.ends.len() };
            let Some(ends) = segment.ends.get(first..).filter(|ends| !ends.is_empty()) else { continue };
            let from = first.checked_sub(1).map_or(0, |last| segment.ends[last]);
            parts.push(RecordPart {
                sequence: segment.sequence,
                begins: first == 0,
                bytes: segment.bytes[from as usize..].to_vec(),
                ends: ends.iter().map(|end| end - from).collect(),
            });
        }
        (parts, lost)
    }
}

/// Position in the entries of a ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecordCursor {
    sequence: u64,
    /// Groups of this segment that have been taken.
    groups: usize,
}

/// Consecutive entries of one segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordPart {
    /// Number of the segment.
    pub sequence: u64,
    /// Whether it begins here, with a keyframe.
    pub begins: bool,
    /// The entries.
    pub bytes: Vec<u8>,
    /// Ends of groups of entries in `bytes`, in order.
    pub ends: Vec<u32>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring(bytes_max: u64, age_max_ms: u64) -> DecisionRing {
        DecisionRing::new(&RecorderConfig { bytes_max, age_max_ms })
    }

    #[test]
    fn bytes_are_bounded_and_the_oldest_segments_leave() {
        let mut ring = ring(1 << 20, 1_000_000);
        let mut begins = true;
        for n in 0..10_000_u64 {
            begins = ring.push(&[n as u8; 1_000], begins.then_some(0), Timestamp(n));
            assert!(ring.bytes() <= 1 << 20);
        }
        let segments = ring.segments();
        assert!(segments.len() > 4 && segments[0].sequence > 0);
        let mut cursor = RecordCursor::default();
        let (parts, lost) = ring.parts_after(&mut cursor);
        assert_eq!(
            (parts[0].sequence, parts.len(), lost),
            (segments[0].sequence, segments.len(), segments[0].sequence)
        );
        assert_eq!(ring.parts_after(&mut cursor), (Vec::new(), 0));
        ring.push(b"more", None, Timestamp(10_000));
        let (parts, _) = ring.parts_after(&mut cursor);
        assert_eq!((parts.len(), parts[0].begins, &parts[0].bytes[..]), (1, false, &b"more"[..]));
    }

    #[test]
    fn old_segments_leave() {
        let mut ring = ring(1 << 20, 10);
        ring.push(b"one", Some(0), Timestamp(0));
        ring.push(b"xtwo", Some(1), Timestamp(5_000_000));
        assert_eq!(
            ring.segments().iter().map(|segment| segment.bytes.clone()).collect::<Vec<_>>(),
            [&b"onex"[..], b"two"]
        );
        ring.push(b"three", None, Timestamp(20_000_000));
        assert_eq!(ring.segments().len(), 1);
    }

    #[test]
    fn entries_without_a_keyframe_are_dropped() {
        let mut ring = ring(1 << 20, 10);
        ring.push(b"batch", None, Timestamp(0));
        assert!(ring.segments().is_empty());
    }
}
