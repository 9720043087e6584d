//! Scatter-gather: one query to several actors, whose responses reach one continuation together.
//!
//! Holds the responses so far and the number of outstanding tokens. The continuation receives the responses exactly
//! once, when the last [`ReplyToken`] has been dropped. A token cannot be copied, so a lost message counts as an empty
//! response.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Receiver of the collected responses.
pub(crate) trait Continuation<A>: Send + Sync {
    /// Takes the collected responses; after [`JoinObserver::take`], one late response at a time.
    fn run(&self, responses: Vec<A>);
}

/// Shared state of one query.
pub(crate) struct Join<A, C: ?Sized> {
    responses: Mutex<Responses<A>>,
    outstanding: AtomicUsize,
    continuation: C,
}

struct Responses<A> {
    collected: Vec<A>,
    /// Set by [`JoinObserver::take`]; each later response reaches the continuation separately.
    taken: bool,
}

/// One actor's share of a query: the right to respond once. Dropping it completes the share.
pub(crate) struct ReplyToken<A, C: Continuation<A> + ?Sized> {
    join: Arc<Join<A, C>>,
    /// Cleared by [`ReplyToken::finish`], which decrements the count itself.
    counts: bool,
}

impl<A, C: ?Sized> Join<A, C> {
    fn lock<T>(&self, change: impl FnOnce(&mut Responses<A>) -> T) -> T {
        change(&mut self.responses.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl<A, C: Continuation<A>> ReplyToken<A, C> {
    /// The sender's own token, with capacity for `responses_expected`. It delays the continuation while further tokens
    /// are [forked](ReplyToken::fork) and sent.
    pub(crate) fn open(responses_expected: usize, continuation: C) -> Self {
        let responses = Mutex::new(Responses { collected: Vec::with_capacity(responses_expected), taken: false });
        Self { join: Arc::new(Join { responses, outstanding: AtomicUsize::new(1), continuation }), counts: true }
    }
}

impl<A, C: Continuation<A> + ?Sized> ReplyToken<A, C> {
    /// One more token of the same query.
    pub(crate) fn fork(&self) -> Self {
        self.join.outstanding.fetch_add(1, Ordering::Relaxed);
        Self { join: Arc::clone(&self.join), counts: true }
    }

    /// As [`ReplyToken::fork`], with the type of the continuation erased by `coerce`.
    pub(crate) fn fork_unsized<D: Continuation<A> + ?Sized>(
        &self,
        coerce: impl FnOnce(Arc<Join<A, C>>) -> Arc<Join<A, D>>,
    ) -> ReplyToken<A, D> {
        self.join.outstanding.fetch_add(1, Ordering::Relaxed);
        ReplyToken { join: coerce(Arc::clone(&self.join)), counts: true }
    }

    /// The continuation, which also carries the query.
    pub(crate) fn continuation(&self) -> &C {
        &self.join.continuation
    }

    /// Read access to the responses without a token.
    pub(crate) fn observe(&self) -> JoinObserver<A, C> {
        JoinObserver { join: Arc::clone(&self.join) }
    }

    /// Adds one response.
    pub(crate) fn push(&self, response: A) {
        self.extend(std::iter::once(response));
    }

    /// Adds responses.
    pub(crate) fn extend(&self, responses: impl Iterator<Item = A>) {
        let late = self.join.lock(|known| {
            let mut late = Vec::new();
            if known.taken {
                late.extend(responses)
            } else {
                known.collected.extend(responses)
            }
            late
        });
        if !late.is_empty() {
            self.join.continuation.run(late);
        }
    }

    /// Completes this token. Returns the responses if it was the last one; the continuation then does not run.
    pub(crate) fn finish(mut self) -> Option<Vec<A>> {
        self.counts = false;
        self.is_last().then(|| self.join.lock(|responses| std::mem::take(&mut responses.collected)))
    }

    fn is_last(&self) -> bool {
        self.join.outstanding.fetch_sub(1, Ordering::AcqRel) == 1
    }
}

impl<A, C: Continuation<A> + ?Sized> Drop for ReplyToken<A, C> {
    fn drop(&mut self) {
        if self.counts && self.is_last() {
            let responses = self.join.lock(|responses| std::mem::take(&mut responses.collected));
            self.join.continuation.run(responses);
        }
    }
}

/// See [`ReplyToken::observe`].
pub(crate) struct JoinObserver<A, C: ?Sized> {
    join: Arc<Join<A, C>>,
}

impl<A, C: ?Sized> JoinObserver<A, C> {
    /// The responses so far; each later one reaches the continuation separately. `None` when the join is complete: the
    /// continuation has all responses, and its message may already be queued.
    pub(crate) fn take(&self) -> Option<Vec<A>> {
        self.join.lock(|responses| {
            if self.join.outstanding.load(Ordering::Acquire) == 0 {
                return None;
            }
            responses.taken = true;
            Some(std::mem::take(&mut responses.collected))
        })
    }
}
