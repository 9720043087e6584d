//! Context of a request at the scheduler.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, oneshot};

use crate::actors::delivery::reply::Reply;
use crate::actors::telemetry::PhaseTimestamps;
use crate::directory::Lease;
use crate::predict::SpeculativePrompt;
use crate::shell::scheduler::RequestLease;

/// Context of one request at the scheduler: its lease and its reply channel.
pub(crate) struct RequestContext {
    /// Present for a request that books.
    pub(crate) lease: Option<Arc<Lease>>,
    /// Permit of the waiting room, released when the request has its reply or is lost. Before `answer`, because fields are
    /// dropped in this order: the caller of a lost request wakes up and needs a permit for the next attempt.
    pub(crate) permit: OwnedSemaphorePermit,
    pub(crate) answer: oneshot::Sender<Reply>,
    /// Speculative entry that the booking creates, if entries are speculative.
    pub(crate) speculative_prompt: Option<Box<SpeculativePrompt>>,
    /// Present if the phases of the request are measured.
    pub(crate) timestamps: Option<Arc<PhaseTimestamps>>,
}

impl RequestLease for RequestContext {
    fn lease(&self) -> Option<&Arc<Lease>> {
        self.lease.as_ref()
    }
}

impl RequestContext {
    /// Request id of a booking; empty for a query.
    pub(super) fn request_id(&self) -> &str {
        self.lease.as_ref().map_or("", |lease| lease.request_id())
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future as _;
    use std::pin::pin;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Context, Poll, Wake, Waker};

    use tokio::sync::Semaphore;

    use super::*;

    /// Records the free permits at the time of the wake-up.
    struct Woken {
        permits: Arc<Semaphore>,
        free: AtomicUsize,
    }

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.free.store(self.permits.available_permits(), Ordering::Relaxed);
        }
    }

    /// With all permits in use, its next attempt was rejected as overload.
    #[test]
    fn a_lost_request_frees_its_permit_before_its_caller_wakes_up() {
        let permits = Arc::new(Semaphore::new(1));
        let permit = Arc::clone(&permits).try_acquire_owned().expect("free");
        let (answer, receiver) = oneshot::channel();
        let context = RequestContext { lease: None, permit, answer, speculative_prompt: None, timestamps: None };
        let woken = Arc::new(Woken { permits, free: AtomicUsize::new(0) });
        let waker = Waker::from(Arc::clone(&woken));
        let mut receiver = pin!(receiver);
        assert!(receiver.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        drop(context);
        assert_eq!(woken.free.load(Ordering::Relaxed), 1);
        assert!(matches!(receiver.poll(&mut Context::from_waker(&waker)), Poll::Ready(Err(_))));
    }
}
