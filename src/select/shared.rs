//! What a cache shared by the whole pool holds of one prompt.
//!
//! Owns the counting of its hits beyond what a rank has itself. Leaves asking the cache to the runtime.

use std::ops::Range;

/// Block positions of one prompt that the shared cache holds: half-open ranges.
///
/// ```
/// use pointsman::internals::select::SharedHits;
///
/// let hits = SharedHits::new(vec![0..3, 5..8]);
/// assert_eq!(hits.total(), 6);
/// assert_eq!(hits.beyond(2), 4); // block 2, and 5 to 7
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SharedHits(Option<Box<[Range<u32>]>>);

impl SharedHits {
    /// Takes the ranges in any order; overlapping ones count once, empty and backward ones not at all.
    #[must_use]
    pub fn new(mut ranges: Vec<Range<u32>>) -> Self {
        ranges.retain(|range| range.start < range.end);
        ranges.sort_unstable_by_key(|range| range.start);
        let mut merged: Vec<Range<u32>> = Vec::with_capacity(ranges.len());
        for range in ranges {
            match merged.last_mut() {
                Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
                _ => merged.push(range),
            }
        }
        Self(Some(merged.into_boxed_slice()).filter(|ranges| !ranges.is_empty()))
    }

    /// The ranges, in order, none touching the next.
    #[must_use]
    pub fn ranges(&self) -> &[Range<u32>] {
        self.0.as_deref().unwrap_or_default()
    }

    /// Blocks held at positions from `depth` on.
    #[must_use]
    pub fn beyond(&self, depth: u32) -> u32 {
        self.ranges().iter().map(|range| range.end.saturating_sub(range.start.max(depth))).sum()
    }

    /// Blocks held.
    #[must_use]
    pub fn total(&self) -> u32 {
        self.beyond(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[expect(clippy::reversed_empty_ranges, reason = "a faulty cache may return anything")]
    fn invalid_results_count_at_most_once() {
        let hits = SharedHits::new(vec![4..6, 0..2, 5..9, 3..3, 7..1]);
        assert_eq!(hits.ranges(), [0..2, 4..9]);
        assert_eq!((hits.total(), hits.beyond(1), hits.beyond(8), hits.beyond(100)), (7, 6, 1, 0));
    }
}
