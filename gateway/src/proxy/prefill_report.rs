//! Prefill of a request with a started response.

use super::engine_calls::EngineCalls;
use super::leg::Leg;
use super::prefill_leg::PrefillEnd;
use crate::pools::disaggregation::{PrefillResult, PrefillTokens};

/// Prefill of a request with a started response.
pub(crate) struct PrefillReport {
    pub(crate) result: PrefillResult,
    pub(super) tokens: PrefillTokens,
    /// The prefill leg, if it continues. It is cancelled with this value.
    pub(super) _leg: Leg<PrefillEnd>,
    /// Abort of the decode leg, if its response does not end.
    pub(super) decode_abort: EngineCalls,
}

impl PrefillReport {
    /// Of a request without a prefill leg in progress.
    pub(super) fn new(result: PrefillResult) -> Self {
        let tokens = PrefillTokens::default();
        Self { result, tokens, _leg: Leg::default(), decode_abort: EngineCalls::default() }
    }
}
