//! Flag of a scheduler that waits for falling load.

use crate::actors::delivery::sync::{AtomicBool, Ordering, fence};

/// Set while requests wait for some rank's load to fall. The thread that clears it owes the scheduler a wake-up.
///
/// The scheduler sets the flag and then reads the boards; a sequence actor publishes its board and then checks the flag. A
/// full fence on each side (Dekker's pattern) guarantees that at least one sees the other.
#[derive(Debug, Default)]
pub(crate) struct WakeFlag(AtomicBool);

impl WakeFlag {
    /// Sets the flag and returns whether it was clear. Read the boards afterwards.
    pub(crate) fn raise(&self) -> bool {
        let was_clear = !self.0.swap(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        was_clear
    }

    /// Clears the flag and returns whether it was set. Call after publishing the board.
    pub(crate) fn take(&self) -> bool {
        fence(Ordering::SeqCst);
        self.0.load(Ordering::SeqCst) && self.0.swap(false, Ordering::SeqCst)
    }
}
