//! One encoded state for all viewers, computed only while there are viewers.
//!
//! The first viewer that needs a frame computes it, at most one per [`INTERVAL`], while the others wait for it. A viewer
//! that reads slowly misses frames and does not delay others.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream::{BoxStream, unfold};
use tokio::sync::{Mutex, Semaphore, TryAcquireError};
use tokio::time::{Instant, sleep_until};

/// Interval of frames.
pub(super) const INTERVAL: Duration = Duration::from_millis(250);

/// Maximum concurrent viewers. Connections are left for other requests of operators.
pub(super) const VIEWERS_MAX: usize = 16;

/// The feed of one gateway.
pub(super) struct Feed {
    viewers: Arc<Semaphore>,
    /// Locked during the wait for the next frame and its computation.
    latest: Mutex<Latest>,
}

struct Latest {
    frame: Bytes,
    number: u64,
    /// Time of the next frame.
    due: Instant,
}

impl Feed {
    pub(super) fn new() -> Arc<Self> {
        let latest = Mutex::new(Latest { frame: Bytes::new(), number: 0, due: Instant::now() });
        Arc::new(Self { viewers: Arc::new(Semaphore::new(VIEWERS_MAX)), latest })
    }

    /// The frames from now on. The stream ends when `next` returns none.
    ///
    /// # Errors
    /// There are [`VIEWERS_MAX`] viewers.
    pub(super) fn watch<F: Future<Output = Option<Bytes>> + Send>(
        self: &Arc<Self>,
        next: impl Fn() -> F + Send + Sync + 'static,
    ) -> Result<BoxStream<'static, Bytes>, TryAcquireError> {
        let permit = Arc::clone(&self.viewers).try_acquire_owned()?;
        let frames = unfold((Arc::clone(self), permit, next, 0), |(feed, permit, next, seen)| async move {
            let (frame, number) = feed.after(seen, &next).await?;
            Some((frame, (feed, permit, next, number)))
        });
        Ok(frames.boxed())
    }

    /// The newest frame, another than the one with this number.
    async fn after<F: Future<Output = Option<Bytes>>>(&self, seen: u64, next: &impl Fn() -> F) -> Option<(Bytes, u64)> {
        let mut latest = self.latest.lock().await;
        if latest.number == seen {
            sleep_until(latest.due).await;
        }
        if latest.due <= Instant::now() {
            let frame = next().await?;
            *latest = Latest { frame, number: latest.number + 1, due: Instant::now() + INTERVAL };
        }
        Some((latest.frame.clone(), latest.number))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use tokio::time::sleep;

    use super::*;

    /// Frames with the number of computations.
    fn counted(computed: &Arc<AtomicU64>, last: u64) -> impl Fn() -> std::future::Ready<Option<Bytes>> + use<> {
        let computed = Arc::clone(computed);
        move || {
            let n = computed.fetch_add(1, Ordering::Relaxed) + 1;
            std::future::ready((n <= last).then(|| Bytes::from(n.to_string())))
        }
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_computed_without_viewers() {
        let (feed, computed) = (Feed::new(), Arc::<AtomicU64>::default());
        sleep(INTERVAL * 8).await;
        assert_eq!(computed.load(Ordering::Relaxed), 0);
        let mut viewer = feed.watch(counted(&computed, u64::MAX)).expect("few viewers");
        viewer.next().await.expect("a frame");
        drop(viewer);
        sleep(INTERVAL * 8).await;
        let after = computed.load(Ordering::Relaxed);
        assert!(after <= 2, "{after} frames for one viewer that has left");
        sleep(INTERVAL * 8).await;
        assert_eq!(computed.load(Ordering::Relaxed), after);
        // The next viewer starts it again.
        let mut viewer = feed.watch(counted(&computed, u64::MAX)).expect("few viewers");
        assert_eq!(viewer.next().await, Some(Bytes::from((after + 1).to_string())));
    }

    #[tokio::test(start_paused = true)]
    async fn a_feed_that_ends_starts_again() {
        let (feed, computed) = (Feed::new(), Arc::<AtomicU64>::default());
        let mut viewer = feed.watch(counted(&computed, 2)).expect("few viewers");
        let frames = [viewer.next().await, viewer.next().await, viewer.next().await];
        assert_eq!(frames, [Some(Bytes::from("1")), Some(Bytes::from("2")), None]);
        let mut viewer = feed.watch(counted(&Arc::default(), 9)).expect("few viewers");
        assert_eq!(viewer.next().await, Some(Bytes::from("1")));
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_viewer_misses_frames() {
        let (feed, computed) = (Feed::new(), Arc::<AtomicU64>::default());
        let mut slow = feed.watch(counted(&computed, u64::MAX)).expect("few viewers");
        slow.next().await.expect("a frame");
        sleep(INTERVAL * 10).await;
        let frame = slow.next().await.expect("a frame");
        let last = computed.load(Ordering::Relaxed).to_string();
        assert_eq!(frame, Bytes::from(last), "the newest one");
    }
}
