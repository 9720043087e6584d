//! A deterministic model of one rank of an LLM engine: continuous batching over a paged prefix cache.
//!
//! Owns what a rank would do next: which requests run, how many tokens each gets in a step, how long the step takes,
//! which blocks are shared, evicted, kept in host memory, and what the engine would announce of all that. Promises
//! that the same calls give the same bytes on every machine, that the announced events alone rebuild
//! [`Rank::held`] in each tier, and that a step costs in proportion to the sequences and blocks it touches, never to
//! what is held. Leaves to others: time (a step says how long it takes, the caller waits or adds it up), transport,
//! text, and a bound on the requests that wait.
//!
//! 10,000 steps of 64 decoding sequences at 1,000 tokens of context, 302 modelled seconds, take 24 ms of one core
//! (2-core shared AMD EPYC, release). A held block costs its tokens and some 200 bytes.
//!
//! It behaves as engines in the field do:
//!
//! - Only complete blocks are cached and announced, in the step that computes their last token, whether it came with
//!   the prompt or was generated.
//! - A prompt reuses its leading cached blocks, but at least its last token is always computed: a prompt that is
//!   cached whole computes its last block again.
//! - Freeing announces nothing; a freed block is found until its memory is needed. Then the one that was free for the
//!   longest goes, a sequence's last block before its first, and the removal precedes the store that caused it.
//! - Blocks that hold nothing findable are taken before any that do.
//! - A computed block that the device holds already is a further copy of it: announced again, used by its sequence
//!   alone, and removed by an event of its own. A prompt finds the copy stored first. (vLLM; with
//!   [`EngineConfig::deduplicates`] the block is swapped for the cached one and nothing is announced, as in SGLang.)
//! - A block's ancestors are held as long as it is, in some tier. Host memory holds each hash once.
//! - One block of the device's memory is never handed out, like vLLM's null block.
//! - Where there is no block for a running sequence's next token, the youngest one is preempted: it loses its blocks,
//!   waits in front of all others and computes again what the cache has lost meanwhile.
//! - At most one sequence, the youngest, has prompt left to compute when a step ends. Where it finds no blocks it waits
//!   with those it has, and nobody is admitted past it.
//! - With a host tier, what the device evicts is kept there, and loaded back when asked for. A load reads before
//!   anything is overwritten: a copy that the same admission pushes out of the host still counts.
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

mod block;
mod cache;
mod config;
mod list;
mod rank;
mod sequence;

pub use block::{Block, EngineHash};
pub use cache::{CacheEvent, Tier};
pub use config::{ConfigError, EngineConfig, StepCost, Work};
pub use rank::{Finish, Load, Outlook, Output, Partial, Rank, Step};
pub use sequence::{Refused, RequestSpec};
