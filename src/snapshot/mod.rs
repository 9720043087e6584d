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
//! Version 3. Integers are little-endian; `varint` is an unsigned LEB128 number; a list is its length as `varint` and
//! its elements.
//!
//! ```text
//! magic "PMANSNAP" | version u32 | pool: length varint, UTF-8 | block size u32 | EAGLE u8 | hash seed u64
//! | created: ms since the Unix epoch u64 | list of ranks, ascending | xxh3-64 of all preceding bytes
//!
//! rank:     worker u64 | dp rank varint | endpoint: length varint, UTF-8
//!           | next varint | list of payload hashes u64 | cold: 0, or cause 1 to 4, two varints, stored blocks varint
//!           | list of (cache group u8, main u8, window varint) | connector u8
//!           | list of (adapter name u64, identity of its weights u64), both hashed
//!           | list of (engine hash u64, lora u64, salt u64, copies in each tier, and possible ones: five varints)
//!           | list of events | evicted blocks varint
//! event:    type u8 (0 store, 1 store behind a parent, 2 removal, 3 clear, 4 offload, 5 offload behind a parent, 6 clear of
//!           the tier; plus 8 x tier)
//!           | parent u64 if any | list of (engine hash u64, block hash u64), of engine hashes u64, or of (engine hash
//!           u64, 0 or 1 and block hash u64)
//!           or type u8 (32 store in a cache group, 33 store at the start of a prompt, 34 removal) | cache group u8
//!           | window varint of a store | list of engine hashes u64
//! ```
//!
//! [`Snapshot::decode`] is total: any bytes give a snapshot or an error that names the value and the rule. The checksum
//! is compared before the contents are read, and memory is bounded by a small multiple of the number of bytes.

mod bytes;
mod decode;
mod encode;
mod error;
mod types;

pub use error::SnapshotError;
pub use types::{RankSnapshot, Snapshot, SnapshotLayout};

#[cfg(doc)]
use crate::{ingest::SourcePosition, wire::DecoderState};

/// First bytes of every snapshot.
const MAGIC: &[u8; 8] = b"PMANSNAP";

/// Version of the format.
const VERSION: u32 = 4;

/// Types of the events of a cache group; the following type is a store at the start of a prompt.
const GROUP_STORED: u8 = 32;
const GROUP_REMOVED: u8 = 34;

/// Bytes of the checksum at the end.
const CHECKSUM_BYTES: usize = 8;
