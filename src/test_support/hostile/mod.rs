//! Checks of the library's decoders that hold for any bytes, run with seeded [`Mutations`] of valid inputs.
//!
//! A target panics if a check fails. The gateway's targets (`gateway/src/tests.rs`) use the same runner. `fuzz/` runs
//! the targets of the library with coverage feedback.

mod events;
mod mutations;
#[cfg(feature = "replicas")]
mod replicas;
mod snapshots;
mod zmtp;

pub use events::kv_events;
pub use mutations::Mutations;
#[cfg(feature = "replicas")]
pub use replicas::replica_messages;
pub use snapshots::snapshot;
pub use zmtp::zmtp_frames;

/// A target with inputs to start from.
#[derive(Clone, Copy, Debug)]
pub struct HostileTarget {
    /// Name of the target.
    pub name: &'static str,
    /// The checks. Panics if one fails.
    pub check: fn(&[u8]),
    /// Valid inputs.
    pub seeds: fn() -> Vec<Vec<u8>>,
}

impl HostileTarget {
    /// Runs the valid inputs and `count` seeded mutations of them. A failed check names the seed and the input.
    ///
    /// # Panics
    /// A check fails.
    pub fn run(&self, seed: u64, count: u32) {
        let seeds = (self.seeds)();
        seeds.iter().for_each(|valid| (self.check)(valid));
        let mut mutations = Mutations::new(seeds, seed);
        for n in 0..count {
            let input = mutations.next_input();
            let failed = std::panic::catch_unwind(|| (self.check)(&input)).is_err();
            assert!(!failed, "{}: seed {seed}, input {n}: {input:?}", self.name);
        }
    }
}

/// The targets of the library.
pub const TARGETS: &[HostileTarget] = &[
    HostileTarget { name: "kv_events", check: kv_events, seeds: events::seeds },
    HostileTarget { name: "zmtp_frames", check: zmtp_frames, seeds: zmtp::seeds },
    HostileTarget { name: "snapshot", check: snapshot, seeds: snapshots::seeds },
    #[cfg(feature = "replicas")]
    HostileTarget { name: "replica_messages", check: replica_messages, seeds: replicas::seeds },
];

#[cfg(test)]
mod tests {
    use super::*;

    /// Inputs per target; more of them with the environment variable `HOSTILE_INPUTS`.
    #[test]
    #[expect(clippy::disallowed_methods, reason = "test effort is not router configuration")]
    fn checks_hold_for_mutated_inputs() {
        let count = std::env::var("HOSTILE_INPUTS").ok().and_then(|count| count.parse().ok()).unwrap_or(2_000);
        TARGETS.iter().for_each(|target| target.run(1, count));
    }
}
