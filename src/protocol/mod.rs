//! Shared vocabulary: ids, hashes, storage tiers, KV events, workers.
//!
//! Plain values, without behaviour beyond parsing and arithmetic that cannot fail. `docs/glossary.md` defines the terms,
//! which are the same in code, logs, metrics and errors.

mod block_size;
mod event;
mod ids;
mod time;
mod worker;

pub use block_size::{BlockSizeOrigin, PoolBlockSize};
pub use event::{KvEvent, RouterEvent, StorageTier, StoredBlock};
pub use ids::{BlockHash, BookingId, EngineHash, Generation, SequenceHash, Slot, WorkerId, WorkerRank};
pub use time::{TimeSource, Timestamp};
pub(crate) use time::{option_seconds, option_timestamp_seconds, seconds, timestamp_seconds};
pub use worker::{
    KvEventsConfig, KvTransferEnforcement, LoadSource, WorkerConfig, WorkerConfigError, WorkerMap, WorkerRole,
};
