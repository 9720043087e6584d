//! Task of a request, or of one leg of a disaggregated request.

use tokio::runtime::Handle;
use tokio::task::JoinSet;

/// A task that is cancelled with this value. The default has ended.
pub(super) struct Leg<T: 'static>(JoinSet<T>);

impl<T> Default for Leg<T> {
    fn default() -> Self {
        Self(JoinSet::new())
    }
}

impl<T: Send + 'static> Leg<T> {
    pub(super) fn start(runtime: &Handle, leg: impl Future<Output = T> + Send + 'static) -> Self {
        let mut task = JoinSet::new();
        task.spawn_on(leg, runtime);
        Self(task)
    }

    /// The end of the leg; pending after the first call that returned it.
    pub(super) async fn end(&mut self) -> T {
        match self.0.join_next().await.map(|ended| ended.map_err(|error| error.try_into_panic())) {
            Some(Ok(end)) => end,
            Some(Err(Ok(panic))) => std::panic::resume_unwind(panic),
            // Cancelled by a shutdown of the runtime, or ended before.
            Some(Err(Err(_))) | None => std::future::pending().await,
        }
    }

    /// Whether [`end`](Self::end) has returned.
    pub(super) fn has_ended(&self) -> bool {
        self.0.is_empty()
    }
}
