//! Requests that cannot be handed over.

use super::Protocol;
use super::object::{ObjectText, elements};
use crate::formats::openai::Endpoint;

/// Maximum number of prompts in a handed-over batch. The bootstrap fields of both legs have an entry for each prompt.
pub(super) const BATCH_MAX: usize = 4096;

/// Reason why a request cannot be handed over. One decode rank serves such a request.
///
/// ```
/// use pointsman_gateway::formats::handover::{LegBodies, NotSplit, Protocol};
/// use pointsman_gateway::formats::openai::Endpoint;
///
/// let body = r#"{"prompt":"x","n":2}"#;
/// let bodies = LegBodies::parse(Endpoint::Completions, Protocol::VllmNixl, body.into());
/// assert_eq!(bodies.err(), Some(NotSplit::Choices));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum NotSplit {
    /// `n` or `best_of` is not 1. A transfer has the state of one choice, except with SGLang for a single prompt.
    #[error("n and best_of must be 1")]
    Choices,
    /// `echo` is set. Only the rank that computes the prompt has its probabilities. SGLang's decode engine has the text.
    #[error("echo must be false, or with sglang without logprobs")]
    Echo,
    /// `prompt_logprobs` is set. Only the rank that computes the prompt has its probabilities.
    #[error("prompt_logprobs must be absent")]
    PromptLogprobs,
    /// The engine does not hand over requests of this endpoint.
    #[error("the endpoint must be chat or completions, or responses with vllm_nixl")]
    Endpoint,
    /// Several prompts in one request. SGLang accepts up to 4,096.
    #[error("the body must have one prompt, or at most {BATCH_MAX} with sglang")]
    Batch,
    /// `prompt_embeds` is set. It adds prompts to the batch.
    #[error("prompt_embeds must be absent")]
    PromptEmbeds,
    /// `use_beam_search` is set. A transfer has the state of one beam.
    #[error("use_beam_search must be false")]
    BeamSearch,
    /// `background` is set. The response precedes the computation.
    #[error("background must be false")]
    Background,
    /// The prompt continues a response stored in the engine that generated it.
    #[error("previous_response_id, previous_input_messages, conversation and prompt must be absent")]
    Stored,
    /// A field that the legs change occurs twice. Engines might use different occurrences.
    #[error("the body must have {0} at most once")]
    Repeated(&'static str),
    /// The body is not a JSON object.
    #[error("the body must be a JSON object")]
    NotAnObject,
}

/// Number of prompts if the body has a list of prompts.
pub(super) type BatchSize = Option<usize>;

/// Checks whether a request can be handed over, and returns the batch size.
pub(super) fn check(endpoint: Endpoint, protocol: Protocol, body: &ObjectText<'_>) -> Result<BatchSize, NotSplit> {
    let has = |name| body.json(name).is_some();
    let is_set = |name| body.json(name).is_some_and(|json| json != "false");
    // Invalid values are left to one engine, which rejects them before any computation.
    let is_several = |name| body.json(name).is_some_and(|json| json.parse() != Ok(1.0_f64));
    // SGLang numbers the rooms of the choices itself, from one room (reference: SGLang, `GenerateReqInput`). The rooms of
    // a batch are lists, which it repeats for each choice.
    let is_numbered = protocol == Protocol::Sglang && body.json("prompt").and_then(prompts).is_none();
    if (is_several("n") || is_several("best_of")) && !is_numbered {
        return Err(NotSplit::Choices);
    }
    if is_set("echo") && (protocol != Protocol::Sglang || is_set("logprobs")) {
        return Err(NotSplit::Echo);
    }
    // 0 requests the probability of the prompt's own tokens.
    if has("prompt_logprobs") {
        return Err(NotSplit::PromptLogprobs);
    }
    if is_set("use_beam_search") {
        return Err(NotSplit::BeamSearch);
    }
    match endpoint {
        Endpoint::Responses => {
            if protocol != Protocol::VllmNixl {
                return Err(NotSplit::Endpoint);
            }
            if is_set("background") {
                return Err(NotSplit::Background);
            }
            let stored = ["previous_response_id", "previous_input_messages", "conversation", "prompt"];
            if stored.into_iter().any(has) { Err(NotSplit::Stored) } else { Ok(None) }
        }
        Endpoint::Chat => Ok(None),
        Endpoint::Completions => {
            if has("prompt_embeds") {
                return Err(NotSplit::PromptEmbeds);
            }
            let n_prompts = body.json("prompt").and_then(prompts);
            let prompts_max = if protocol == Protocol::Sglang { BATCH_MAX } else { 1 };
            if n_prompts.is_some_and(|n_prompts| n_prompts > prompts_max) {
                Err(NotSplit::Batch)
            } else {
                Ok(n_prompts)
            }
        }
        _ => Err(NotSplit::Endpoint),
    }
}

/// Number of prompts in a list of strings or of token lists; `None` for a single prompt.
fn prompts(prompt: &str) -> BatchSize {
    let first = prompt.strip_prefix('[')?.trim_ascii_start();
    if first.starts_with(['"', '[']) { elements(prompt).map(|prompts| prompts.len()) } else { None }
}
