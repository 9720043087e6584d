//! One encoded state for all viewers, computed only while there are viewers.
//!
//! The first viewer starts a task, which computes a frame per [`INTERVAL`] and ends when it finds no viewers. A viewer
//! that reads slowly misses frames and does not delay others.

use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};
use tokio_stream::wrappers::WatchStream;

/// Interval of frames.
pub(super) const INTERVAL: Duration = Duration::from_millis(250);

/// Maximum concurrent viewers. Connections are left for other requests of operators.
pub(super) const VIEWERS_MAX: usize = 16;

/// The feed of one gateway.
pub(super) struct Feed {
    /// Present while the task runs. Locked during the decision to end it, so that no viewer is left behind.
    frames: Mutex<Option<watch::Sender<Bytes>>>,
}

/// Viewers above [`VIEWERS_MAX`].
#[derive(Debug)]
pub(super) struct TooManyViewers;

impl Feed {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self { frames: Mutex::new(None) })
    }

    /// The frames from now on. The stream ends when `next` returns none.
    pub(super) fn watch<F>(
        self: &Arc<Self>,
        next: impl Fn() -> F + Send + 'static,
    ) -> Result<WatchStream<Bytes>, TooManyViewers>
    where
        F: Future<Output = Option<Bytes>> + Send + 'static,
    {
        let mut frames = self.lock();
        let receiver = match &*frames {
            Some(sender) if sender.receiver_count() >= VIEWERS_MAX => return Err(TooManyViewers),
            Some(sender) => sender.subscribe(),
            None => {
                let (sender, receiver) = watch::channel(Bytes::new());
                *frames = Some(sender.clone());
                tokio::spawn(Arc::clone(self).send(sender, next));
                receiver
            }
        };
        Ok(WatchStream::from_changes(receiver))
    }

    async fn send<F>(self: Arc<Self>, sender: watch::Sender<Bytes>, next: impl Fn() -> F)
    where
        F: Future<Output = Option<Bytes>>,
    {
        // Also after a panic in `next`: the next viewer starts again.
        let _end = End { feed: &self, sender: &sender };
        let mut ticks = interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            if self.ends_without_viewers(&sender) {
                return;
            }
            let Some(frame) = next().await else { return };
            sender.send_replace(frame);
        }
    }

    fn ends_without_viewers(&self, sender: &watch::Sender<Bytes>) -> bool {
        let mut frames = self.lock();
        let ends = sender.receiver_count() == 0;
        if ends {
            *frames = None;
        }
        ends
    }

    fn lock(&self) -> MutexGuard<'_, Option<watch::Sender<Bytes>>> {
        // The value is replaced as a whole.
        self.frames.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ends the task of this sender in the feed when dropped, unless another one runs already.
struct End<'a> {
    feed: &'a Feed,
    sender: &'a watch::Sender<Bytes>,
}

impl Drop for End<'_> {
    fn drop(&mut self) {
        let mut frames = self.feed.lock();
        if frames.as_ref().is_some_and(|frames| frames.same_channel(self.sender)) {
            *frames = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use tokio::time::sleep;
    use tokio_stream::StreamExt as _;

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
