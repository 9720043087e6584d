//! Shared vocabulary: ids, hashes, storage tiers, KV events, workers.
//!
//! Plain values, without behaviour beyond parsing and arithmetic that cannot fail. `docs/glossary.md` defines the terms,
//! which are the same in code, logs, metrics and errors.

pub(crate) mod block_size;
mod event;
pub(crate) mod ids;
pub(crate) mod time;
pub(crate) mod worker;

pub(crate) use block_size::{BlockSizeOrigin, PoolBlockSize};
pub(crate) use event::RepeatedStore;
pub use event::{KvEvent, RouterEvent, StorageTier, StoredBlock};
pub use ids::{BlockHash, EngineHash, WorkerId, WorkerRank};
pub(crate) use ids::{BookingId, Generation, SequenceHash, Slot};
pub use time::Timestamp;
pub(crate) use time::{TimeSource, option_seconds, option_timestamp_seconds, seconds, timestamp_seconds};
pub(crate) use worker::WorkerConfigError;
pub use worker::{Engine, KvEventsConfig, KvTransferEnforcement, LoadSource, WorkerConfig, WorkerMap, WorkerRole};
