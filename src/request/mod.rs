//! One request to the router: id, prompt and options.
//!
//! [`RouteRequest`] is the only request type: the handle, the tower layer and serde use it alike. A request that borrows
//! its tokens and keeps the default options allocates nothing. `RouteRequest<'static>` owns its parts; the tower layer
//! reads it from the extensions of an HTTP request. The router validates and resolves the options with
//! its configuration: [`ResolvedOptions::resolve`](crate::schedule::ResolvedOptions::resolve).

mod resolve;

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::config::{OnTargetMiss, RouterConfigOverride};
use crate::hashing::{HashedPrompt, MmSpan};
use crate::select::Constraints;

/// A prompt: token ids, or hashes.
///
/// In JSON `{"tokens": [..]}` or `{"hashed": {"block_hashes": [..], "prompt_tokens": ..}}`. Deserialized tokens are owned.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", from = "OwnedPrompt")]
pub enum Prompt<'a> {
    /// Token ids of the caller. The calling task hashes them; the router keeps no copy.
    Tokens(&'a [u32]),
    /// Token ids that the request owns.
    #[serde(rename = "tokens")]
    OwnedTokens(Arc<[u32]>),
    /// Hashes that the caller computed, or took from an earlier decision. LoRA name, salt and spans are part of them.
    Hashed(HashedPrompt),
}

impl Prompt<'_> {
    /// The token ids; `None` for hashes.
    #[must_use]
    pub fn tokens(&self) -> Option<&[u32]> {
        match self {
            Self::Tokens(tokens) => Some(tokens),
            Self::OwnedTokens(tokens) => Some(tokens),
            Self::Hashed(_) => None,
        }
    }

    /// Length in tokens.
    #[must_use]
    pub fn prompt_tokens(&self) -> usize {
        match self {
            Self::Tokens(tokens) => tokens.len(),
            Self::OwnedTokens(tokens) => tokens.len(),
            Self::Hashed(hashed) => hashed.prompt_tokens(),
        }
    }

    fn hashed(&self) -> Option<&HashedPrompt> {
        match self {
            Self::Tokens(_) | Self::OwnedTokens(_) => None,
            Self::Hashed(hashed) => Some(hashed),
        }
    }
}

/// Borrowed and owned tokens are equal if the token ids are.
impl PartialEq for Prompt<'_> {
    fn eq(&self, other: &Self) -> bool {
        (self.tokens(), self.hashed()) == (other.tokens(), other.hashed())
    }
}

/// [`Prompt`] as deserialized.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum OwnedPrompt {
    Tokens(Arc<[u32]>),
    Hashed(HashedPrompt),
}

impl From<OwnedPrompt> for Prompt<'_> {
    fn from(prompt: OwnedPrompt) -> Self {
        match prompt {
            OwnedPrompt::Tokens(tokens) => Self::OwnedTokens(tokens),
            OwnedPrompt::Hashed(hashed) => Self::Hashed(hashed),
        }
    }
}

/// A request to be placed.
///
/// ```
/// use pointsman::{Prompt, RequestOptions, RouteRequest};
///
/// let options = RequestOptions { lora_name: Some("support-bot".into()), ..RequestOptions::default() };
/// let request = RouteRequest { options, ..RouteRequest::new("req-1", Prompt::Tokens(&[1, 2, 3])) };
/// assert_eq!(request.request_id.as_deref(), Some("req-1"));
///
/// let json = r#"{"request_id": "req-1", "prompt": {"tokens": [1, 2, 3]}, "options": {"lora_name": "support-bot"}}"#;
/// assert_eq!(serde_json::from_str::<RouteRequest<'static>>(json)?, request);
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RouteRequest<'a> {
    /// Id of the booking; unique among the bookings that have not ended. Queries need none.
    pub request_id: Option<Cow<'a, str>>,
    /// The prompt.
    pub prompt: Prompt<'a>,
    /// The options.
    #[serde(default)]
    pub options: RequestOptions,
}

impl<'a> RouteRequest<'a> {
    /// A request with default options.
    #[must_use]
    pub fn new(request_id: impl Into<Cow<'a, str>>, prompt: Prompt<'a>) -> Self {
        Self { request_id: Some(request_id.into()), ..Self::query(prompt) }
    }

    /// A query: a request without id and with default options.
    #[must_use]
    pub fn query(prompt: Prompt<'a>) -> Self {
        Self { request_id: None, prompt, options: RequestOptions::default() }
    }
}

