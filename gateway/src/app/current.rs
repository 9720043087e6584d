//! Snapshot of the serving state.
//!
//! A reader gets one consistent [`App`] for as long as it needs: a reload replaces the snapshot, and requests in flight
//! keep theirs. The reload builds the next snapshot.

use std::sync::{Arc, PoisonError, RwLock};

use axum::extract::FromRef;

use super::App;

/// Handle to the current snapshot. Clones share it; handlers extract `State<Arc<App>>` once per request.
#[derive(Clone)]
pub(crate) struct Current(Arc<RwLock<Arc<App>>>);

impl Current {
    pub(crate) fn new(app: App) -> Self {
        Self(Arc::new(RwLock::new(Arc::new(app))))
    }

    /// The current snapshot.
    pub(crate) fn get(&self) -> Arc<App> {
        // The lock guards a single pointer, which is always valid.
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Replaces the snapshot for future requests.
    pub(crate) fn replace(&self, app: App) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(app);
    }
}

impl FromRef<Current> for Arc<App> {
    fn from_ref(current: &Current) -> Self {
        current.get()
    }
}
