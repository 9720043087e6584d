//! Numbered entries whose numbers are used again.
//!
//! Owns storage of equal-sized entries and the list of vacant ones. Promises that an entry keeps its number
//! until it is removed and that removed entries are refilled before the storage grows, so that churn does not
//! grow it. Does not know which entries are vacant in any other way: the owner recognises its own empty entries.

use std::mem::size_of;
use std::ops::{Index, IndexMut};

/// Entries of type `T`, named by `u32`.
#[derive(Debug)]
pub(super) struct Arena<T> {
    entries: Vec<T>,
    vacant: Vec<u32>,
}

impl<T: Default> Arena<T> {
    pub(super) const fn new() -> Self {
        Self { entries: Vec::new(), vacant: Vec::new() }
    }

    /// Puts an entry in and names it.
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

    /// Vacates an entry; its heap memory is freed now, its place is used again.
    pub(super) fn remove(&mut self, id: u32) {
        self[id] = T::default();
        self.vacant.push(id);
        if self.vacant.len() == self.entries.len() {
            *self = Self::new();
        }
    }

    /// Every entry with its number, vacant ones (which are `T::default()`) included.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        (0..).zip(&self.entries)
    }

    /// Every entry, vacant ones included.
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

    /// Heap bytes that the next insertion adds: none while there is a place for it.
    pub(super) fn growth(&self) -> usize {
        let full = self.vacant.is_empty() && self.entries.len() == self.entries.capacity();
        if full { grown(self.entries.len(), self.entries.capacity(), 1) * size_of::<T>() - self.bytes() } else { 0 }
    }

    /// Moves the last entries into vacant places and gives the room behind them back. Tells `moved` of each that was
    /// moved: its old and its new number.
    pub(super) fn compact(&mut self, mut moved: impl FnMut(u32, u32)) {
        let mut vacant = std::mem::take(&mut self.vacant);
        vacant.sort_unstable();
        let len = self.entries.len() - vacant.len();
        // What is vacant behind `len` goes, what is not moves to a vacancy before it: there are as many of either.
        let (before, behind) = vacant.split_at(vacant.partition_point(|id| (*id as usize) < len));
        let mut behind = behind.iter().copied().peekable();
        let mut before = before.iter().copied();
        for old in (0..).take(self.entries.len()).skip(len) {
            if behind.next_if_eq(&old).is_some() {
                continue;
            }
            let new = before.next().expect("as many vacancies before as entries behind");
            self.entries[new as usize] = std::mem::take(&mut self.entries[old as usize]);
            moved(old, new);
        }
        self.entries.truncate(len);
        self.entries.shrink_to(len + len / 16);
    }

    /// Heap bytes of the storage itself, without what the entries own.
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

/// Makes room for `more` entries, growing by a quarter rather than by doubling: runs are many and long-lived,
/// and their slack is what an index would mostly consist of.
pub(super) fn make_room<T>(list: &mut Vec<T>, more: usize) {
    let needed = list.len() + more;
    if needed > list.capacity() {
        let roomy = grown(list.len(), list.capacity(), more);
        list.reserve_exact(roomy - list.len());
    }
}

/// The capacity that [`make_room`] gives a list that has too little.
fn grown(len: usize, capacity: usize, more: usize) -> usize {
    if len == 0 { more } else { (len + more).max(capacity + capacity / 4 + 4) }
}

/// Gives memory back once less than half of it is used, and leaves room to grow again.
pub(super) fn give_back<T>(list: &mut Vec<T>) {
    let (len, capacity) = (list.len(), list.capacity());
    if capacity > 8 && len < capacity / 2 {
        list.shrink_to(len + len / 4);
    }
}
