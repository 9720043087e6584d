//! What came of an event.

use std::ops::AddAssign;

/// What applying events changed, and what about them was odd. Counts blocks unless said otherwise; adds up.
///
/// ```
/// use pointsman::index::Applied;
///
/// let mut total = Applied { stored: 3, ..Applied::default() };
/// total += Applied { stored: 1, unknown_parents: 1, ..Applied::default() };
/// assert_eq!((total.stored, total.unknown_parents), (4, 1));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// Stored under a name that was not in that place before.
    pub stored: u64,
    /// Stored again: nothing changed.
    pub duplicates: u64,
    /// Stored again behind a parent on the device: another copy, as engines have them that do not de-duplicate.
    pub copies: u64,
    /// Stored in a lower tier behind a parent that nobody named yet: they wait for it.
    pub waiting: u64,
    /// Waited for a parent that this event brought; now held.
    pub adopted: u64,
    /// Names and copies given up, by removal or by a clear.
    pub removed: u64,
    /// Events for a rank that is not registered here: ignored.
    pub unknown_ranks: u64,
    /// Device-tier stores, not blocks, behind a parent that is not held: ignored whole.
    pub unknown_parents: u64,
    /// Removals of names that are not held: skipped, the rest of their list was removed.
    pub unknown_removals: u64,
    /// The same, of a rank that blocks were evicted from: as a rule, theirs.
    pub evicted_removals: u64,
    /// Given up to keep to the budget, of any rank.
    pub evicted: u64,
}

impl AddAssign for Applied {
    fn add_assign(&mut self, other: Self) {
        self.stored += other.stored;
        self.duplicates += other.duplicates;
        self.copies += other.copies;
        self.waiting += other.waiting;
        self.adopted += other.adopted;
        self.removed += other.removed;
        self.unknown_ranks += other.unknown_ranks;
        self.unknown_parents += other.unknown_parents;
        self.unknown_removals += other.unknown_removals;
        self.evicted_removals += other.evicted_removals;
        self.evicted += other.evicted;
    }
}
