//! Conformance of the transport of tests and simulations, without faults.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pointsman::{
    ReplicaBus,
    internals::{MemoryBus, MemoryFaults, MemoryNetwork},
};
use pointsman::{ReplicaId, ReplicaLife};

use super::conformance::{Replica, Transport, conforms, publishes_alone};

struct Memory {
    network: MemoryNetwork,
    lives: AtomicU64,
}

impl Memory {
    fn new() -> Self {
        Self { network: MemoryNetwork::new(MemoryFaults::default()), lives: AtomicU64::new(0) }
    }
}

impl Replica for Arc<MemoryBus> {
    fn bus(&self) -> Arc<dyn ReplicaBus> {
        Arc::<MemoryBus>::clone(self)
    }

    async fn leave(self) {}
}

impl Transport for Memory {
    type Replica = Arc<MemoryBus>;

    async fn start(&self, n: usize) -> Arc<MemoryBus> {
        let incarnation = self.lives.fetch_add(1, Ordering::Relaxed);
        self.network.join(ReplicaLife { replica: ReplicaId(n as u64), incarnation })
    }
}

#[tokio::test]
async fn memory_conforms() {
    conforms(&Memory::new()).await;
}

#[tokio::test]
async fn a_memory_replica_without_others_publishes() {
    publishes_alone(&Memory::new()).await;
}
