//! Metrics of tokenization.
//!
//! The number of series is bounded: models are configured, sources and reasons are constants.

use std::time::Duration;

use metrics::{Counter, Gauge, Histogram};

use super::TokenSource;
use crate::observe::metric::{Metric, metric_table};

metric_table! {
    SOURCE: gauge "pointsman_gateway_tokens_source" ["model", "source"] =
        "1 for the active token source of prompts without token ids.";
    TOKENS: counter "pointsman_gateway_tokens_total" ["model", "source", "reason"] =
        "Prompts by token source, and by reason for missing tokens; `media_prefix` for tokens up to an unknown item.";
    SECONDS: histogram "pointsman_gateway_tokenize_seconds" ["source"] =
        "Time until the tokens of a prompt are available, including queueing; source `none`: until it is routed without.";
    FROM_CACHE: counter "pointsman_gateway_prompt_tokens_from_cache_total" ["model"] =
        "Prompt tokens found in the tokenizer cache.";
    TOKENIZED: counter "pointsman_gateway_prompt_tokens_tokenized_total" ["model"] =
        "Prompt tokens computed by the tokenizer.";
    CACHE_BYTES: gauge "pointsman_gateway_prompt_cache_bytes" ["model"] = "Memory of the tokenizer cache.";
    PARITY: counter "pointsman_gateway_tokens_parity_total" ["model", "result"] =
        "Samples compared with an engine's tokenizer, by result.";
}

/// Reason of prompts with media whose tokens are known only before an item.
const MEDIA_PREFIX: &str = "media_prefix";

/// Metric handles of one model.
pub(super) struct TokenMeters {
    model: String,
    pub(super) from_cache: Counter,
    pub(super) tokenized: Counter,
    pub(super) cache_bytes: Gauge,
    /// Prompts with tokens, by [`TokenSource`].
    with_tokens: [Counter; 4],
    seconds: [Histogram; 4],
}

const SOURCES: [TokenSource; 4] = TokenSource::ALL;

impl TokenMeters {
    pub(super) fn new(model: &str) -> Self {
        METRICS.iter().for_each(Metric::describe);
        let label = || model.to_owned();
        Self {
            model: label(),
            from_cache: metrics::counter!(FROM_CACHE.name, "model" => label()),
            tokenized: metrics::counter!(TOKENIZED.name, "model" => label()),
            cache_bytes: metrics::gauge!(CACHE_BYTES.name, "model" => label()),
            with_tokens: SOURCES.map(
                |source| metrics::counter!(TOKENS.name, "model" => label(), "source" => source.name(), "reason" => ""),
            ),
            seconds: SOURCES.map(|source| metrics::histogram!(SECONDS.name, "source" => source.name())),
        }
    }

    pub(super) fn source(&self, used: TokenSource) {
        for source in [TokenSource::Local, TokenSource::Engine, TokenSource::None] {
            let is_used = if source == used { 1.0 } else { 0.0 };
            metrics::gauge!(SOURCE.name, "model" => self.model.clone(), "source" => source.name()).set(is_used);
        }
    }

    /// Counts a prompt with tokens.
    pub(super) fn with_tokens(&self, source: TokenSource) {
        self.with_tokens[source as usize].increment(1);
    }

    /// Counts a prompt with media whose tokens are known only before an item.
    pub(super) fn media_prefix(&self, source: TokenSource) {
        let (model, source) = (self.model.clone(), source.name());
        metrics::counter!(TOKENS.name, "model" => model, "source" => source, "reason" => MEDIA_PREFIX).increment(1);
    }

    /// Counts a prompt without tokens.
    pub(super) fn without_tokens(&self, reason: &'static str) {
        let source = TokenSource::None.name();
        metrics::counter!(TOKENS.name, "model" => self.model.clone(), "source" => source, "reason" => reason)
            .increment(1);
    }

    /// Records the time until the tokens of a prompt are available, including queueing.
    pub(super) fn record_time(&self, source: TokenSource, time: Duration) {
        self.seconds[source as usize].record(time);
    }

    pub(super) fn parity(&self, result: &'static str) {
        metrics::counter!(PARITY.name, "model" => self.model.clone(), "result" => result).increment(1);
    }
}
