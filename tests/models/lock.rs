//! Mutex of the states in the models: no stronger than the standard library's.
//!
//! loom's own mutex orders all its operations with each other, as if each were a sequentially consistent fence. The
//! strand must not depend on that: here a lock acquires, a release releases, and a failed attempt orders nothing.

use std::ops::{Deref, DerefMut};
use std::sync::{LockResult, TryLockError, TryLockResult};

use loom::sync::atomic::{AtomicBool, Ordering};

pub(crate) struct StateMutex<T> {
    is_locked: AtomicBool,
    /// Never contended: loom runs one thread at a time, and `is_locked` admits one.
    value: std::sync::Mutex<T>,
}

pub(crate) struct StateGuard<'a, T> {
    mutex: &'a StateMutex<T>,
    /// `None` during the drop.
    value: Option<std::sync::MutexGuard<'a, T>>,
}

impl<T> StateMutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { is_locked: AtomicBool::new(false), value: std::sync::Mutex::new(value) }
    }

    pub(crate) fn try_lock(&self) -> TryLockResult<StateGuard<'_, T>> {
        match self.is_locked.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => Ok(StateGuard { mutex: self, value: Some(self.value.lock().expect("no panic under a lock")) }),
            Err(_) => Err(TryLockError::WouldBlock),
        }
    }

    pub(crate) fn lock(&self) -> LockResult<StateGuard<'_, T>> {
        loop {
            if let Ok(guard) = self.try_lock() {
                return Ok(guard);
            }
            loom::thread::yield_now();
        }
    }
}

impl<T> Drop for StateGuard<'_, T> {
    fn drop(&mut self) {
        drop(self.value.take());
        self.mutex.is_locked.store(false, Ordering::Release);
    }
}

impl<T> Deref for StateGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.value.as_ref().expect("present until the drop")
    }
}

impl<T> DerefMut for StateGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.value.as_mut().expect("present until the drop")
    }
}
