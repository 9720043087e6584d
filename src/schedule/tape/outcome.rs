//! Bytes of the outcome of one request.

use crate::protocol::{Slot, WorkerRank};
use crate::record::bytes::{Reader, Recorded, put_number, put_text, put_word};
use crate::schedule::progress::Verdict;
use crate::schedule::types::Effect;

/// A recorded outcome of a request in a batch.
#[derive(Clone, Debug)]
pub(super) enum Outcome {
    /// It left without an evaluation.
    Passed,
    /// A query without a choice, which updates the loads of all ranks to the time of the batch.
    Aged,
    Chosen(Chosen),
    Rejected(String),
    /// It returned to the queue.
    Deferred,
}

/// A chosen rank, and a checksum of the decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Chosen {
    pub(super) slot: Slot,
    pub(super) digest: u64,
    pub(super) cached_tokens: u32,
    /// Predicted time to first token.
    pub(super) ttft_us: Option<u64>,
}

impl Chosen {
    /// The choice in an effect; `None` if that places no request.
    pub(super) fn of<T>(effect: &Effect<T>) -> Option<Self> {
        let (decision, number) = match effect {
            Effect::Book { decision, number, .. } => (decision, u64::from(number.number)),
            Effect::Report { decision, .. } => (decision, u64::MAX),
            _ => return None,
        };
        Some(Self {
            slot: decision.slot,
            digest: decision.digest() ^ number,
            cached_tokens: decision.cached_tokens,
            ttft_us: decision.predicted_ttft.map(|ttft| u64::try_from(ttft.as_micros()).unwrap_or(u64::MAX)),
        })
    }
}

/// The session of a request changed between its shortlist and its evaluation.
const SESSION_CHANGED: u8 = 0x80;

/// Writes the outcome of a request whose last effect is `effect`, and its session if it has changed.
pub(super) fn put_outcome<T>(
    to: &mut Vec<u8>,
    verdict: Verdict,
    session: Option<Option<WorkerRank>>,
    effect: Option<&Effect<T>>,
) {
    to.push(verdict as u8 | if session.is_some() { SESSION_CHANGED } else { 0 });
    if let Some(session) = session {
        session.put(to);
    }
    match (verdict, effect) {
        (Verdict::Placed, Some(effect)) => {
            let Some(Chosen { slot, digest, cached_tokens, ttft_us }) = Chosen::of(effect) else { return };
            put_number(to, slot.0.into());
            put_word(to, digest);
            put_number(to, cached_tokens.into());
            put_number(to, ttft_us.map_or(0, |us| us.saturating_add(1)));
        }
        (Verdict::Rejected, Some(Effect::Reject { reason, .. })) => put_text(to, &reason.to_string()),
        _ => {}
    }
}

/// A recorded outcome, and the session if it has changed.
pub(super) fn read_outcome(from: &mut Reader<'_>) -> Option<(Outcome, Option<Option<WorkerRank>>)> {
    let kind = from.u8()?;
    let session = if kind & SESSION_CHANGED != 0 { Some(Recorded::read(from)?) } else { None };
    let outcome = match kind & !SESSION_CHANGED {
        1 => Outcome::Passed,
        2 => Outcome::Aged,
        3 => Outcome::Chosen(Chosen {
            slot: Slot(from.u32()?),
            digest: from.word()?,
            cached_tokens: from.u32()?,
            ttft_us: from.number()?.checked_sub(1),
        }),
        4 => Outcome::Rejected(from.text()?.to_owned()),
        5 | 6 => Outcome::Deferred,
        _ => return None,
    };
    Some((outcome, session))
}
