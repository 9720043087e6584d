//! Mean output length by session and by tenant.
//!
//! Owns a table of fixed size. Promises bounded memory, no lock, and that nothing is stored of a session or tenant but a
//! part of a hash. Two keys that fall into one cell replace each other, so that a mean may be lost, and in one of some
//! 16 million cases be another's. The pool's own mean is learned elsewhere ([`SpeedMeter`](super::SpeedMeter)).

use std::sync::atomic::{AtomicU64, Ordering};

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Cells of the table: 64 KiB.
const CELLS: usize = 8_192;

/// Answers after which a session's mean counts.
const SESSION_ANSWERS_MIN: u64 = 4;

/// Answers after which a tenant's mean counts.
const TENANT_ANSWERS_MIN: u64 = 16;

/// The least share of an answer in a mean is one of so many.
const ANSWERS_MAX: u64 = 32;

/// Means by key, each of the last 32 answers or so.
///
/// ```
/// use pointsman::load::{LengthKeys, OutputLengths};
///
/// let lengths = OutputLengths::default();
/// let keys = LengthKeys::of(Some("session"), Some("tenant"));
/// (0..4).for_each(|_| lengths.observe(keys, 200.0));
/// assert_eq!(lengths.expected(keys), Some(200.0));
/// assert_eq!(lengths.expected(LengthKeys::of(Some("another session"), Some("tenant"))), None);
/// ```
#[derive(Debug)]
pub struct OutputLengths {
    /// A tag of 24 bits, a count of 8, and the bits of an `f32`.
    cells: Box<[AtomicU64]>,
}

/// What a request's output length is remembered by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LengthKeys {
    session: Option<u64>,
    tenant: Option<u64>,
}

impl LengthKeys {
    /// The keys of a request of this session and tenant.
    #[must_use]
    pub fn of(session: Option<&str>, tenant: Option<&str>) -> Self {
        let key = |name: &str, seed| xxh3_64_with_seed(name.as_bytes(), seed);
        Self { session: session.map(|name| key(name, 1)), tenant: tenant.map(|name| key(name, 2)) }
    }

    /// Whether there are none.
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
    /// Counts an answer of so many tokens. Of two that come at once, one may be lost.
    pub fn observe(&self, keys: LengthKeys, tokens: f64) {
        for key in [keys.session, keys.tenant].into_iter().flatten() {
            let cell = self.cell(key);
            let (answers, mean) = Self::read(cell, key).unwrap_or((0, 0.0));
            let answers = (answers + 1).min(ANSWERS_MAX);
            let mean = mean + (tokens - mean) / answers as f64;
            cell.store(tag(key) << 40 | answers << 32 | u64::from(bits(mean)), Ordering::Relaxed);
        }
    }

    /// Tokens that an answer is expected to have: the mean of its session, or of its tenant, whichever is known from
    /// enough answers.
    #[must_use]
    pub fn expected(&self, keys: LengthKeys) -> Option<f64> {
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

/// The part of a key that a cell remembers: other bits than those that choose the cell.
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
    fn a_session_goes_before_its_tenant_once_enough_is_known() {
        let lengths = OutputLengths::default();
        let (short, long) = (LengthKeys::of(Some("short"), Some("t")), LengthKeys::of(Some("long"), Some("t")));
        for _ in 0..3 {
            lengths.observe(short, 10.0);
            lengths.observe(long, 1_000.0);
        }
        assert_eq!(lengths.expected(short), None, "three answers of a session, six of a tenant");
        for _ in 0..8 {
            lengths.observe(short, 10.0);
            lengths.observe(long, 1_000.0);
        }
        assert_eq!((lengths.expected(short), lengths.expected(long)), (Some(10.0), Some(1_000.0)));
        let tenant = lengths.expected(LengthKeys::of(Some("new"), Some("t"))).expect("22 answers");
        assert!((400.0..600.0).contains(&tenant), "{tenant}");
        assert_eq!(lengths.expected(LengthKeys::default()), None);
    }

    #[test]
    fn a_mean_follows_what_has_changed() {
        let (lengths, keys) = (OutputLengths::default(), LengthKeys::of(Some("s"), None));
        (0..100).for_each(|_| lengths.observe(keys, 100.0));
        (0..100).for_each(|_| lengths.observe(keys, 1_000.0));
        let mean = lengths.expected(keys).expect("known");
        assert!((900.0..1_000.0).contains(&mean), "{mean}");
    }

    #[test]
    fn any_number_of_keys_takes_the_same_memory_and_no_mean_is_anothers() {
        let lengths = OutputLengths::default();
        let keys: Vec<LengthKeys> = (0..100_000).map(|n| LengthKeys::of(Some(&n.to_string()), None)).collect();
        for (n, keys) in keys.iter().enumerate() {
            (0..4).for_each(|_| lengths.observe(*keys, n as f64));
        }
        let known = keys.iter().enumerate().filter_map(|(n, keys)| Some((n, lengths.expected(*keys)?)));
        let known: Vec<(usize, f64)> = known.collect();
        assert!(known.len() <= CELLS && known.len() > CELLS / 2, "{} known", known.len());
        assert!(known.iter().all(|(n, mean)| *mean == *n as f64));
    }
}
