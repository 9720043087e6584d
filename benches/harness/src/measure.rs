//! Clocks and meters: wall time, CPU time of the process and of one thread, resident memory.
//!
//! All of the harness' clock readings are in this module.

#![expect(clippy::disallowed_types, reason = "wall time is what a bench measures, and nothing here is paused")]

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// Final part of [`Stopwatch::wait`], without sleep.
pub const SPIN: Duration = Duration::from_micros(120);

/// Measures wall time since its start.
#[derive(Clone, Copy, Debug)]
pub struct Stopwatch(Instant);

impl Stopwatch {
    /// Starts a stopwatch.
    #[must_use]
    pub fn start() -> Self {
        Self(Instant::now())
    }

    /// Time since the start; zero before the start of a [later](Stopwatch::later) stopwatch.
    #[must_use]
    pub fn elapsed(self) -> Duration {
        self.0.elapsed()
    }

    /// Stopwatch that starts `delay` after this one.
    #[must_use]
    pub fn later(self, delay: Duration) -> Self {
        Self(self.0 + delay)
    }

    /// Blocks the thread until the start of a [later](Stopwatch::later) stopwatch. Sleeps until [`SPIN`] before it and
    /// polls the clock from then on, because a sleep ends up to a tenth of a millisecond late.
    #[expect(clippy::disallowed_methods, reason = "arrivals have a thread of their own")]
    pub fn wait(self) {
        let sleep = self.0.saturating_duration_since(Instant::now()).saturating_sub(SPIN);
        if !sleep.is_zero() {
            std::thread::sleep(sleep);
        }
        while Instant::now() < self.0 {
            std::hint::spin_loop();
        }
    }
}

/// CPU time of all threads of this process, user and system, since its start.
#[must_use]
pub fn process_cpu() -> Duration {
    read(ClockId::ProcessCPUTime)
}

/// CPU time of the calling thread, user and system, since its start.
#[must_use]
pub fn thread_cpu() -> Duration {
    read(ClockId::ThreadCPUTime)
}

fn read(clock: ClockId) -> Duration {
    Duration::try_from(clock_gettime(clock)).expect("CPU time is never negative")
}

/// Resident memory of this process in bytes, if the system reports it (Linux).
#[must_use]
pub fn rss_bytes() -> Option<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = statm.split_whitespace().nth(1)?.parse().ok()?;
    Some(pages * rustix::param::page_size() as u64)
}
