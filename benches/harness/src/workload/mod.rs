//! Prompts to route, expanded to tokens before any clock runs.
//!
//! Two sources: a Mooncake trace ([`mooncake`]) and a generated one ([`generated`]) that needs no file. Both are
//! fixed by their arguments: the same trace or seed gives the same tokens on every machine.
//!
//! A prompt is one flat allocation of 4 bytes a token, and prefixes are not shared between prompts: a router reads a
//! prompt as one slice, so sharing would only move the copy into the measured time. 4,000 requests of the Mooncake
//! conversation trace take 190 MB, all 12,031 take 580 MB.

pub mod generated;
pub mod mooncake;

use ::workload::Rng;

/// Token ids are drawn below this.
pub const VOCABULARY: u32 = 128_000;

/// The token ids of one prompt.
pub type Prompt = Box<[u32]>;

/// Appends `count` token ids, the first of the endless run that `id` names.
pub(crate) fn append_tokens(tokens: &mut Vec<u32>, id: u64, count: usize) {
    let mut rng = Rng::new(id);
    tokens.extend((0..count).map(|_| rng.below(VOCABULARY)));
}
