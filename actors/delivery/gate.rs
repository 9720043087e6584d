//! Permits of the bounded queue in front of a strand.

use std::array;
use std::sync::Arc;

use tokio::sync::Semaphore;

use super::strand::{ActorState, CELLS_MAX, Strand};

/// Limit of the work that a strand has not finished.
///
/// Each state cell of the strand has permits of its own, because a hung step keeps the permits of its work until it
/// returns. After a replacement its successor starts with all permits. With n hung steps the limit of all work is
/// n + 1 times the limit of one cell.
pub(crate) struct Gate {
    permits_max: u32,
    rooms: [Arc<Semaphore>; CELLS_MAX],
}

impl Gate {
    /// `permits_max`: permits of one cell.
    pub(crate) fn new(permits_max: u32) -> Self {
        Self { permits_max, rooms: array::from_fn(|_| Arc::new(Semaphore::new(permits_max as usize))) }
    }

    /// Permits of the present state of the strand.
    pub(crate) fn room<S: ActorState>(&self, strand: &Strand<S>) -> &Arc<Semaphore> {
        &self.rooms[strand.cell()]
    }

    pub(crate) fn permits_max(&self) -> u32 {
        self.permits_max
    }

    /// Permits in use, those of hung steps included.
    pub(crate) fn taken(&self) -> u64 {
        let free = |room: &Arc<Semaphore>| room.available_permits() as u64;
        self.rooms.iter().map(|room| u64::from(self.permits_max) - free(room)).sum()
    }
}
