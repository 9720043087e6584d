//! Prompts with shared prefixes like those of real users: a shared system prompt, then a shared conversation, then a
//! unique tail.
//!
//! A number always yields the same request. Equal tokens also occur under different salts and adapters.

use pointsman::hashing::HashScheme;
use pointsman::internals::hashing::{BlockHasher, MmBlocks};
use pointsman::protocol::BlockHash;
use pointsman::{Constraints, Prompt, RequestOptions, RouteRequest};
use pointsman_trial::workload::mix;

/// Tokens per block.
pub(crate) const BLOCK_SIZE: u32 = 16;

/// Taint of workers whose events carry salts and adapters.
pub(crate) const NAMES: &str = "names";

pub(crate) const SALTS: [&str; 3] = ["tenant-a", "tenant-b", "tenant-c"];
pub(crate) const LORAS: [&str; 2] = ["sql", "poet"];

/// Number of system prompts.
const GROUPS: u64 = 24;
const VOCABULARY: u64 = 100_000;

/// One request.
#[derive(Clone, Debug)]
pub(crate) struct WorkloadRequest {
    pub(crate) tokens: Vec<u32>,
    pub(crate) output_tokens: u32,
    pub(crate) lora_name: Option<&'static str>,
    pub(crate) cache_salt: Option<&'static str>,
    constraints: Constraints,
}

impl WorkloadRequest {
    /// The `n`-th request of a sequence.
    pub(crate) fn nth(seed: u64, n: u64) -> Self {
        let mut dice = Dice(mix(seed ^ mix(n)));
        let (lora_name, cache_salt) = match dice.below(100) {
            0..15 => (None, Some(SALTS[dice.index(3)])),
            15..25 => (Some(LORAS[dice.index(2)]), None),
            25..30 => (Some(LORAS[dice.index(2)]), Some(SALTS[dice.index(3)])),
            _ => (None, None),
        };
        let group = dice.below(GROUPS).min(dice.below(GROUPS));
        let branch = group * 8 + dice.below(4);
        let mut tokens = Vec::new();
        stretch(&mut tokens, 1, group, (3 + group % 6) * 16);
        stretch(&mut tokens, 2, branch, (branch % 6) * 16);
        let tail_tokens = match dice.below(20) {
            0 => 0, // the same prompt again, of complete blocks only
            1..3 => dice.below(380),
            _ => 1 + dice.below(200),
        };
        stretch(&mut tokens, 3 + seed, n, tail_tokens);
        Self::new(tokens, 1 + dice.below(8) as u32, lora_name, cache_salt)
    }

    /// A short unique prompt.
    pub(crate) fn unshared(n: u64) -> Self {
        let mut tokens = Vec::new();
        stretch(&mut tokens, u64::MAX, n, 40);
        Self::new(tokens, 1, None, None)
    }

    /// The same tokens with another adapter and salt.
    pub(crate) fn with_namespace(&self, lora_name: Option<&'static str>, cache_salt: Option<&'static str>) -> Self {
        Self::new(self.tokens.clone(), self.output_tokens, lora_name, cache_salt)
    }

    fn new(
        tokens: Vec<u32>,
        output_tokens: u32,
        lora_name: Option<&'static str>,
        cache_salt: Option<&'static str>,
    ) -> Self {
        let is_named = lora_name.is_some() || cache_salt.is_some();
        let required_taints = is_named.then(|| NAMES.to_owned()).into_iter().collect();
        let constraints = Constraints { required_taints, ..Constraints::default() };
        Self { tokens, output_tokens, lora_name, cache_salt, constraints }
    }

    /// The request to the router.
    pub(crate) fn route_request<'a>(&'a self, id: &'a str) -> RouteRequest<'a> {
        let options = RequestOptions {
            lora_name: self.lora_name.map(Into::into),
            cache_salt: self.cache_salt.map(Into::into),
            constraints: self.constraints.clone(),
            ..RequestOptions::default()
        };
        RouteRequest { options, ..RouteRequest::new(id, Prompt::Tokens(&self.tokens)) }
    }

    /// Hashes of its complete blocks.
    pub(crate) fn block_hashes(&self) -> Vec<BlockHash> {
        block_hashes(&self.tokens, self.lora_name, self.cache_salt)
    }

    /// Tokens that the engine can reuse if the whole prompt is cached. The last token is always computed.
    pub(crate) fn reusable_tokens(&self) -> u32 {
        (self.tokens.len() as u32 - 1) / BLOCK_SIZE * BLOCK_SIZE
    }
}

/// Hashes of the complete blocks of `tokens`.
pub(crate) fn block_hashes(tokens: &[u32], lora_name: Option<&str>, cache_salt: Option<&str>) -> Vec<BlockHash> {
    block_hashes_of(BLOCK_SIZE, tokens, lora_name, cache_salt)
}

/// The same with another block size.
pub(crate) fn block_hashes_of(
    block_size: u32,
    tokens: &[u32],
    lora_name: Option<&str>,
    cache_salt: Option<&str>,
) -> Vec<BlockHash> {
    let plain = HashScheme::new(block_size.try_into().expect("not zero"));
    let hasher = BlockHasher::new(HashScheme { lora_name, cache_salt, ..plain });
    hasher.hashes(tokens, &MmBlocks::NONE).collect()
}

/// Appends `count` tokens that depend on `kind` and `of` only.
fn stretch(tokens: &mut Vec<u32>, kind: u64, of: u64, count: u64) {
    let mut dice = Dice(mix(kind ^ mix(of)));
    tokens.extend((0..count).map(|_| dice.below(VOCABULARY) as u32));
}

struct Dice(u64);

impl Dice {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        (mix(self.0) >> 16) % n
    }

    fn index(&mut self, n: u64) -> usize {
        self.below(n) as usize
    }
}
