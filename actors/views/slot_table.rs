//! One shared value per slot, with the generation of the slot's occupant.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::protocol::{Generation, Slot};

type Occupant<T> = Option<(Generation, Arc<T>)>;

/// Values by slot. The supervisor writes; a read takes one uncontended lock.
#[derive(Debug)]
pub(crate) struct SlotTable<T> {
    occupants: RwLock<Vec<Occupant<T>>>,
    /// Number of writes.
    version: AtomicU64,
}

impl<T> Default for SlotTable<T> {
    fn default() -> Self {
        Self { occupants: RwLock::default(), version: AtomicU64::new(0) }
    }
}

impl<T> SlotTable<T> {
    /// The value of this generation of the slot; `None` once the slot has another occupant or none.
    pub(crate) fn get(&self, slot: Slot, generation: Generation) -> Option<Arc<T>> {
        let values = self.read();
        let (current, value) = values.get(slot.index())?.as_ref()?;
        (*current == generation).then(|| Arc::clone(value))
    }

    /// All values, in slot order.
    pub(crate) fn all(&self) -> Vec<Arc<T>> {
        self.select(|_| true)
    }

    /// The values that `is_wanted` accepts, in slot order. Visits every slot.
    pub(crate) fn select(&self, is_wanted: impl Fn(&T) -> bool) -> Vec<Arc<T>> {
        let values = self.read();
        values.iter().flatten().map(|(_, value)| value).filter(|value| is_wanted(value)).cloned().collect()
    }

    /// Number of writes so far. Values read after this call include them.
    #[cfg(feature = "replicas")]
    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    pub(crate) fn insert(&self, slot: Slot, generation: Generation, value: Arc<T>) {
        let mut values = self.write();
        if values.len() <= slot.index() {
            values.resize(slot.index() + 1, None);
        }
        values[slot.index()] = Some((generation, value));
    }

    /// Vacates a slot.
    pub(crate) fn remove(&self, slot: Slot) {
        let mut values = self.write();
        if let Some(value) = values.get_mut(slot.index()) {
            *value = None;
        }
    }

    /// Vacates all slots and returns their values.
    pub(crate) fn take_all(&self) -> Vec<Arc<T>> {
        let values = std::mem::take(&mut *self.write());
        values.into_iter().flatten().map(|(_, value)| value).collect()
    }

    fn read(&self) -> RwLockReadGuard<'_, Vec<Occupant<T>>> {
        self.occupants.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Vec<Occupant<T>>> {
        let values = self.occupants.write().unwrap_or_else(PoisonError::into_inner);
        // Readers of the new number wait for the lock, so they see the write.
        self.version.fetch_add(1, Ordering::Release);
        values
    }
}
