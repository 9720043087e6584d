//! Mock LLM engine without a GPU, with the interfaces of real engines.
//!
//! Provides OpenAI's HTTP API, cache events in the formats of several vLLM and SGLang releases, replay, data-parallel
//! ranks, and injected faults. Equal seeds and equal requests in the same order give equal tokens and events. A router
//! that has applied all events of a quiet engine holds exactly [`MockEngine::held`]. [`crate::engine`] models batching,
//! cache and the cost of a step. Generated text is meaningless.

mod config;
mod engine;
mod faults;
mod flags;
mod handover;
mod http;
mod ledger;
mod process;
mod publisher;
mod rank;
mod sockets;
mod tokenizer;

pub use crate::engine::{Block, EngineHash, Tier};
pub use crate::kv_events::{Dialect, EventFormat};
pub use config::{MockConfig, SlowPage};
pub use engine::MockError;
pub use faults::{Fault, FaultBoard, Faults, Scope};
pub(crate) use flags::of_flags;
pub use handover::{EngineRole, HandoverCounters, HandoverProtocol, LoadFailure};
pub use process::MockEngine;
pub use rank::RankCounters;
pub use tokenizer::{chat_text, detokenize, tokenize};
