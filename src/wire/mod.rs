//! Decoder of engine KV event payloads: one batch of bytes in, [`RouterEvent`]s and findings out.
//!
//! Supports the dialects of vLLM and SGLang: events as msgpack arrays and maps, shorter and longer than the known
//! layouts; block hashes as signed or unsigned integers and as bytes; token ids and EAGLE pairs; blocks of the pool's size
//! and parts of them; the medium names of all engines. Token ids are converted to block hashes and erased, except those of
//! pages that a later block may continue ([`fold`]): no token leaves this module.
//!
//! Guarantees:
//!
//! - No input causes a panic, recursion, or memory use beyond a small multiple of its size; [`DecoderLimits`] bounds
//!   both.
//! - An undecodable part has the smallest possible effect (the blocks behind an invalid one, or one event), and is
//!   counted by cause. A truncated batch is lost from the truncation on.
//! - Heuristics never widen the sharing of blocks. A request matches only blocks stored with its own adapter and salt,
//!   and keys of unknown meaning create a namespace that no request can name. Children inherit salts, because engines
//!   send a salt only with the first block.
//! - A name has one content. A store in a lower tier of a block that the rank holds adds a copy of that block, whatever
//!   the event states. Of an unknown block the event must state the keys or the parent, else it matches no request.
//! - Blocks of each cache group are separate. All groups use the same hashes, so a removal from another group must not
//!   remove a block of the main attention that is still cached.
//!
//! Transport, sequence numbers, gaps and stream states belong to the reader of the stream; [`crate::index`] applies the
//! events. In a store of 64-token blocks, tokens dominate the cost, with more time for decoding than for hashing.
//!
//! Limits: a store behind a salted block that this decoder has not decoded is treated as unsalted and matches nothing.
//!
//! [`RouterEvent`]: crate::protocol::RouterEvent

mod batch;
mod decoder;
mod event;
mod finding;
mod fold;
mod folded;
mod group;
mod keys;
mod limits;
mod medium;
pub(crate) mod msgpack;
mod namespace;
mod state;

pub use decoder::{Decoder, WireConfig};
pub use finding::{Finding, Findings, Report, StoreMismatch};
pub use limits::DecoderLimits;
pub use state::{DecoderState, GroupRecord, NamespaceRecord};
