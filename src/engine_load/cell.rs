//! A rank's last reported load, readable by anyone without a message.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::{EngineLoad, EngineReading};
use crate::protocol::Timestamp;

/// Stands for a count that is not known; a count of as many is shown as one less.
const UNKNOWN: u32 = u32::MAX;

/// One rank's last load as its engine reported it, or none yet.
///
/// A reader never waits. What it reads is never older than the time that it reads with it: that is written last and read
/// first. It may be newer, or of two reports that came at the same moment, which is as good as either.
///
/// ```
/// use pointsman::engine_load::{EngineLoad, EngineLoadCell, EngineReading};
/// use pointsman::protocol::Timestamp;
///
/// let cell = EngineLoadCell::default();
/// assert_eq!(cell.read(), None);
/// let reading = EngineReading { running: Some(3), waiting: None, kv_usage: Some(0.5) };
/// let load = EngineLoad { reading, at: Timestamp(7) };
/// cell.publish(&load);
/// assert_eq!(cell.read(), Some(load));
/// ```
#[derive(Debug)]
pub struct EngineLoadCell {
    running: AtomicU32,
    waiting: AtomicU32,
    /// Bits; NaN for unknown.
    kv_usage: AtomicU64,
    /// Plus one; 0 before the first report.
    at: AtomicU64,
}

impl Default for EngineLoadCell {
    fn default() -> Self {
        Self {
            running: AtomicU32::new(UNKNOWN),
            waiting: AtomicU32::new(UNKNOWN),
            kv_usage: AtomicU64::new(f64::NAN.to_bits()),
            at: AtomicU64::new(0),
        }
    }
}

impl EngineLoadCell {
    /// Shows a load. Only the engine-load actor may call this.
    pub fn publish(&self, load: &EngineLoad) {
        let EngineReading { running, waiting, kv_usage } = load.reading;
        let count = |known: Option<u32>| known.map_or(UNKNOWN, |count| count.min(UNKNOWN - 1));
        self.running.store(count(running), Ordering::Relaxed);
        self.waiting.store(count(waiting), Ordering::Relaxed);
        self.kv_usage.store(kv_usage.unwrap_or(f64::NAN).to_bits(), Ordering::Relaxed);
        self.at.store(load.at.0.saturating_add(1), Ordering::Release);
    }

    /// The last load shown.
    #[must_use]
    pub fn read(&self) -> Option<EngineLoad> {
        let at = self.at.load(Ordering::Acquire).checked_sub(1).map(Timestamp)?;
        let count = |cell: &AtomicU32| Some(cell.load(Ordering::Relaxed)).filter(|count| *count != UNKNOWN);
        let kv_usage = f64::from_bits(self.kv_usage.load(Ordering::Relaxed));
        let kv_usage = Some(kv_usage).filter(|usage| !usage.is_nan());
        Some(EngineLoad {
            reading: EngineReading { running: count(&self.running), waiting: count(&self.waiting), kv_usage },
            at,
        })
    }
}
