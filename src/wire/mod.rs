//! What engines publish about their caches, as bytes: one batch in, [`RouterEvent`]s and findings out.
//!
//! Owns the dialects of KV events that vLLM and SGLang have spoken: events as msgpack arrays and as maps, shorter and
//! longer than known; block hashes as integers of either sign and as bytes; token ids and EAGLE's pairs; every engine's
//! words for storage. Turns token ids into block hashes and forgets them: nothing behind this module sees a token.
//!
//! Promises:
//!
//! - No bytes make it panic, recurse, or hold more than a small multiple of them, and never more than [`Limits`] say.
//! - What cannot be read costs as little as possible, the blocks behind a bad one, or an event, and is counted by cause.
//!   A batch is lost from where it breaks off.
//! - Who shares blocks is never widened by guessing: a request matches what was stored under its own adapter and salt,
//!   and keys of unknown meaning make a namespace that no request can name. Salts are inherited down the chain, for
//!   engines name them on the first block only.
//! - Only blocks of the main attention count. A removal from another cache group names the same hashes and would take
//!   away what is still there.
//!
//! Leaves transport, sequence numbers, gaps and trust to who reads the stream, and applying the events to
//! [`crate::index`]. Costs are in `benches/wire.rs`: of a store of 64-token blocks the tokens are most, in reading them
//! more than in hashing.
//!
//! Where it loses: stores without tokens, as offloading connectors may publish them, are refused; a store behind a
//! salted block that this decoder has not seen stored is taken for unsalted, and matches nothing.
//!
//! [`RouterEvent`]: crate::protocol::RouterEvent

mod decoder;
mod event;
mod finding;
mod group;
mod keys;
pub(crate) mod msgpack;
mod namespace;

pub use decoder::{Decoder, Limits, WireConfig};
pub use finding::{Finding, Findings, Report};
