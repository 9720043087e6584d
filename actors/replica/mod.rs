//! Several replicas of a router over one fleet: the bus between them.

mod bus;
mod memory;
pub(crate) mod meters;
mod routed;
mod sessions;
pub(crate) mod sharing;

pub use bus::{BusError, ReplicaBus, ReplicaMember, ReplicaMessage, SnapshotSource, SnapshotStore};
pub use memory::{MemoryBus, MemoryFaults, MemoryNetwork};
