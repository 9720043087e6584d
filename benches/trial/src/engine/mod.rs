//! Deterministic model of one rank of an LLM engine: continuous batching over a paged prefix cache.
//!
//! The model decides which requests run, the tokens and the duration of each step, and which blocks are shared, evicted
//! or kept in host memory. It records the cache events that an engine would publish. The same calls give the same bytes
//! on every machine. The events alone are sufficient to rebuild [`Rank::held`] in each tier. The cost of a step is
//! proportional to the sequences and blocks it touches, not to the size of the cache. The caller provides time (a step
//! reports its duration, the caller waits or adds it up), transport, text, and a limit on waiting requests.
//!
//! 10,000 steps of 64 decoding sequences at 1,000 tokens of context, 302 modelled seconds, take 24 ms of one core
//! (2-core shared AMD EPYC, release). A held block takes the memory of its tokens and about 200 bytes.
//!
//! The model reproduces these properties of real engines:
//!
//! - Only complete blocks are cached and published, in the step that computes their last token. This holds for prompt
//!   and generated tokens.
//! - A prompt reuses its leading cached blocks, but its last token is always computed. A fully cached prompt computes
//!   its last block again.
//! - Freeing a block publishes no event. A freed block remains in the cache until its memory is needed. Eviction takes
//!   the block that was free for the longest time, the last block of a sequence before its first. The removal event
//!   precedes the store that caused it.
//! - Slots without a cached block are allocated before slots with one.
//! - A computed block that the device already holds is stored as a further copy. It has its own store and removal
//!   events and is used by its own sequence alone. A prompt finds the copy stored first. (vLLM; with
//!   [`EngineConfig::deduplicates`] the held block replaces the computed one and no event is published, as in SGLang.)
//! - The ancestors of a held block are held too, in some tier, unless a clear kept the host. Host memory holds each hash
//!   once.
//! - One block of device memory is never allocated, like vLLM's null block.
//! - If no block is free for the next token of a running sequence, the youngest sequence is preempted. It loses its
//!   blocks, moves to the front of the queue and later recomputes the blocks that the cache has lost, generated tokens
//!   included. No request is admitted in that step.
//! - At most one sequence, the youngest, has uncomputed prompt tokens at the end of a step. If no blocks are free for
//!   it, it waits with the blocks it has, and no other request is admitted. With [`BlockShortage::PromptsPreempt`] it
//!   is preempted instead, and a request is admitted only if all of its prompt fits, as in vLLM V1.
//! - One budget of tokens per step ([`EngineConfig::step_tokens_max`], vLLM's `max_num_batched_tokens`) serves the
//!   running sequences in order of admission, then waiting requests. [`EngineConfig::sequences_max`] is vLLM's
//!   `max_num_seqs`. [`EngineConfig::prefill_chunk_max`] is vLLM's `long_prefill_token_threshold`: a long prompt leaves
//!   the rest of the budget to later requests, so several prompts may be partially computed. vLLM's
//!   `max_num_partial_prefills` has no counterpart: the V1 scheduler does not read it, but above 1 it sets the threshold
//!   to 4 % of the model length unless that is given.
//! - With [`Speculation`] a decoding sequence computes its next token and its draft tokens in one step, within the same
//!   budget, and allocates blocks for all. The leading accepted draft tokens and one more token are its output. Blocks
//!   of rejected draft tokens stay with the sequence for its next tokens. A block with an unverified token is not
//!   cached; it is cached and published in the next step of its sequence. A sequence has draft tokens only after its
//!   last step generated a token, so none after a preemption. The additional lookahead blocks that vLLM allocates for a
//!   drafter with its own KV cache are not modelled.
//! - In disaggregated serving ([`Stage`]) the blocks of a finished prefill stay in use until they are released. A request
//!   whose prompt was computed elsewhere computes only its last token. The transfer itself takes no time. If held
//!   blocks leave no memory for the running and waiting requests, no step runs until some are released.
//! - With a host tier, blocks evicted from the device are kept there and loaded back on a hit. A load reads before it
//!   overwrites: a block that the same admission evicts from the host still counts as a hit. With
//!   [`EngineConfig::writes_through`] the host also gets a copy of each computed block.
//! - With [`EngineConfig::beside_window_blocks`] a second cache group, of a sliding window or of Mamba states, keeps the
//!   last blocks of each computation. A hit ends where both groups allow it.
//!
//! ```
//! use pointsman_trial::engine::{EngineConfig, Rank, RequestSpec};
//!
//! let mut rank = Rank::new(EngineConfig::default())?;
//! let tokens: Vec<u32> = (0..200).collect();
//! let request = |id| RequestSpec::new(id, tokens.clone(), 1);
//! rank.submit(request(1))?;
//! let step = rank.step().expect("a request waits");
//! assert_eq!((step.prefill_tokens, step.outputs[0].cached_tokens), (200, 0));
//!
//! rank.submit(request(2))?;
//! let step = rank.step().expect("a request waits");
//! assert_eq!((step.prefill_tokens, step.outputs[0].cached_tokens), (8, 192));
//! assert!(rank.step().is_none());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod beside;
mod block;
mod cache;
mod config;
mod event;
mod rank;
mod schedule;
mod sequence;
mod state;
mod work;

pub use block::{Block, EngineHash};
#[cfg(feature = "mock")]
pub(crate) use config::BLOCKS_MAX;
pub use config::{BlockShortage, ConfigError, EngineConfig, Speculation};
pub use event::{CacheEvent, Tier};
pub use sequence::{Refused, RequestSpec, Stage};
pub use state::{Finish, Load, Outlook, Output, Partial, Rank, Step};
pub use work::{StepCost, Work};
