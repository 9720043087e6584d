//! Requests to a router and its answers as plain data, for embedders that speak messages.
//!
//! Owns their shape on the wire: JSON or whatever serde writes, one method a message. Promises that unknown keys are
//! refused by name. Leaves the carrying out to `Router::handle`. The methods are those of NVIDIA Dynamo's router
//! endpoint, so that callers of one can learn the other quickly; the fields are Pointsman's.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::config::RouterConfigOverride;
use crate::hashing::{HashScheme, HashedPrompt, HashedPromptError, MmSpan};
use crate::protocol::{BlockHash, SequenceHash, WorkerId, WorkerRank};
use crate::queue::Backpressure;
use crate::schedule::PotentialLoad;
use crate::select::Constraints;

/// What a router is asked.
///
/// ```
/// use pointsman::message::RouterRequest;
///
/// let request: RouterRequest = serde_json::from_str(r#"{ "method": "new", "tokens": [1, 2, 3] }"#)?;
/// assert!(matches!(request, RouterRequest::New(prompt) if prompt.tokens == Some(vec![1, 2, 3])));
/// let free: RouterRequest = serde_json::from_str(r#"{ "method": "mark_free", "request_id": "a" }"#)?;
/// assert_eq!(free, RouterRequest::MarkFree { request_id: Some("a".to_owned()) });
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "method", rename_all = "snake_case")]
pub enum RouterRequest {
    /// Choose a rank and book it under the context's id.
    New(Box<PromptMessage>),
    /// What would every rank's load be with this prompt on it?
    PotentialLoads(Box<PromptMessage>),
    /// The first token is out.
    MarkPrefill {
        /// Whose; the context's where absent or blank.
        #[serde(default)]
        request_id: Option<String>,
    },
    /// The request is over.
    MarkFree {
        /// Which; the context's where absent or blank.
        #[serde(default)]
        request_id: Option<String>,
    },
}

/// A prompt with all that a request can say of itself: see `RouteRequest`, whose fields these are.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PromptMessage {
    /// Token ids. Either these, or block hashes.
    pub tokens: Option<Vec<u32>>,
    /// Hashes of the complete blocks, in place of tokens.
    pub block_hashes: Option<Vec<BlockHash>>,
    /// Sequence hashes beside the block hashes; derived where absent.
    pub sequence_hashes: Option<Vec<SequenceHash>>,
    /// Prompt length in tokens, beside the block hashes.
    pub isl_tokens: Option<u32>,
    /// The LoRA adapter it runs under.
    pub lora_name: Option<String>,
    /// Its cache salt.
    pub cache_salt: Option<String>,
    /// Images and the like in the prompt.
    pub mm_spans: Vec<MmSpan>,
    /// Higher leaves the queue first.
    pub strict_priority: u32,
    /// Seconds by which it goes ahead of its turn.
    pub priority_jump: f64,
    /// Milliseconds it may take to be placed.
    pub deadline_ms: Option<u64>,
    /// The class it waits in.
    pub policy_class: Option<String>,
    /// Whether it would rather be refused than wait.
    pub do_not_queue: bool,
    /// Who may serve it, and who should.
    pub constraints: Option<Constraints>,
    /// Its session.
    pub session_id: Option<String>,
    /// Output tokens that the caller expects.
    pub expected_output_tokens: Option<u32>,
    /// Output tokens that it may have at most.
    pub output_tokens_max: Option<u32>,
    /// Whether its answer comes whole, so that nobody reports its first token.
    pub not_streamed: bool,
    /// The customer it is for.
    pub tenant: Option<String>,
    /// Settings that are otherwise for it.
    pub overrides: Option<RouterConfigOverride>,
}

/// Why a message names no prompt.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PromptMessageError {
    /// Neither tokens nor hashes, or both.
    #[error("{given} given, must be exactly one of tokens and block_hashes")]
    OneOf {
        /// What there is.
        given: &'static str,
    },
    /// Hashes without a length.
    #[error("isl_tokens is missing beside block_hashes")]
    IslTokens,
    /// The hashes do not fit together.
    #[error(transparent)]
    Hashes(#[from] HashedPromptError),
}

/// A message's prompt, as the router takes it.
#[derive(Clone, Debug, PartialEq)]
pub enum MessagePrompt<'a> {
    /// Token ids.
    Tokens(&'a [u32]),
    /// Hashes.
    Hashed(HashedPrompt),
}

