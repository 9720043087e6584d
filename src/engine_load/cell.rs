//! A rank's last reported engine load, readable without messages.

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use super::{EngineLoad, EngineReading, EngineSleep};
use crate::protocol::Timestamp;

/// Represents an unknown count; a real count of this value is stored as one less.
const UNKNOWN: u32 = u32::MAX;

/// Values of a cell.
const SLEEPS: [Option<EngineSleep>; 4] =
    [None, Some(EngineSleep::Awake), Some(EngineSleep::Paused), Some(EngineSleep::Emptied)];

/// Last load of one rank as reported by its engine.
///
/// Reads are wait-free. The values are never older than the timestamp read with them, because the timestamp is written
/// last and read first. They may be newer, or from two simultaneous reports, which is harmless.
///
/// ```
/// use pointsman::internals::engine_load::{EngineLoad, EngineLoadCell};
/// use pointsman::EngineReading;
/// use pointsman::protocol::Timestamp;
///
/// let cell = EngineLoadCell::default();
/// assert_eq!(cell.read(), None);
/// let reading = EngineReading { running: Some(3), waiting: None, kv_usage: Some(0.5), sleep: None };
/// let load = EngineLoad { reading, at: Timestamp(7) };
/// cell.publish(&load);
/// assert_eq!(cell.read(), Some(load));
/// ```
#[derive(Debug)]
pub struct EngineLoadCell {
    running: AtomicU32,
    waiting: AtomicU32,
    /// Bits of an `f64`; NaN if unknown.
    kv_usage: AtomicU64,
    /// Position in [`SLEEPS`].
    sleep: AtomicU8,
    /// Timestamp plus one; 0 before the first report.
    at: AtomicU64,
}

impl Default for EngineLoadCell {
    fn default() -> Self {
        Self {
            running: AtomicU32::new(UNKNOWN),
            waiting: AtomicU32::new(UNKNOWN),
            kv_usage: AtomicU64::new(f64::NAN.to_bits()),
            sleep: AtomicU8::new(0),
            at: AtomicU64::new(0),
        }
    }
}

impl EngineLoadCell {
    /// Publishes a load. Only the engine-load actor may call this.
    pub fn publish(&self, load: &EngineLoad) {
        let EngineReading { running, waiting, kv_usage, sleep } = load.reading;
        let count = |known: Option<u32>| known.map_or(UNKNOWN, |count| count.min(UNKNOWN - 1));
        self.running.store(count(running), Ordering::Relaxed);
        self.waiting.store(count(waiting), Ordering::Relaxed);
        self.kv_usage.store(kv_usage.unwrap_or(f64::NAN).to_bits(), Ordering::Relaxed);
        self.sleep.store(sleep.map_or(0, |sleep| sleep as u8 + 1), Ordering::Relaxed);
        self.at.store(load.at.0.saturating_add(1), Ordering::Release);
    }

    /// The last published load.
    #[must_use]
    pub fn read(&self) -> Option<EngineLoad> {
        let at = self.at.load(Ordering::Acquire).checked_sub(1).map(Timestamp)?;
        let count = |cell: &AtomicU32| Some(cell.load(Ordering::Relaxed)).filter(|count| *count != UNKNOWN);
        let kv_usage = f64::from_bits(self.kv_usage.load(Ordering::Relaxed));
        let kv_usage = Some(kv_usage).filter(|usage| !usage.is_nan());
        Some(EngineLoad {
            reading: EngineReading {
                running: count(&self.running),
                waiting: count(&self.waiting),
                kv_usage,
                sleep: self.sleep(),
            },
            at,
        })
    }

    /// Last published sleep of the engine.
    #[must_use]
    pub fn sleep(&self) -> Option<EngineSleep> {
        SLEEPS[usize::from(self.sleep.load(Ordering::Relaxed)).min(SLEEPS.len() - 1)]
    }
}
