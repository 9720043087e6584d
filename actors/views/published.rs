//! A value that one owner replaces as a whole.

use std::sync::{Arc, Mutex, PoisonError};

/// The last published value; readers get a snapshot.
#[derive(Debug, Default)]
pub(crate) struct Published<T>(Mutex<Arc<T>>);

impl<T> Published<T> {
    /// The value as last published.
    pub(crate) fn get(&self) -> Arc<T> {
        Arc::clone(&self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn set(&self, value: T) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(value);
    }
}
