//! Several replicas of a router over one fleet: the bus between them.

mod bus;
mod memory;
pub(crate) mod meters;
mod routed;
mod sessions;
pub(crate) mod sharing;

pub use bus::{
    BusFuture, FetchError, ReplicaBus, ReplicaMember, ReplicaMessage, SnapshotSource, SnapshotStore, StoreError,
};
pub use memory::{MemoryBus, MemoryFaults, MemoryNetwork};
