//! Effects of one KV event on the index.

use std::ops::AddAssign;

/// Counts of changes and anomalies from applied events. Counts are in blocks unless stated otherwise; values of several
/// events can be added.
///
/// ```
/// use pointsman::internals::index::Applied;
///
/// let mut total = Applied { stored: 3, ..Applied::default() };
/// total += Applied { stored: 1, unknown_parents: 1, ..Applied::default() };
/// assert_eq!((total.stored, total.unknown_parents), (4, 1));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// Stored under a name that did not refer to that block before.
    pub stored: u64,
    /// Stored again without a change.
    pub duplicates: u64,
    /// Stored again behind a parent in the device tier, or offloaded again: another copy.
    pub copies: u64,
    /// Stored behind an unknown parent: pending until the parent is stored.
    pub waiting: u64,
    /// Pending blocks whose parent this event stored; now held.
    pub adopted: u64,
    /// Proven by an answer, and held since.
    pub proven: u64,
    /// Offloaded without content, under names that the rank does not hold; ignored.
    pub unknown_contents: u64,
    /// Stored in or removed from a cache group beside the main attention.
    pub grouped: u64,
    /// Names and copies removed, by a removal or by a clear.
    pub removed: u64,
    /// Names of which an earlier removal removed all copies, as this event has shown.
    pub gone: u64,
    /// Events of a rank that is not registered in this index; ignored.
    pub unknown_ranks: u64,
    /// Device-tier store events (not blocks) of a rank with evicted blocks whose parent is not held; ignored from there.
    pub unknown_parents: u64,
    /// Removals of names that are not held; skipped, while the other names of the event are removed.
    pub unknown_removals: u64,
    /// Removals of unknown names for a rank with evicted blocks; usually the removals of those evicted blocks.
    pub evicted_removals: u64,
    /// Evicted to stay within the budget, from any rank.
    pub evicted: u64,
}

impl AddAssign for Applied {
    fn add_assign(&mut self, other: Self) {
        self.stored += other.stored;
        self.duplicates += other.duplicates;
        self.copies += other.copies;
        self.waiting += other.waiting;
        self.adopted += other.adopted;
        self.proven += other.proven;
        self.unknown_contents += other.unknown_contents;
        self.grouped += other.grouped;
        self.removed += other.removed;
        self.gone += other.gone;
        self.unknown_ranks += other.unknown_ranks;
        self.unknown_parents += other.unknown_parents;
        self.unknown_removals += other.unknown_removals;
        self.evicted_removals += other.evicted_removals;
        self.evicted += other.evicted;
    }
}
