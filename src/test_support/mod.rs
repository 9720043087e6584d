//! Drivers and helpers of tests and benchmarks, behind the feature `test-support`.
//!
//! [`SimulatedFleet`] drives the pure scheduler without a runtime. [`hostile`] has the checks of decoders for any bytes.
//! None of it follows semantic versioning.

mod fleet;
pub mod hostile;

#[cfg(all(feature = "replicas", feature = "test-support"))]
pub use crate::actors::{MemoryBus, MemoryNetwork};
pub use fleet::{RequestOutcome, SampleRequest, SimulatedFleet, SimulatedRank};

use crate::protocol::{WorkerId, WorkerRank};

/// Rank 0 of a worker.
#[must_use]
pub const fn rank(worker: u64) -> WorkerRank {
    WorkerRank { worker: WorkerId(worker), rank: 0 }
}

/// Value `n` of a fixed pseudo-random sequence (splitmix64): a bijection that spreads numbers over all 64 bits.
#[must_use]
pub const fn mix(n: u64) -> u64 {
    let n = n.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let n = (n ^ (n >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let n = (n ^ (n >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    n ^ (n >> 31)
}
