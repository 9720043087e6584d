//! The trait of discovery sources, and the two simplest ones.

use std::future::Future;
use std::pin::Pin;

use tokio::sync::watch;

use crate::discovery::{DiscoveryError, DuplicateWorker, worker_map};
use crate::protocol::{WorkerConfig, WorkerId, WorkerMap};

/// A source of the desired set of workers.
///
/// Each value is the complete set, not a change, so the next value replaces a missed one. A `watch` channel is a
/// source, and so is each implementation of this trait:
///
/// ```
/// use std::time::Duration;
/// use pointsman::{DiscoveryError, DiscoverySource};
/// use pointsman::protocol::{WorkerConfig, WorkerId, WorkerMap};
///
/// /// Asks a registry again and again.
/// struct Registry {
///     asked: bool,
/// }
///
/// impl DiscoverySource for Registry {
///     fn name(&self) -> String {
///         "registry".to_owned()
///     }
///
///     async fn next(&mut self) -> Option<Result<WorkerMap, DiscoveryError>> {
///         if self.asked {
///             tokio::time::sleep(Duration::from_secs(10)).await;
///         }
///         self.asked = true;
///         Some(Ok(WorkerMap::from([(WorkerId(1), WorkerConfig::at("http://10.0.0.1:8000"))])))
///     }
/// }
/// ```
pub trait DiscoverySource: Send + 'static {
    /// Name in metrics, logs and [`Router::discovery`](crate::Router::discovery). Read once.
    fn name(&self) -> String;

    /// Waits for the next value: the complete set of workers, or an error. After an error the last valid set stays in
    /// force. `None`: the source has closed, and its workers stay unchanged.
    ///
    /// Must be cancel-safe: dropping the future must not consume a value.
    fn next(&mut self) -> impl Future<Output = Option<Result<WorkerMap, DiscoveryError>>> + Send;

    /// Makes the next value the present one, even if it has been returned before. Called before the first value, and
    /// for each new follower. Sources that return a value at every poll need no implementation.
    fn rewind(&mut self) {}
}

/// Boxed future of the next value of a source.
type Next<'a> = Pin<Box<dyn Future<Output = Option<Result<WorkerMap, DiscoveryError>>> + Send + 'a>>;

/// Object-safe form of a source.
pub(crate) trait AnySource: Send {
    fn next(&mut self) -> Next<'_>;
    fn rewind(&mut self);
}

impl<S: DiscoverySource> AnySource for S {
    fn next(&mut self) -> Next<'_> {
        Box::pin(DiscoverySource::next(self))
    }

    fn rewind(&mut self) {
        DiscoverySource::rewind(self);
    }
}

impl DiscoverySource for watch::Receiver<WorkerMap> {
    fn name(&self) -> String {
        "channel".to_owned()
    }

    async fn next(&mut self) -> Option<Result<WorkerMap, DiscoveryError>> {
        self.changed().await.ok()?;
        Some(Ok(self.borrow_and_update().clone()))
    }

    fn rewind(&mut self) {
        self.mark_changed();
    }
}

/// A fixed set of workers.
///
/// ```
/// use pointsman::StaticList;
/// use pointsman::protocol::WorkerConfig;
///
/// let list = StaticList::new([(None, WorkerConfig::at("http://10.0.0.1:8000"))])?;
/// # Ok::<(), pointsman::internals::discovery::DuplicateWorker>(())
/// ```
#[derive(Clone, Debug)]
pub struct StaticList {
    workers: WorkerMap,
    is_given: bool,
}

impl StaticList {
    /// A list of workers; those without an id receive a [derived](crate::protocol::WorkerId::derived) one.
    ///
    /// # Errors
    /// Two workers with one id.
    pub fn new(workers: impl IntoIterator<Item = (Option<WorkerId>, WorkerConfig)>) -> Result<Self, DuplicateWorker> {
        Ok(Self { workers: worker_map(workers)?, is_given: false })
    }

    /// The workers by id.
    #[must_use]
    pub fn into_workers(self) -> WorkerMap {
        self.workers
    }
}

impl DiscoverySource for StaticList {
    fn name(&self) -> String {
        "static".to_owned()
    }

    async fn next(&mut self) -> Option<Result<WorkerMap, DiscoveryError>> {
        (!std::mem::replace(&mut self.is_given, true)).then(|| Ok(self.workers.clone()))
    }

    fn rewind(&mut self) {
        self.is_given = false;
    }
}
