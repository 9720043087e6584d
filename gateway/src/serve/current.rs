//! The state that requests are served with, as a snapshot.
//!
//! Owns the pointer to the snapshot. Promises that a reader gets one consistent [`App`] and keeps it as long as it likes: a
//! reload replaces the snapshot and leaves requests in flight on the one they began with. Leaves building the next snapshot to
//! the reload.

use std::sync::{Arc, PoisonError, RwLock};

use axum::extract::FromRef;

use super::App;

/// Handle to the current snapshot. Clones share it; handlers extract `State<Arc<App>>`, once per request.
#[derive(Clone)]
pub(crate) struct Current(Arc<RwLock<Arc<App>>>);

impl Current {
    pub(crate) fn new(app: App) -> Self {
        Self(Arc::new(RwLock::new(Arc::new(app))))
    }

    /// The snapshot now.
    pub(crate) fn get(&self) -> Arc<App> {
        // The lock guards one pointer, which is whole at any time.
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Puts another snapshot in its place, for requests to come.
    pub(crate) fn replace(&self, app: App) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(app);
    }
}

impl FromRef<Current> for Arc<App> {
    fn from_ref(current: &Current) -> Self {
        current.get()
    }
}
