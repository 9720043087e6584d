//! Synchronization primitives of strands and flags, and the inline drain limit. The models in `tests/models` replace
//! this module by checked primitives and a limit that few messages reach.

pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
pub(crate) use std::sync::{Mutex, Mutex as StateMutex, MutexGuard, MutexGuard as StateGuard};

/// Inline drain limit: messages of other senders that one sender handles before it wakes the actor for the rest.
pub(crate) const INLINE_DRAIN_MAX: usize = 16;
