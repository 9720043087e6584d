//! Task of one leg of a disaggregated request.

use tokio::task::JoinHandle;

/// A leg in a task of its own, which is cancelled with this value.
pub(super) struct Leg<T>(Option<JoinHandle<T>>);

impl<T: Send + 'static> Leg<T> {
    pub(super) fn start(leg: impl Future<Output = T> + Send + 'static) -> Self {
        Self(Some(tokio::spawn(leg)))
    }

    /// The end of the leg; pending after the first call that returned it.
    pub(super) async fn end(&mut self) -> T {
        match &mut self.0 {
            Some(handle) => match handle.await {
                Ok(end) => {
                    self.0 = None;
                    end
                }
                Err(error) => match error.try_into_panic() {
                    Ok(panic) => std::panic::resume_unwind(panic),
                    // Cancelled by a shutdown of the runtime.
                    Err(_) => std::future::pending().await,
                },
            },
            None => std::future::pending().await,
        }
    }

    /// Whether [`end`](Self::end) has returned.
    pub(super) fn has_ended(&self) -> bool {
        self.0.is_none()
    }
}

impl<T> Drop for Leg<T> {
    fn drop(&mut self) {
        if let Some(handle) = &self.0 {
            handle.abort();
        }
    }
}
