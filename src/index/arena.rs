//! Arena: numbered entries in one vector, with reuse of free numbers.
//!
//! An entry keeps its number until it is removed. Removed entries are reused before the storage grows, so churn does
//! not grow it. The arena keeps only the list of vacant numbers; the owner recognises vacant entries by their default
//! value.

use std::mem::size_of;
use std::ops::{Index, IndexMut};

/// Entries of type `T`, addressed by `u32`.
#[derive(Debug)]
pub(super) struct Arena<T> {
    entries: Vec<T>,
    vacant: Vec<u32>,
}

impl<T: Default> Arena<T> {
    pub(super) const fn new() -> Self {
        Self { entries: Vec::new(), vacant: Vec::new() }
    }

    /// Inserts an entry and returns its number.
    pub(super) fn insert(&mut self, entry: T) -> u32 {
        if let Some(id) = self.vacant.pop() {
            self[id] = entry;
            return id;
        }
        let id = u32::try_from(self.entries.len()).expect("four billion entries would not fit in memory");
        make_room(&mut self.entries, 1);
        self.entries.push(entry);
        id
    }

    /// Vacates an entry. Frees its heap memory immediately and makes its number available for reuse.
    pub(super) fn remove(&mut self, id: u32) {
        self[id] = T::default();
        self.vacant.push(id);
        if self.vacant.len() == self.entries.len() {
            *self = Self::new();
        }
    }

    /// Every entry with its number, including vacant ones (which are `T::default()`).
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        (0..).zip(&self.entries)
    }

    /// Every entry, including vacant ones.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.entries.iter_mut()
    }

    /// Number of entries that are not vacant.
    pub(super) fn len(&self) -> usize {
        self.entries.len() - self.vacant.len()
    }

    /// Number of vacant entries.
    pub(super) fn vacant(&self) -> usize {
        self.vacant.len()
    }

    /// Heap bytes that the next insertion adds: zero while a vacant or reserved entry exists.
    pub(super) fn growth(&self) -> usize {
        let full = self.vacant.is_empty() && self.entries.len() == self.entries.capacity();
        if full { grown(self.entries.len(), self.entries.capacity(), 1) * size_of::<T>() - self.bytes() } else { 0 }
    }

    /// Moves the last entries into vacant places and returns the freed memory. Calls `moved` with the old and the new
    /// number of each moved entry.
    pub(super) fn compact(&mut self, mut moved: impl FnMut(u32, u32)) {
        let mut vacant = std::mem::take(&mut self.vacant);
        vacant.sort_unstable();
        let len = self.entries.len() - vacant.len();
        // Vacant entries at or after `len` are dropped. Each occupied entry there moves to a vacancy before `len`; both
        // have the same number.
        let (before, behind) = vacant.split_at(vacant.partition_point(|id| (*id as usize) < len));
        let mut behind = behind.iter().copied().peekable();
        let mut before = before.iter().copied();
        for old in (0..).take(self.entries.len()).skip(len) {
            if behind.next_if_eq(&old).is_some() {
                continue;
            }
            let new = before.next().expect("vacancies before `len` match the occupied entries after it");
            self.entries[new as usize] = std::mem::take(&mut self.entries[old as usize]);
            moved(old, new);
        }
        self.entries.truncate(len);
        self.entries.shrink_to(len + len / 16);
    }

    /// Heap bytes of the storage itself, without heap memory owned by the entries.
    pub(super) fn bytes(&self) -> usize {
        self.entries.capacity() * size_of::<T>() + self.vacant.capacity() * size_of::<u32>()
    }
}

impl<T> Index<u32> for Arena<T> {
    type Output = T;

    fn index(&self, id: u32) -> &T {
        &self.entries[id as usize]
    }
}

impl<T> IndexMut<u32> for Arena<T> {
    fn index_mut(&mut self, id: u32) -> &mut T {
        &mut self.entries[id as usize]
    }
}

/// Reserves room for `more` entries. Grows by a quarter instead of doubling: runs are numerous and long-lived, and with
/// doubling their spare capacity would dominate the size of an index.
pub(super) fn make_room<T>(list: &mut Vec<T>, more: usize) {
    let needed = list.len() + more;
    if needed > list.capacity() {
        let roomy = grown(list.len(), list.capacity(), more);
        list.reserve_exact(roomy - list.len());
    }
}

/// The capacity that [`make_room`] gives to a list that is too small.
fn grown(len: usize, capacity: usize, more: usize) -> usize {
    if len == 0 { more } else { (len + more).max(capacity + capacity / 4 + 4) }
}

/// Shrinks a list that is less than half full, with a margin for new growth.
pub(super) fn give_back<T>(list: &mut Vec<T>) {
    let (len, capacity) = (list.len(), list.capacity());
    if capacity > 8 && len < capacity / 2 {
        list.shrink_to(len + len / 4);
    }
}
