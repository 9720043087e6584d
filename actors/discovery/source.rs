//! What a source is, and the two simplest.

use std::future::Future;
use std::pin::Pin;

use tokio::sync::watch;

use crate::discovery::{DiscoveryError, DuplicateId, worker_map};
use crate::protocol::{WorkerConfig, WorkerId, WorkerMap};

/// Somebody who knows which workers there should be.
///
/// Each value is the whole set, not a change, so one that is missed is made up for by the next. A `watch` channel is a
/// source; so is whatever implements this:
///
/// ```
/// use std::time::Duration;
/// use pointsman::DiscoverySource;
/// use pointsman::discovery::DiscoveryError;
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
    /// What metrics, logs and [`Router::discovery`](crate::Router::discovery) call it. Asked once.
    fn name(&self) -> String;

    /// Waits for the next value: the whole set of workers, or why there is none. After an error the last good set
    /// stands. `None`: the source has closed, and its workers stay as they are.
    ///
    /// Must be cancel-safe: a future that is dropped has taken nothing away.
    fn next(&mut self) -> impl Future<Output = Option<Result<WorkerMap, DiscoveryError>>> + Send;

    /// The next value is to be the present one, whether it has been given before or not. Called before the first, and
    /// whenever somebody new listens. Sources that give a value at each look need not do anything.
    fn rewind(&mut self) {}
}

/// The value that a future of a source brings.
type Next<'a> = Pin<Box<dyn Future<Output = Option<Result<WorkerMap, DiscoveryError>>> + Send + 'a>>;

/// Any source, behind a pointer.
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

/// Workers that are there from the start and stay.
///
/// ```
/// use pointsman::StaticList;
/// use pointsman::protocol::WorkerConfig;
///
/// let list = StaticList::new([(None, WorkerConfig::at("http://10.0.0.1:8000"))])?;
/// # Ok::<(), pointsman::discovery::DuplicateId>(())
/// ```
#[derive(Clone, Debug)]
pub struct StaticList {
    workers: WorkerMap,
    is_given: bool,
}

impl StaticList {
    /// A list of workers; those without an id get one that is [derived](crate::discovery::derived_id).
    ///
    /// # Errors
    /// Two workers with one id.
    pub fn new(workers: impl IntoIterator<Item = (Option<WorkerId>, WorkerConfig)>) -> Result<Self, DuplicateId> {
        Ok(Self { workers: worker_map(workers)?, is_given: false })
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