impl PromptMessage {
    /// The prompt that the message names, its hashes taken as made under `scheme`.
    ///
    /// # Errors
    /// When it names none, or more than one, or its hashes do not fit together.
    pub fn prompt(&self, scheme: &HashScheme<'_>) -> Result<MessagePrompt<'_>, PromptMessageError> {
        match (&self.tokens, &self.block_hashes) {
            (Some(tokens), None) => Ok(MessagePrompt::Tokens(tokens)),
            (None, Some(block_hashes)) => {
                let isl_tokens = self.isl_tokens.ok_or(PromptMessageError::IslTokens)?;
                let sequence_hashes = self.sequence_hashes.as_deref().map(Arc::from);
                let isl_tokens = usize::try_from(isl_tokens).unwrap_or(usize::MAX);
                let hashed =
                    HashedPrompt::from_hashes(block_hashes.as_slice().into(), sequence_hashes, isl_tokens, scheme)?;
                Ok(MessagePrompt::Hashed(hashed))
            }
            (None, None) => Err(PromptMessageError::OneOf { given: "neither" }),
            (Some(_), Some(_)) => Err(PromptMessageError::OneOf { given: "both" }),
        }
    }
}

/// What a router answers. Errors that are no outcome of routing are not among these.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "method", rename_all = "snake_case")]
pub enum RouterResponse {
    /// The request is booked.
    New {
        /// The worker.
        worker_id: WorkerId,
        /// Its rank.
        dp_rank: u32,
        /// Effective overlap in blocks, rounded.
        overlap_blocks: u32,
        /// Effective overlap in tokens.
        cached_tokens: u32,
    },
    /// It would have had to wait, and may not.
    QueueRejected {
        /// The class.
        policy_class: String,
        /// Which limit, or `do_not_queue`.
        reason: String,
        /// What waits of what the limit is about.
        current: u64,
        /// The limit.
        max: u64,
        /// When to try again, in milliseconds.
        retry_after_ms: u64,
    },
    /// The prefill is marked.
    PrefillMarked {
        /// Whether there was such a booking.
        success: bool,
    },
    /// The request is over.
    FreeMarked {
        /// Whether there was such a booking.
        success: bool,
    },
    /// What every rank's load would be.
    PotentialLoads {
        /// One row a rank, in rank order.
        loads: Vec<LoadMessage>,
        /// Requests that wait.
        pending_count: u64,
        /// Their prompt tokens.
        pending_isl_tokens: u64,
        /// Requests that wait, by class.
        pending_by_class: BTreeMap<String, u64>,
    },
}

/// One rank's load as it would be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadMessage {
    /// The worker.
    pub worker_id: WorkerId,
    /// Its rank.
    pub dp_rank: u32,
    /// Prefill tokens to compute, the request's own included.
    pub potential_prefill_tokens: u64,
    /// Blocks held, the request's included.
    pub potential_decode_blocks: u64,
    /// Requests active now.
    pub active_requests: u32,
}

impl From<PotentialLoad> for LoadMessage {
    fn from(load: PotentialLoad) -> Self {
        let PotentialLoad { rank, potential_prefill_tokens, potential_decode_blocks, active_requests } = load;
        let WorkerRank { worker: worker_id, rank: dp_rank } = rank;
        Self { worker_id, dp_rank, potential_prefill_tokens, potential_decode_blocks, active_requests }
    }
}

impl From<Backpressure> for RouterResponse {
    fn from(refused: Backpressure) -> Self {
        Self::QueueRejected {
            policy_class: refused.class.to_string(),
            reason: refused.limit.name().to_owned(),
            current: refused.current,
            max: refused.max,
            retry_after_ms: u64::try_from(refused.retry_after.as_millis()).unwrap_or(u64::MAX),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::*;

    fn message(json: &str) -> Result<RouterRequest, serde_json::Error> {
        serde_json::from_str(json)
    }

    #[test]
    fn messages_survive_the_wire_and_unknown_keys_do_not() {
        let full = r#"{"method":"new","block_hashes":[1,2],"isl_tokens":9,"strict_priority":2,
            "constraints":{"pin":{"worker":7,"mode":"soft"}},"overrides":{"temperature":0.5}}"#;
        let request = message(full).expect("well formed");
        let again = serde_json::to_string(&request).expect("plain data");
        assert_eq!(message(&again).expect("its own words"), request);
        assert!(message(r#"{"method":"new","tokenz":[1]}"#).expect_err("refused").to_string().contains("tokenz"));
        assert!(message(r#"{"method":"renew"}"#).expect_err("refused").to_string().contains("renew"));
        let marked = serde_json::to_string(&RouterResponse::FreeMarked { success: true }).expect("plain data");
        assert_eq!(marked, r#"{"method":"free_marked","success":true}"#);
    }

    #[test]
    fn a_message_names_exactly_one_prompt() {
        let scheme = HashScheme::new(NonZeroU32::new(4).expect("not zero"));
        let refused = |message: PromptMessage| message.prompt(&scheme).expect_err("refused").to_string();
        assert_eq!(refused(PromptMessage::default()), "neither given, must be exactly one of tokens and block_hashes");
        let hashes = Some(vec![BlockHash(1)]);
        let unsized_hashes = PromptMessage { block_hashes: hashes.clone(), ..PromptMessage::default() };
        assert_eq!(refused(unsized_hashes), "isl_tokens is missing beside block_hashes");
        let short = PromptMessage { block_hashes: hashes, isl_tokens: Some(3), ..PromptMessage::default() };
        assert!(refused(short).contains("isl_tokens is 3, must be at least 4"));
    }
}
