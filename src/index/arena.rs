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

    /// Number of entries that are not vacant.
    pub(super) fn len(&self) -> usize {
        self.entries.len() - self.vacant.len()
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
        let roomy = if list.is_empty() { needed } else { needed.max(list.capacity() + list.capacity() / 4 + 4) };
        list.reserve_exact(roomy - list.len());
    }
}

/// Gives memory back once less than half of it is used, and leaves room to grow again.
pub(super) fn give_back<T>(list: &mut Vec<T>) {
    let (len, capacity) = (list.len(), list.capacity());
    if capacity > 8 && len < capacity / 2 {
        list.shrink_to(len + len / 4);
    }
}