/// Options of a request. The defaults set none, and cost no allocation.
///
/// ```
/// use pointsman::RequestOptions;
///
/// let options: RequestOptions = serde_json::from_str(r#"{"do_not_queue": true, "deadline_ms": 250}"#)?;
/// assert!(options.do_not_queue && options.tenant.is_none());
/// assert!(serde_json::from_str::<RequestOptions>(r#"{"priority": 1}"#).is_err()); // unknown fields are rejected
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RequestOptions {
    /// LoRA adapter of the request; the empty name stands for none.
    pub lora_name: Option<Arc<str>>,
    /// Separates cached blocks: only requests with equal salts share them. The empty salt stands for none.
    pub cache_salt: Option<Arc<str>>,
    /// Multimodal objects in the prompt, for engines whose KV events carry the hashes of such objects.
    pub mm_spans: Vec<MmSpan>,
    /// Whether the decision contains the prompt's hashes.
    pub routing_hashes: bool,
    /// Whether the durations of the phases are measured for the placement: a few clock reads.
    pub phases: bool,
    /// Tenant of the request, any text. The tenants of a class are served in turn by fair queueing; requests without one
    /// form a tenant of their own.
    pub tenant: Option<Arc<str>>,
    /// Requests with a higher value leave the queue first, before any other criterion.
    pub strict_priority: u32,
    /// Seconds of advance over other requests of the same tenant in the queue. Finite; negative values count as 0.
    pub priority_jump: f64,
    /// Longest time until placement; afterwards the request is rejected as expired. In JSON `deadline_ms`, milliseconds.
    #[serde(rename = "deadline_ms", with = "option_ms")]
    pub deadline: Option<Duration>,
    /// Queue class, or family of classes.
    pub policy_class: Option<Arc<str>>,
    /// Whether the request is rejected instead of queued.
    pub do_not_queue: bool,
    /// Ranks that may serve the request, and preferences among them.
    pub constraints: Constraints,
    /// Session id, 1 to 256 bytes: see `session.affinity`. Each agent of a program has a session of its own.
    pub session_id: Option<Arc<str>>,
    /// Program of the session, any text: the task that its agents share. Default: a program of one agent.
    pub program: Option<Arc<str>>,
    /// Forecast of the length of an output in tokens. It replaces the mean that the router has learned for the request's
    /// session, tenant or pool. The tower layer also derives the decay of the output blocks from it.
    pub expected_output_tokens: Option<u32>,
    /// Limit of the output length in tokens, as `max_tokens` of a client. It caps the forecast and is none itself.
    pub output_tokens_max: Option<u32>,
    /// Tokens of further distinct prompts of the request. They are computed in full, with no block from a cache.
    pub further_prompt_tokens: u32,
    /// Outputs beside the first, of copies (`n`) or further prompts. Each reads as much as the first prompt.
    pub further_outputs: u32,
    /// Whether the response is sent as a whole, without a report of the first token. The prefill then counts as complete
    /// after its expected duration.
    pub not_streamed: bool,
    /// Longest time from the request to its first token: a preference for ranks that are predicted to meet it. In JSON
    /// `ttft_ms`, milliseconds; above 0.
    #[serde(rename = "ttft_ms", with = "option_fractional_ms")]
    pub ttft_target: Option<Duration>,
    /// Longest mean time between two tokens of the response (inter-token latency), likewise. In JSON `itl_ms`,
    /// milliseconds; above 0.
    #[serde(rename = "itl_ms", with = "option_fractional_ms")]
    pub itl_target: Option<Duration>,
    /// Effect of targets that no rank is predicted to meet; `None` for `on_target_miss` of the router's configuration.
    pub on_target_miss: Option<OnTargetMiss>,
    /// Overrides of the router's configuration.
    pub overrides: RouterConfigOverride,
}

impl RequestOptions {
    /// The forecast of the length of all outputs, each at most [`RequestOptions::output_tokens_max`]; `None` without a
    /// forecast.
    #[must_use]
    pub fn forecast_output_tokens(&self) -> Option<u32> {
        let outputs = self.further_outputs.saturating_add(1);
        let of_one = |tokens: u32| tokens.min(self.output_tokens_max.unwrap_or(tokens));
        self.expected_output_tokens.map(|tokens| of_one(tokens).saturating_mul(outputs))
    }
}

/// An optional duration as whole milliseconds.
mod option_ms {
    use std::time::Duration;

    use serde::{Deserialize as _, Deserializer, Serialize as _, Serializer};

