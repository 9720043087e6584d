//! Several replicas of a router over one fleet: the bus between them.

mod bus;
#[cfg(feature = "test-support")]
mod memory_bus;
pub(crate) mod meters;
mod routed;
mod sessions;
pub(crate) mod sharing;

pub use bus::{BusError, ReplicaBus, ReplicaMember, ReplicaMessage, SnapshotSource, SnapshotStore};
#[cfg(feature = "test-support")]
pub use memory_bus::{MemoryBus, MemoryNetwork};
