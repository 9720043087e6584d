//! When engines are not sent prompts to tokenise.
//!
//! Owns the circuit breaker over a model's engines together, and one for each worker. Promises that a worker which hangs or
//! cannot be reached gets one prompt for each pause, while there is another. Leaves what a failure is to `engine`.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ahash::AHashMap;
use tokio::time::Instant;

/// Failures one after the other, after which the engine is left alone.
const FAILURES_MAX: u32 = 5;

/// For how long. After that one question is asked; if it fails too, as long again.
const PAUSE: Duration = Duration::from_secs(10);

/// Longest pause of one worker: each failure after the first doubles it.
const WORKER_PAUSE_MAX: Duration = Duration::from_secs(80);

/// When not to ask.
#[derive(Default)]
pub(super) struct Breaker {
    failures: u32,
    paused_until: Option<Instant>,
    is_proven: bool,
}

impl Breaker {
    /// Whether it has ever been answered.
    pub(super) fn is_proven(&self) -> bool {
        self.is_proven
    }

    /// Whether a pause has begun and no answer has ended it.
    pub(super) fn is_paused(&self) -> bool {
        self.paused_until.is_some()
    }

    /// After a pause the first that asks may, and the others once it has been answered.
    pub(super) fn may_ask(&mut self, now: Instant) -> bool {
        match self.paused_until {
            None => true,
            Some(until) if now < until => false,
            Some(_) => {
                self.paused_until = Some(now + PAUSE);
                true
            }
        }
    }

    pub(super) fn answered(&mut self) {
        *self = Self { is_proven: true, ..Self::default() };
    }

    /// A refusal says something of the engine only if it has never answered: else one client's questions that make no
    /// sense would take the tokens from all.
    pub(super) fn failed(&mut self, is_refusal: bool, now: Instant) {
        if is_refusal && self.is_proven {
            return self.answered();
        }
        self.failures += 1;
        if self.failures >= FAILURES_MAX {
            self.paused_until = Some(now + PAUSE);
        }
    }
}

/// The workers that failed last time.
#[derive(Default)]
pub(super) struct WorkerBreakers(Mutex<AHashMap<String, Paused>>);

#[derive(Clone, Copy)]
struct Paused {
    until: Instant,
    pause: Duration,
    /// Whether the prompt that ends the pause is under way.
    is_trial: bool,
}

impl WorkerBreakers {
    fn workers(&self) -> MutexGuard<'_, AHashMap<String, Paused>> {
        // Every change is one insertion or removal.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it did not fail last time, or its pause is over.
    pub(super) fn may_ask(&self, worker: &str, now: Instant) -> bool {
        self.workers().get(worker).is_none_or(|paused| paused.until <= now)
    }

    /// It is sent a prompt: after a pause it gets no other before that is answered, or as long again.
    pub(super) fn asked(&self, worker: &str, now: Instant) {
        if let Some(paused) = self.workers().get_mut(worker).filter(|paused| paused.until <= now) {
            paused.until = now + paused.pause;
            paused.is_trial = true;
        }
    }

    pub(super) fn answered(&self, worker: &str) {
        let mut workers = self.workers();
        if !workers.is_empty() {
            workers.remove(worker);
        }
    }

    /// It did not answer in time, or cannot be reached. Several that were under way at once count as one.
    pub(super) fn failed(&self, worker: &str, now: Instant) {
        let mut workers = self.workers();
        // Workers that have left are not kept for ever.
        workers.retain(|_, paused| now < paused.until + WORKER_PAUSE_MAX);
        let first = Paused { until: now, pause: PAUSE, is_trial: false };
        let paused = workers.entry(worker.to_owned()).or_insert(first);
        if std::mem::take(&mut paused.is_trial) {
            paused.pause = (paused.pause * 2).min(WORKER_PAUSE_MAX);
        }
        paused.until = now + paused.pause;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_that_fails_is_asked_once_after_each_pause() {
        let (start, workers) = (Instant::now(), WorkerBreakers::default());
        assert!(workers.may_ask("a", start));
        workers.asked("a", start);
        // Three that were under way.
        (0..3).for_each(|_| workers.failed("a", start));
        assert!(!workers.may_ask("a", start + PAUSE - Duration::from_millis(1)) && workers.may_ask("b", start));
        let later = start + PAUSE;
        assert!(workers.may_ask("a", later));
        workers.asked("a", later);
        assert!(!workers.may_ask("a", later), "one at a time");
        workers.answered("a");
        assert!(workers.may_ask("a", later));
    }

    #[test]
    fn pauses_of_a_worker_grow_and_end() {
        let (mut now, workers) = (Instant::now(), WorkerBreakers::default());
        let mut pauses = Vec::new();
        for _ in 0..6 {
            workers.asked("a", now);
            workers.failed("a", now);
            let begun = now;
            while !workers.may_ask("a", now) {
                now += Duration::from_secs(1);
            }
            pauses.push((now - begun).as_secs());
        }
        assert_eq!(pauses, [10, 20, 40, 80, 80, 80]);
    }

    #[test]
    fn five_failures_pause_and_one_question_ends_the_pause() {
        let start = Instant::now();
        let mut breaker = Breaker::default();
        breaker.answered();
        for n in 0..FAILURES_MAX {
            assert!(breaker.may_ask(start), "failure {n}");
            breaker.failed(false, start);
        }
        assert!(!breaker.may_ask(start + PAUSE - Duration::from_millis(1)));
        let later = start + PAUSE;
        assert!(breaker.may_ask(later) && !breaker.may_ask(later));
        breaker.failed(false, later);
        assert!(!breaker.may_ask(later + PAUSE - Duration::from_millis(1)) && breaker.may_ask(later + PAUSE));
        breaker.answered();
        assert!(breaker.may_ask(later + PAUSE) && breaker.may_ask(later + PAUSE));
    }

    #[test]
    fn refusals_count_until_the_engine_has_answered_once() {
        let start = Instant::now();
        let (mut never, mut once) = (Breaker::default(), Breaker::default());
        once.answered();
        for _ in 0..FAILURES_MAX {
            never.failed(true, start);
            once.failed(true, start);
        }
        assert!(!never.may_ask(start) && once.may_ask(start));
    }
}
