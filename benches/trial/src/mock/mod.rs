//! An LLM engine without a GPU, that speaks what real ones speak.
//!
//! Owns the mock engine: HTTP as OpenAI's clients know it, cache events as vLLM and SGLang of several ages publish
//! them, replay, data-parallel ranks, and faults on demand. Promises that the same seed and the same requests in the
//! same order give the same tokens and the same events, and that a router which has applied all events of a quiet
//! engine holds exactly [`MockEngine::held`]. Leaves batching, cache and the cost of a step to [`crate::engine`], and
//! real text to real engines.

mod config;
mod engine;
mod faults;
mod http;
mod publisher;
mod rank;
mod sockets;
mod tokenizer;

pub use crate::engine::{Block, EngineHash, Tier};
pub use crate::kv_events::{Dialect, EventFormat};
pub use config::MockConfig;
pub use engine::{MockEngine, MockError};
pub use faults::{Fault, FaultBoard, Faults, Scope};
pub use tokenizer::{chat_text, detokenize, tokenize};
