//! Mean output length by session and by tenant.
//!
//! A table of fixed size with lock-free access. Stores only a part of a hash of each session or tenant. Keys in the
//! same cell replace each other, so a mean can be lost; in about one of 16 million cases it belongs to another key.
//! [`SpeedMeter`](super::SpeedMeter) measures the pool's mean.

use std::sync::atomic::{AtomicU64, Ordering};

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Number of cells; 64 KiB in total.
const CELLS: usize = 8_192;

/// Minimum number of responses for a session's mean.
const SESSION_ANSWERS_MIN: u64 = 4;

/// Minimum number of responses for a tenant's mean.
const TENANT_ANSWERS_MIN: u64 = 16;

/// Maximum number of responses in a mean: the minimum weight of a response is 1/32.
const ANSWERS_MAX: u64 = 32;

/// Means by key, each over approximately the last 32 responses.
///
/// ```
/// use pointsman::internals::load::{RequestKeys, OutputLengths};
///
/// let lengths = OutputLengths::default();
/// let keys = RequestKeys::of(Some("session"), Some("tenant"));
/// (0..4).for_each(|_| lengths.observe(keys, 200.0));
/// assert_eq!(lengths.expected(keys), Some(200.0));
/// assert_eq!(lengths.expected(RequestKeys::of(Some("another session"), Some("tenant"))), None);
/// ```
#[derive(Debug)]
pub struct OutputLengths {
    /// A tag of 24 bits, a count of 8 bits, and the bits of an `f32`.
    cells: Box<[AtomicU64]>,
}

/// Keys of a request for statistics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestKeys {
    session: Option<u64>,
    tenant: Option<u64>,
    /// Key of the program; 0 for none.
    pub program: u64,
}

impl RequestKeys {
    /// The keys of a request of this session and tenant.
    #[must_use]
    pub fn of(session: Option<&str>, tenant: Option<&str>) -> Self {
        let key = |name: &str, seed| xxh3_64_with_seed(name.as_bytes(), seed);
        Self { session: session.map(|name| key(name, 1)), tenant: tenant.map(|name| key(name, 2)), program: 0 }
    }

    /// Whether there is no key.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.session.is_none() && self.tenant.is_none()
    }
}

impl Default for OutputLengths {
    fn default() -> Self {
        Self { cells: (0..CELLS).map(|_| AtomicU64::new(0)).collect() }
    }
}

impl OutputLengths {
    /// Adds a response of `tokens` tokens. Of two concurrent calls one may be lost.
    pub fn observe(&self, keys: RequestKeys, tokens: f64) {
        for key in [keys.session, keys.tenant].into_iter().flatten() {
            let cell = self.cell(key);
            let (answers, mean) = Self::read(cell, key).unwrap_or((0, 0.0));
            let answers = (answers + 1).min(ANSWERS_MAX);
            let mean = mean + (tokens - mean) / answers as f64;
            cell.store(tag(key) << 40 | answers << 32 | u64::from(bits(mean)), Ordering::Relaxed);
        }
    }

    /// Expected tokens of a response: the mean of its session, else of its tenant, if based on enough responses.
    #[must_use]
    pub fn expected(&self, keys: RequestKeys) -> Option<f64> {
        let mean = |key: Option<u64>, answers_min| {
            let (answers, mean) = Self::read(self.cell(key?), key?)?;
            (answers >= answers_min).then_some(mean)
        };
        mean(keys.session, SESSION_ANSWERS_MIN).or_else(|| mean(keys.tenant, TENANT_ANSWERS_MIN))
    }

    fn cell(&self, key: u64) -> &AtomicU64 {
        &self.cells[key as usize % CELLS]
    }

    fn read(cell: &AtomicU64, key: u64) -> Option<(u64, f64)> {
        let word = cell.load(Ordering::Relaxed);
        let answers = word >> 32 & 0xff;
        (word >> 40 == tag(key) && answers > 0).then(|| (answers, f64::from(f32::from_bits(word as u32))))
    }
}

/// The part of a key stored in its cell: bits other than those that select the cell.
fn tag(key: u64) -> u64 {
    key >> 40
}

#[expect(clippy::cast_possible_truncation, reason = "seven digits are more than a mean length has")]
fn bits(tokens: f64) -> u32 {
    (tokens as f32).to_bits()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn session_mean_takes_precedence_with_enough_responses() {
        let lengths = OutputLengths::default();
        let (short, long) = (RequestKeys::of(Some("short"), Some("t")), RequestKeys::of(Some("long"), Some("t")));
        for _ in 0..3 {
            lengths.observe(short, 10.0);
            lengths.observe(long, 1_000.0);
        }
        assert_eq!(lengths.expected(short), None, "three responses of a session, six of a tenant");
        for _ in 0..8 {
            lengths.observe(short, 10.0);
            lengths.observe(long, 1_000.0);
        }
        assert_eq!((lengths.expected(short), lengths.expected(long)), (Some(10.0), Some(1_000.0)));
        let tenant = lengths.expected(RequestKeys::of(Some("new"), Some("t"))).expect("22 answers");
        assert!((400.0..600.0).contains(&tenant), "{tenant}");
        assert_eq!(lengths.expected(RequestKeys::default()), None);
    }

    #[test]
    fn memory_is_bounded_and_means_are_not_mixed() {
        let lengths = OutputLengths::default();
        let keys: Vec<RequestKeys> = (0..100_000).map(|n| RequestKeys::of(Some(&n.to_string()), None)).collect();
        for (n, keys) in keys.iter().enumerate() {
            (0..4).for_each(|_| lengths.observe(*keys, n as f64));
        }
        let known = keys.iter().enumerate().filter_map(|(n, keys)| Some((n, lengths.expected(*keys)?)));
        let known: Vec<(usize, f64)> = known.collect();
        assert!(known.len() <= CELLS && known.len() > CELLS / 2, "{} known", known.len());
        assert!(known.iter().all(|(n, mean)| *mean == *n as f64));
    }
}
