//! Prefill of a request with a started response, and its changes of the response.

use super::engine_abort::EngineAbort;
use super::leg::Leg;
use super::prefill_leg::PrefillEnd;
use crate::pools::disaggregation::{PrefillResult, PrefillValues};

/// Prefill of a request with a started response.
pub(crate) struct PrefillReport {
    pub(crate) result: PrefillResult,
    pub(super) corrections: Corrections,
    /// The prefill leg, if it continues. It is cancelled with this value.
    pub(super) _leg: Leg<PrefillEnd>,
    /// Abort of the decode leg, if its response does not end.
    pub(super) decode_abort: EngineAbort,
}

impl PrefillReport {
    /// Of a request without a prefill leg in progress.
    pub(super) fn new(result: PrefillResult) -> Self {
        let corrections = Corrections::default();
        Self { result, corrections, _leg: Leg::default(), decode_abort: EngineAbort::default() }
    }
}

/// Changes of the response of a decode leg.
#[derive(Clone, Default)]
pub(super) struct Corrections {
    pub(super) values: PrefillValues,
    /// Whether the response receives the probabilities of the prompt's tokens.
    pub(super) adds_logprobs: bool,
}
