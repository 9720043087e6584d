//! Context of an agent: the prompt that its next call extends.
//!
//! An agent may call while its context is in use: for titles, classifications, or summaries. A prompt below half of the
//! context is such an auxiliary call and changes nothing, unless it begins like the context. Then the agent has compacted
//! its context. A compaction that also replaces the first blocks is recognized by its second call. A prompt of unknown
//! length is never auxiliary.

use std::time::Duration;

use crate::load::{PromptBlocks, PromptFingerprint};
use crate::protocol::{SequenceHash, Timestamp};

/// Time without use after which short prompts replace a context. Auxiliary calls follow each other closely.
const UNUSED: Duration = Duration::from_secs(30);

/// Shares of a context, as shifts, by which its recognized prefixes are shorter than it. Consecutive prompts of an agent
/// mostly differ in the last percents.
const CUTS: [u32; 7] = [31, 6, 5, 4, 3, 2, 1];

/// A placed call of an agent.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// Key of the program.
    pub program: u64,
    /// Its prompt.
    pub prompt: &'a PromptBlocks,
    /// Fingerprint of the prompt.
    pub fingerprint: PromptFingerprint,
    /// Length of the prompt.
    pub prompt_tokens: u32,
    /// Leading blocks of the prompt that a rank holds.
    pub held_blocks: u32,
    /// Tokens of these blocks.
    pub held_tokens: u32,
}

/// See the module documentation. The default is no prompt.
#[derive(Clone, Copy, Debug)]
pub(super) struct Context {
    pub(super) tokens: u32,
    /// Leading tokens that a rank held before the first call, and that therefore belong to another program, too.
    shared_tokens: u32,
    blocks: u32,
    /// Low bits of the hashes at the ends of the recognized prefixes.
    marks: [u32; CUTS.len()],
    head: PromptFingerprint,
    used: Timestamp,
    /// Whether the last call did not change it.
    is_doubted: bool,
}

impl Default for Context {
    fn default() -> Self {
        let (head, used) = (PromptFingerprint::unshared(), Timestamp::default());
        Self { tokens: 0, shared_tokens: 0, blocks: 0, marks: [0; CUTS.len()], head, used, is_doubted: false }
    }
}

impl Context {
    /// The context after a call at another replica.
    pub(super) fn received(&self, tokens: u32) -> Self {
        Self { tokens, shared_tokens: self.shared_tokens, ..Self::default() }
    }

    /// Tokens that no other program uses.
    pub(super) fn own_tokens(&self) -> u32 {
        self.tokens.saturating_sub(self.shared_tokens)
    }

    /// Whether the call continues or replaces the context.
    pub(super) fn is_of(&mut self, call: &Call<'_>, now: Timestamp) -> bool {
        let is_short = (1..self.tokens / 2).contains(&call.prompt_tokens);
        let is_replaced = self.is_doubted && now.since(self.used) >= UNUSED;
        let is_of = !is_short || is_replaced || self.head.agrees_with(&call.fingerprint);
        self.is_doubted = !is_of;
        is_of
    }

    /// The prompt of the call is the context.
    pub(super) fn extend(&mut self, call: &Call<'_>, now: Timestamp) {
        if self.tokens == 0 {
            self.shared_tokens = call.held_tokens;
        }
        let hashes = hashes(call.prompt);
        self.blocks = u32::try_from(hashes.len()).unwrap_or(u32::MAX);
        (self.tokens, self.head, self.used) = (call.prompt_tokens, call.fingerprint, now);
        self.marks = self.depths().map(|depth| mark(call.prompt, depth).unwrap_or(0));
    }

    /// Leading blocks of the context that the prompt has, too, from half of the context on.
    pub(super) fn common_blocks(&self, prompt: &PromptBlocks) -> u32 {
        let known = self.depths().into_iter().zip(self.marks);
        known.filter(|(depth, known)| mark(prompt, *depth) == Some(*known)).map(|(depth, _)| depth).max().unwrap_or(0)
    }

    /// Ends of the recognized prefixes, in blocks.
    fn depths(&self) -> [u32; CUTS.len()] {
        CUTS.map(|cut| self.blocks - (self.blocks >> cut))
    }
}

fn hashes(prompt: &PromptBlocks) -> &[SequenceHash] {
    if let PromptBlocks::Hashed(hashes) = prompt { hashes } else { &[] }
}

fn mark(prompt: &PromptBlocks, depth: u32) -> Option<u32> {
    hashes(prompt).get((depth as usize).checked_sub(1)?).map(|hash| hash.0 as u32)
}
