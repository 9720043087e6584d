//! Load of a rank by the bookings of other replicas, and their arrivals.
//!
//! Replicas publish their own contribution to each rank at intervals. [`PeerLoad`] is the sum of the others' for one rank,
//! [`PlacementRate`] the sum of their arrival rates for the pool. Both are published in cells with one writer, which the
//! scheduler and the rank's sequence actor read. Numbers of one cell may belong to two consecutive publications; every
//! publication is followed by a notice, after which they are read again.
//!
//! All prefills of a rank share one engine, and each replica sees the order of its own only. A rank's queue is therefore
//! modelled as shared in proportion: own and other prefills progress together, at one second per second in total.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::protocol::Timestamp;
use crate::record::bytes::recorded;

/// Load of one rank by the bookings of all other replicas.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeerLoad {
    /// Active blocks.
    pub active_blocks: u32,
    /// Blocks that a decode step reads.
    pub read_blocks: u32,
    /// Active requests.
    pub requests: u32,
    /// Prefills that are not known to be complete.
    pub prefills: u32,
    /// Tokens of prefills with a modelled time, at [`at`](Self::at).
    pub prefill_tokens: u32,
    /// Tokens of the other prefills.
    pub unmodelled_tokens: u32,
    /// Modelled time of the prefills alone on the rank, at [`at`](Self::at).
    pub prefill: Duration,
    /// Time to which the prefills refer.
    pub at: Timestamp,
    /// Time with prefills of other replicas until [`at`](Self::at), and the number of such periods that have ended.
    pub busy: (Duration, u32),
}

impl PeerLoad {
    /// Time that the prefills still take at `now`, beside own ones that took `own` at that time.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pointsman::internals::load::PeerLoad;
    /// use pointsman::protocol::Timestamp;
    ///
    /// let peers = PeerLoad { prefill: Duration::from_secs(6), ..PeerLoad::default() };
    /// let after = |seconds: u64, own: u64| peers.prefill_left(Duration::from_secs(own), Timestamp(seconds * 1_000_000_000));
    /// assert_eq!(after(3, 0), Duration::from_secs(3));
    /// assert_eq!(after(3, 3), Duration::from_secs(4)); // two thirds of the progress
    /// assert_eq!(after(60, 3), Duration::ZERO);
    /// ```
    #[must_use]
    #[inline]
    pub fn prefill_left(&self, own: Duration, now: Timestamp) -> Duration {
        if self.prefill.is_zero() {
            return Duration::ZERO;
        }
        let elapsed = now.since(self.at);
        if own.is_zero() {
            return self.prefill.saturating_sub(elapsed);
        }
        let share = self.prefill.as_secs_f64() / (self.prefill.as_secs_f64() + own.as_secs_f64());
        self.prefill.saturating_sub(elapsed.mul_f64(share))
    }

    /// Tokens of the prefills at `now`: modelled ones in proportion to their time.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a share of a count is a count")]
    pub fn prefill_tokens_left(&self, own: Duration, now: Timestamp) -> u64 {
        let unmodelled = u64::from(self.unmodelled_tokens);
        if self.prefill.is_zero() {
            return unmodelled;
        }
        let share = self.prefill_left(own, now).as_secs_f64() / self.prefill.as_secs_f64();
        unmodelled + (f64::from(self.prefill_tokens) * share).ceil() as u64
    }

    /// Time with prefills of other replicas until `now`.
    #[must_use]
    pub fn busy_until(&self, now: Timestamp) -> Duration {
        if self.prefills > 0 { self.busy.0 + now.since(self.at) } else { self.busy.0 }
    }

    /// The state `next`, with the time in this one added.
    #[must_use]
    pub fn followed_by(&self, next: Self) -> Self {
        let has_ended = self.prefills > 0 && next.prefills == 0;
        Self { busy: (self.busy_until(next.at), self.busy.1.wrapping_add(u32::from(has_ended))), ..next }
    }

    /// Whether the prefills change over time.
    #[must_use]
    pub fn decays(&self) -> bool {
        !self.prefill.is_zero()
    }

    /// Whether there is no load.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        let Self { active_blocks, read_blocks, requests, prefills, prefill_tokens, unmodelled_tokens, .. } = *self;
        [active_blocks, read_blocks, requests, prefills, prefill_tokens, unmodelled_tokens] == [0; 6]
            && self.prefill.is_zero()
    }
}

impl PeerLoad {
    /// Number of words of [`to_words`](Self::to_words).
    pub const WORDS: usize = 7;

