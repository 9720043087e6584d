//! Snapshots of a pool's prefix index with the position of each KV event stream.
//!
//! A router that restarts with a snapshot loads the contents and requests only the KV events since then. Contents:
//!
//! - the [`SnapshotLayout`]: pool, block size and hash scheme. Hashes of another layout match nothing;
//! - per rank its identity (worker, data-parallel rank, event endpoint) and its [`SourcePosition`]: the next sequence
//!   number, and hashes of the last applied messages, which identify the incarnation of the publisher;
//! - the [`DecoderState`]: namespaces of salted blocks, identities of adapters and types of cache groups, which later events
//!   rely on;
//! - the blocks of the rank, as the events that rebuild them. They keep the engine hashes, so a later event that names a
//!   parent or a removed block has the same effect as without the restart.
//!
//! # Consistency
//!
//! The position and the contents of a rank belong to the same message. A repeated message is not harmless: a store in
//! the device tier behind a parent adds a copy, and each copy needs its own removal. The task that reads the stream of
//! the rank therefore records its position between two messages, and sends the query for the contents to the index
//! shard behind the events of the last message. The shard applies messages in order, so the reply contains exactly these
//! events. Ranks are recorded one after the other; their streams are independent.
//!
//! Speculative entries, bookings and learned speeds are not part of a snapshot. Neither are ranks whose events come from
//! the embedder, ranks without an applied message, ranks whose contents are lost or do not match the pool, and ranks with
//! smaller blocks than the pool's, whose decoders keep tokens.
//!
//! # Format
//!
//! Version 6. `word` is a little-endian number of 64 bits, `number` an unsigned LEB128 number in its shortest form, `text`
//! and `list` begin with their length as `number`, and `optional` with 0 or 1.
//!
//! ```text
//! magic "PMANSNAP" | version, 32 bits | pool: text | block size: number | EAGLE: 0 or 1 | hash seed: number
//! | created: ms since the Unix epoch, number | list of ranks, ascending | xxh3-64 of all preceding bytes
//!
//! rank:     worker: number | dp rank: number | endpoint: text
//!           | next: number | list of payload hashes: numbers | optional cold: cause 1 to 4, three numbers
//!           | list of (cache group: byte, main: 0 or 1, window: number) | connector: 0 or 1
//!           | list of (adapter name: number, identity of its weights: number), both hashed
//!           | list of (engine hash: word, lora: number, salt: number, copies in each tier, and possible ones: five numbers)
//!           | list of events | evicted blocks: number
//! event:    tier: 0 to 3 | type: 0 store, 1 removal, 2 offload, 3 clear, 4 clear of the tier, 5 store in a cache group,
//!           6 removal from it | fields of the event in their order; hashes are words
//! ```
//!
//! [`Snapshot::decode`] is total: any bytes give a snapshot or an error. The checksum is compared before the contents are
//! read, and memory is bounded by a small multiple of the number of bytes.

mod encoding;
mod error;
mod types;

pub use error::SnapshotError;
pub use types::{RankSnapshot, Snapshot, SnapshotLayout};

#[cfg(doc)]
use crate::{ingest::SourcePosition, wire::DecoderState};

/// First bytes of every snapshot.
const MAGIC: &[u8; 8] = b"PMANSNAP";

/// Version of the format.
const VERSION: u32 = 6;
