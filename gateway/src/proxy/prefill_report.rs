//! Prefill of a request with a started response, and its changes of the response.

use std::sync::Arc;

use axum::body::Bytes;

use super::engine_abort::EngineAbort;
use super::leg::Leg;
use super::prefill_leg::PrefillEnd;
use crate::pools::disaggregation::{PrefillPool, PrefillResult, PrefillValues};

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
    /// Receives the parameters for the next turn.
    pub(super) next_turn: Option<NextTurn>,
}

/// Receiver of the parameters with which the next turn of a session can read the blocks of this one.
#[derive(Clone)]
pub(super) struct NextTurn {
    pub(super) pool: Arc<PrefillPool>,
    /// Without one the parameters are dropped.
    pub(super) session: Option<Arc<str>>,
}

impl NextTurn {
    pub(super) fn keep(&self, parameters: Bytes) {
        if let Some(session) = &self.session {
            self.pool.turn_ended(session, parameters);
        }
    }
}
