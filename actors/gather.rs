//! Gathers: one question to many actors, whose answers go on together.
//!
//! Owns the answers and the count of legs still out. Promises that the answers go on exactly once, when the last
//! leg is answered or lost. A leg is a move-only value: dropping it, wherever that happens, is its answer.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Where gathered answers go.
pub(crate) trait Onward<A>: Send + Sync {
    fn onward(&self, answers: Vec<A>);
}

struct Gather<A, N> {
    answers: Mutex<Answers<A>>,
    left: AtomicUsize,
    next: N,
}

struct Answers<A> {
    given: Vec<A>,
    /// The asker has gone on without the rest: each answer now goes on by itself.
    taken: bool,
}

/// The right to answer once.
pub(crate) struct Leg<A, N: Onward<A>> {
    gather: Arc<Gather<A, N>>,
    /// Cleared by [`Leg::finish`], which does by itself what dropping would.
    counts: bool,
}

impl<A, N> Gather<A, N> {
    fn lock<T>(&self, change: impl FnOnce(&mut Answers<A>) -> T) -> T {
        change(&mut self.answers.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl<A, N: Onward<A>> Leg<A, N> {
    /// The asker's own leg. While it is out, nothing goes on; [`Leg::fork`] makes the others.
    pub(crate) fn first(answers_expected: usize, next: N) -> Self {
        let answers = Mutex::new(Answers { given: Vec::with_capacity(answers_expected), taken: false });
        Self { gather: Arc::new(Gather { answers, left: AtomicUsize::new(1), next }), counts: true }
    }

    /// One more leg.
    pub(crate) fn fork(&self) -> Self {
        self.gather.left.fetch_add(1, Ordering::Relaxed);
        Self { gather: Arc::clone(&self.gather), counts: true }
    }

    /// What the question is about.
    pub(crate) fn next(&self) -> &N {
        &self.gather.next
    }

    /// A look at the answers from outside, which is no leg: it holds nothing up.
    pub(crate) fn watch(&self) -> Watch<A, N> {
        Watch { gather: Arc::clone(&self.gather) }
    }

    /// Adds one answer.
    pub(crate) fn push(&self, answer: A) {
        self.extend(std::iter::once(answer));
    }

    /// Adds answers.
    pub(crate) fn extend(&self, answers: impl Iterator<Item = A>) {
        let late = self.gather.lock(|known| {
            let mut late = Vec::new();
            if known.taken {
                late.extend(answers)
            } else {
                known.given.extend(answers)
            }
            late
        });
        if !late.is_empty() {
            self.gather.next.onward(late);
        }
    }

    /// Gives the leg back. The answers, if it was the last one out: then they do not go on by themselves.
    pub(crate) fn finish(mut self) -> Option<Vec<A>> {
        self.counts = false;
        self.is_last().then(|| self.gather.lock(|answers| std::mem::take(&mut answers.given)))
    }

    fn is_last(&self) -> bool {
        self.gather.left.fetch_sub(1, Ordering::AcqRel) == 1
    }
}

impl<A, N: Onward<A>> Drop for Leg<A, N> {
    fn drop(&mut self) {
        if self.counts && self.is_last() {
            let answers = self.gather.lock(|answers| std::mem::take(&mut answers.given));
            self.gather.next.onward(answers);
        }
    }
}

/// See [`Leg::watch`].
pub(crate) struct Watch<A, N> {
    gather: Arc<Gather<A, N>>,
}

impl<A, N> Watch<A, N> {
    /// The answers so far; those that come later go on one by one. `None` when the gather is complete: all answers are
    /// on their way to `onward` by themselves, and may already wait in the receiver's inbox.
    pub(crate) fn take(&self) -> Option<Vec<A>> {
        self.gather.lock(|answers| {
            if self.gather.left.load(Ordering::Acquire) == 0 {
                return None;
            }
            answers.taken = true;
            Some(std::mem::take(&mut answers.given))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<Vec<u32>>>>);

    impl Onward<u32> for Sink {
        fn onward(&self, answers: Vec<u32>) {
            self.0.lock().expect("no panic").push(answers);
        }
    }

    #[test]
    fn the_last_leg_sends_on_what_was_gathered_once() {
        let sink = Sink::default();
        let first = Leg::first(2, sink.clone());
        let (a, b) = (first.fork(), first.fork());
        drop(first);
        a.push(1);
        drop(a);
        assert!(sink.0.lock().expect("no panic").is_empty(), "b is still out");
        drop(b); // lost: it answers by being dropped
        assert_eq!(*sink.0.lock().expect("no panic"), vec![vec![1]]);
    }

    #[test]
    fn answers_that_come_after_the_asker_went_on_follow_one_by_one() {
        let sink = Sink::default();
        let first = Leg::first(2, sink.clone());
        let (a, b, watch) = (first.fork(), first.fork(), first.watch());
        assert_eq!(first.finish(), None);
        a.push(1);
        assert_eq!(watch.take(), Some(vec![1]));
        b.push(2);
        assert_eq!(*sink.0.lock().expect("no panic"), vec![vec![2]], "without waiting for a");
    }

    #[test]
    fn a_complete_gather_is_not_taken_from() {
        let sink = Sink::default();
        let first = Leg::first(1, sink.clone());
        let (a, watch) = (first.fork(), first.watch());
        assert_eq!(first.finish(), None);
        a.push(1);
        drop(a);
        assert_eq!(watch.take(), None, "the answer has gone on");
        assert_eq!(*sink.0.lock().expect("no panic"), vec![vec![1]]);
    }

    #[test]
    fn an_asker_that_finishes_last_takes_the_answers_itself() {
        let sink = Sink::default();
        let first = Leg::first(1, sink.clone());
        let leg = first.fork();
        leg.push(7);
        drop(leg);
        assert_eq!(first.finish(), Some(vec![7]));
        assert!(sink.0.lock().expect("no panic").is_empty());
    }
}