    /// The load as words.
    #[must_use]
    pub fn to_words(self) -> [u64; Self::WORDS] {
        let halves = |high: u32, low: u32| u64::from(high) << 32 | u64::from(low);
        let nanos = |duration: Duration| u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        [
            halves(self.active_blocks, self.read_blocks),
            halves(self.requests, self.prefills),
            halves(self.prefill_tokens, self.unmodelled_tokens),
            nanos(self.prefill),
            nanos(self.busy.0),
            self.busy.1.into(),
            self.at.0,
        ]
    }

    /// The inverse of [`to_words`](Self::to_words).
    #[must_use]
    pub fn from_words([blocks, counts, tokens, prefill, busy, periods, at]: [u64; Self::WORDS]) -> Self {
        #[expect(clippy::cast_possible_truncation, reason = "the halves that `to_words` joined")]
        let (high, low) = (|joined: u64| (joined >> 32) as u32, |joined: u64| joined as u32);
        Self {
            active_blocks: high(blocks),
            read_blocks: low(blocks),
            requests: high(counts),
            prefills: low(counts),
            prefill_tokens: high(tokens),
            unmodelled_tokens: low(tokens),
            prefill: Duration::from_nanos(prefill),
            at: Timestamp(at),
            busy: (Duration::from_nanos(busy), low(periods)),
        }
    }
}

recorded! {
    PeerLoad {
        active_blocks, read_blocks, requests, prefills, prefill_tokens, unmodelled_tokens, prefill, at, busy
    }
}

/// The [`PeerLoad`] of one rank, readable without messages.
#[derive(Debug, Default)]
pub struct PeerLoadCell([AtomicU64; PeerLoad::WORDS]);

impl PeerLoadCell {
    /// Publishes a load. Only the replica actor may call this.
    pub fn publish(&self, load: &PeerLoad) {
        for (cell, word) in self.0.iter().zip(load.to_words()) {
            cell.store(word, Ordering::Relaxed);
        }
    }

    /// The last published load.
    #[must_use]
    #[inline]
    pub fn read(&self) -> PeerLoad {
        PeerLoad::from_words(self.0.each_ref().map(|cell| cell.load(Ordering::Relaxed)))
    }
}

/// Placements of a pool per second, and the prefill time that they add.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PlacementRate {
    /// Placements per second.
    pub placements_per_second: f64,
    /// Prefill time of the placements per second, in seconds.
    pub work_per_second: f64,
}

/// Arrivals of a pool, readable without messages: own ones, written by the scheduler, and those of other replicas,
/// written by the replica actor.
#[derive(Debug, Default)]
pub struct ArrivalsCell {
    /// Bits of `f64`s.
    own: [AtomicU64; 3],
    peers: [AtomicU64; 2],
}

impl ArrivalsCell {
    /// Publishes the own rate at `now`. Only the scheduler may call this.
    pub fn publish_own(&self, rate: PlacementRate, now: Timestamp) {
        store(&self.own, [rate.placements_per_second, rate.work_per_second, seconds(now)]);
    }

    /// The own rate at `now`. Without later placements it decays exponentially, with a time constant of 20 s.
    #[must_use]
    pub fn own(&self, now: Timestamp) -> PlacementRate {
        let [placements_per_second, work_per_second, published_at] = load(&self.own);
        let weight = ((published_at - seconds(now)).min(0.0) / RATE_WINDOW_SECONDS).exp();
        PlacementRate {
            placements_per_second: placements_per_second * weight,
            work_per_second: work_per_second * weight,
        }
    }

    /// Publishes the rate of all other replicas. Only the replica actor may call this.
    pub fn publish_peers(&self, rate: PlacementRate) {
        store(&self.peers, [rate.placements_per_second, rate.work_per_second]);
    }

    /// The rate of all other replicas.
    #[must_use]
    pub fn peers(&self) -> PlacementRate {
        let [placements_per_second, work_per_second] = load(&self.peers);
        PlacementRate { placements_per_second, work_per_second }
    }
}

/// Time constant of an own rate without placements.
const RATE_WINDOW_SECONDS: f64 = 20.0;

fn seconds(at: Timestamp) -> f64 {
    Duration::from_nanos(at.0).as_secs_f64()
}

fn store<const N: usize>(cells: &[AtomicU64; N], values: [f64; N]) {
    for (cell, value) in cells.iter().zip(values) {
        cell.store(value.to_bits(), Ordering::Relaxed);
    }
}

fn load<const N: usize>(cells: &[AtomicU64; N]) -> [f64; N] {
    cells.each_ref().map(|cell| f64::from_bits(cell.load(Ordering::Relaxed)))
}
