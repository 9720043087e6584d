//! Cell with the latest version of a value that reloads replace.
//!
//! A reader gets one consistent value for as long as it needs: a reload replaces it, and requests in flight keep theirs.

use std::sync::Arc;

use axum::extract::FromRef;
use parking_lot::RwLock;

/// Handle to the latest value. Clones share it; handlers extract `State<Arc<T>>` once per request.
pub(crate) struct Latest<T>(Arc<RwLock<Arc<T>>>);

impl<T> Latest<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(Arc::new(RwLock::new(Arc::new(value))))
    }

    /// The latest value.
    pub(crate) fn get(&self) -> Arc<T> {
        // The lock guards a single pointer, which is always valid.
        Arc::clone(&self.0.read())
    }

    /// Replaces the value for later readers.
    pub(crate) fn replace(&self, value: T) {
        *self.0.write() = Arc::new(value);
    }
}

impl<T> Clone for Latest<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> FromRef<Latest<T>> for Arc<T> {
    fn from_ref(latest: &Latest<T>) -> Self {
        latest.get()
    }
}
