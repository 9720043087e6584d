//! The words that every part of Pointsman shares: ids, hashes, storage tiers, KV events, workers.
//!
//! Owns the vocabulary and nothing else: plain values, no behaviour beyond parsing and arithmetic that
//! cannot fail. What a word means is fixed in `ARCHITECTURE.md`, Words; the same word stands for the same
//! thing in code, logs, metrics and errors. Leaves to others what is done with these values.

mod event;
mod ids;
mod time;
mod worker;

pub use event::{KvEvent, RouterEvent, StorageTier, StoredBlock};
pub use ids::{BlockHash, BookingId, EngineHash, Generation, SequenceHash, Slot, WorkerId, WorkerRank};
pub use time::Timestamp;
pub use worker::{KvEventsConfig, KvTransferEnforcement, LoadSource, WorkerConfig, WorkerConfigError, WorkerMap};
