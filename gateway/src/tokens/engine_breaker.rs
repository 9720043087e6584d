//! Circuit breakers for tokenization by engines.
//!
//! One breaker covers all engines of a model, and one each worker. A worker that hangs or is unreachable receives one
//! prompt per pause while another worker is available. `engine` defines failures.

use std::time::Duration;

use ahash::AHashMap;
use parking_lot::Mutex;
use tokio::time::Instant;

/// Consecutive failures before a pause.
const FAILURES_MAX: u32 = 5;

/// Duration of a pause. One query follows; its failure starts another pause.
const PAUSE: Duration = Duration::from_secs(10);

/// Maximum pause of one worker; each failure after the first doubles it.
const WORKER_PAUSE_MAX: Duration = Duration::from_secs(80);

/// Breaker over all engines of a model.
#[derive(Default)]
pub(super) struct Breaker {
    failures: u32,
    paused_until: Option<Instant>,
    pub(super) is_proven: bool,
}

impl Breaker {
    /// After a pause only the first query passes until it succeeds.
    pub(super) fn permit_query(&mut self, now: Instant) -> bool {
        match self.paused_until {
            None => true,
            Some(until) if now < until => false,
            Some(_) => {
                self.paused_until = Some(now + PAUSE);
                true
            }
        }
    }

    pub(super) fn responded(&mut self) {
        *self = Self { is_proven: true, ..Self::default() };
    }

    /// A rejection counts only if no query has ever succeeded. Otherwise invalid queries of one client would disable
    /// tokenization for all.
    pub(super) fn failed(&mut self, is_refusal: bool, now: Instant) {
        if is_refusal && self.is_proven {
            return self.responded();
        }
        self.failures += 1;
        if self.failures >= FAILURES_MAX {
            self.paused_until = Some(now + PAUSE);
        }
    }
}

/// Workers whose last query failed.
#[derive(Default)]
pub(super) struct WorkerBreakers(Mutex<AHashMap<String, Paused>>);

#[derive(Clone, Copy)]
struct Paused {
    until: Instant,
    pause: Duration,
    /// Whether the trial query after the pause is in progress.
    is_trial: bool,
}

impl WorkerBreakers {
    /// Whether the last query succeeded, or the pause is over.
    pub(super) fn is_available(&self, worker: &str, now: Instant) -> bool {
        self.0.lock().get(worker).is_none_or(|paused| paused.until <= now)
    }

    /// Records a query: after a pause the worker receives no other query until this one succeeds or another pause has
    /// passed.
    pub(super) fn query_started(&self, worker: &str, now: Instant) {
        if let Some(paused) = self.0.lock().get_mut(worker).filter(|paused| paused.until <= now) {
            paused.until = now + paused.pause;
            paused.is_trial = true;
        }
    }

    pub(super) fn responded(&self, worker: &str) {
        let mut workers = self.0.lock();
        if !workers.is_empty() {
            workers.remove(worker);
        }
    }

    /// Records a timeout or a connection failure. Several concurrent failures count as one.
    pub(super) fn failed(&self, worker: &str, now: Instant) {
        let mut workers = self.0.lock();
        // Drops workers that have left.
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
    fn failed_worker_gets_one_query_per_pause() {
        let (start, workers) = (Instant::now(), WorkerBreakers::default());
        assert!(workers.is_available("a", start));
        workers.query_started("a", start);
        // Three concurrent queries.
        (0..3).for_each(|_| workers.failed("a", start));
        assert!(
            !workers.is_available("a", start + PAUSE - Duration::from_millis(1)) && workers.is_available("b", start)
        );
        let later = start + PAUSE;
        assert!(workers.is_available("a", later));
        workers.query_started("a", later);
        assert!(!workers.is_available("a", later), "one trial query at a time");
        workers.responded("a");
        assert!(workers.is_available("a", later));
    }

    #[test]
    fn worker_pauses_double_up_to_a_limit() {
        let (mut now, workers) = (Instant::now(), WorkerBreakers::default());
        let mut pauses = Vec::new();
        for _ in 0..6 {
            workers.query_started("a", now);
            workers.failed("a", now);
            let begun = now;
            while !workers.is_available("a", now) {
                now += Duration::from_secs(1);
            }
            pauses.push((now - begun).as_secs());
        }
        assert_eq!(pauses, [10, 20, 40, 80, 80, 80]);
    }

    #[test]
    fn five_failures_pause_and_one_success_resumes() {
        let start = Instant::now();
        let mut breaker = Breaker::default();
        breaker.responded();
        for n in 0..FAILURES_MAX {
            assert!(breaker.permit_query(start), "failure {n}");
            breaker.failed(false, start);
        }
        assert!(!breaker.permit_query(start + PAUSE - Duration::from_millis(1)));
        let later = start + PAUSE;
        assert!(breaker.permit_query(later) && !breaker.permit_query(later));
        breaker.failed(false, later);
        assert!(!breaker.permit_query(later + PAUSE - Duration::from_millis(1)) && breaker.permit_query(later + PAUSE));
        breaker.responded();
        assert!(breaker.permit_query(later + PAUSE) && breaker.permit_query(later + PAUSE));
    }

    #[test]
    fn rejections_count_until_the_first_success() {
        let start = Instant::now();
        let (mut never, mut once) = (Breaker::default(), Breaker::default());
        once.responded();
        for _ in 0..FAILURES_MAX {
            never.failed(true, start);
            once.failed(true, start);
        }
        assert!(!never.permit_query(start) && once.permit_query(start));
    }
}