    #[expect(clippy::ref_option, reason = "the signature that serde expects")]
    pub(super) fn serialize<S: Serializer>(duration: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
        duration.map(|duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)).serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
        Ok(Option::<u64>::deserialize(deserializer)?.map(Duration::from_millis))
    }
}

/// An optional positive duration as milliseconds, with a fraction.
mod option_fractional_ms {
    use std::time::Duration;

    use serde::de::{Error as _, Unexpected};
    use serde::{Deserialize as _, Deserializer, Serialize as _, Serializer};

    #[expect(clippy::ref_option, reason = "the signature that serde expects")]
    pub(super) fn serialize<S: Serializer>(duration: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
        duration.map(|duration| duration.as_secs_f64() * 1e3).serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
        let Some(ms) = Option::<f64>::deserialize(deserializer)? else { return Ok(None) };
        let duration = Duration::try_from_secs_f64(ms / 1e3).ok().filter(|duration| !duration.is_zero());
        let invalid = || D::Error::invalid_value(Unexpected::Float(ms), &"a positive number of milliseconds");
        duration.map(Some).ok_or_else(invalid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(json: &str) -> Result<RouteRequest<'static>, String> {
        serde_json::from_str(json).map_err(|error| error.to_string())
    }

    #[test]
    fn requests_round_trip_and_unknown_keys_are_rejected() {
        let full = r#"{"prompt":{"hashed":{"block_hashes":[1,2],"prompt_tokens":9}},"options":{"strict_priority":2,
            "deadline_ms":250,"ttft_ms":500,"itl_ms":12.5,"on_target_miss":"reject","constraints":{"pin":{"worker":7,"mode":"soft"}},"overrides":{"temperature":0.5}}}"#;
        let parsed = request(full).expect("well formed");
        let RequestOptions { deadline, ttft_target, itl_target, on_target_miss, .. } = &parsed.options;
        assert_eq!((*deadline, *ttft_target), (Some(Duration::from_millis(250)), Some(Duration::from_millis(500))));
        assert_eq!((*itl_target, *on_target_miss), (Some(Duration::from_micros(12_500)), Some(OnTargetMiss::Reject)));
        let again = serde_json::to_string(&parsed).expect("plain data");
        assert_eq!(request(&again).expect("its own output"), parsed);
        let borrowed = RouteRequest::query(Prompt::Tokens(&[1, 2]));
        let written = serde_json::to_string(&borrowed).expect("plain data");
        assert_eq!(request(&written).expect("its own output"), borrowed, "borrowed tokens become owned ones");
        for (wrong, named) in [
            (r#"{"prompt":{"tokenz":[1]}}"#, "tokenz"),
            (r#"{"prompt":{"tokens":[1]},"optionz":{}}"#, "optionz"),
            (r#"{"prompt":{"tokens":[1]},"options":{"tenantz":"a"}}"#, "tenantz"),
            (r#"{"request_id":"a"}"#, "prompt"),
            (r#"{"prompt":{"tokens":[1],"hashed":{"block_hashes":[],"prompt_tokens":1}}}"#, "expected"),
            (r#"{"prompt":{"hashed":{"block_hashes":[1]}}}"#, "prompt_tokens"),
            (r#"{"prompt":{"tokens":[1]},"options":{"ttft_ms":0}}"#, "a positive number of milliseconds"),
            (r#"{"prompt":{"tokens":[1]},"options":{"itl_ms":-1}}"#, "a positive number of milliseconds"),
            (r#"{"prompt":{"tokens":[1]},"options":{"itl_ms":1e300}}"#, "a positive number of milliseconds"),
            (r#"{"prompt":{"tokens":[1]},"options":{"on_target_miss":"drop"}}"#, "expected `serve` or `reject`"),
            (r#"{"prompt":{"hashed":{"block_hashes":[1],"sequence_hashes":[],"prompt_tokens":9}}}"#, "sequence_hashes"),
        ] {
            let error = request(wrong).expect_err(wrong);
            assert!(error.contains(named), "{wrong}: {error}");
        }
    }

    #[test]
    fn the_output_limit_caps_the_forecast_but_is_not_one() {
        let of = |expected_output_tokens, output_tokens_max| {
            let further_outputs = 1;
            let options = RequestOptions {
                expected_output_tokens,
                output_tokens_max,
                further_outputs,
                ..RequestOptions::default()
            };
            options.forecast_output_tokens().map(|tokens| tokens / 2)
        };
        assert_eq!((of(Some(300), Some(100)), of(Some(300), None), of(None, Some(100))), (Some(100), Some(300), None));
    }
}
