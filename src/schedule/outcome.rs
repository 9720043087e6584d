//! Outcome of one evaluation, as a tape records it.

use super::load_view::LoadView;
use super::recorded::put_rank;
use super::tape::{Tape, entry};
use super::types::Effect;
use crate::protocol::{Slot, WorkerRank};
use crate::record::bytes::{Reader, put_number, put_optional, put_text, put_word};

/// Outcome of a request in a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// It left without an evaluation.
    Passed,
    /// A query without a choice, which updates the loads of all ranks to the time of the batch.
    Aged,
    Chosen(Chosen),
    Rejected(String),
    /// It returns to the head of the queue.
    Again,
    /// It returns to the queue, because all ranks are busy.
    Waits,
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

impl Outcome {
    pub(super) fn of_placed<T>(effect: &Effect<T>) -> Self {
        let (decision, number) = match effect {
            Effect::Book { decision, number, .. } => (decision, u64::from(number.number)),
            Effect::Report { decision, .. } => (decision, u64::MAX),
            _ => return Self::Passed, // nothing else is placed
        };
        Self::Chosen(Chosen {
            slot: decision.slot,
            digest: decision.digest() ^ number,
            cached_tokens: decision.cached_tokens,
            ttft_us: decision.predicted_ttft.map(|ttft| u64::try_from(ttft.as_micros()).unwrap_or(u64::MAX)),
        })
    }

    fn kind(&self) -> u8 {
        match self {
            Self::Passed => 1,
            Self::Aged => 2,
            Self::Chosen(_) => 3,
            Self::Rejected(_) => 4,
            Self::Again => 5,
            Self::Waits => 6,
        }
    }

    fn put(&self, to: &mut Vec<u8>) {
        match self {
            Self::Passed | Self::Aged | Self::Again | Self::Waits => {}
            Self::Chosen(Chosen { slot, digest, cached_tokens, ttft_us }) => {
                put_number(to, slot.0.into());
                put_word(to, *digest);
                put_number(to, (*cached_tokens).into());
                put_number(to, ttft_us.map_or(0, |us| us.saturating_add(1)));
            }
            Self::Rejected(reason) => put_text(to, reason),
        }
    }

    fn read(kind: u8, from: &mut Reader<'_>) -> Option<Self> {
        Some(match kind {
            1 => Self::Passed,
            2 => Self::Aged,
            3 => Self::Chosen(Chosen {
                slot: Slot(from.u32()?),
                digest: from.word()?,
                cached_tokens: from.u32()?,
                ttft_us: from.number()?.checked_sub(1),
            }),
            4 => Self::Rejected(from.text()?.to_owned()),
            5 => Self::Again,
            6 => Self::Waits,
            _ => return None,
        })
    }
}

/// The session of a request changed between its shortlist and its evaluation.
const SESSION_CHANGED: u8 = 0x80;

/// Records the outcome of one request.
#[derive(Clone, Copy)]
pub(super) struct OutcomeRecorder<'a> {
    tape: Option<&'a Tape>,
    session: Option<Option<WorkerRank>>,
}

impl<'a> OutcomeRecorder<'a> {
    pub(super) fn new<V: LoadView>(loads: &'a V, before: Option<WorkerRank>, session: Option<WorkerRank>) -> Self {
        Self { tape: loads.tape(), session: (before != session).then_some(session) }
    }

    #[inline]
    pub(super) fn record(self, outcome: &Outcome) {
        let Some(tape) = self.tape else { return };
        tape.write(|to, _| {
            to.push(entry::OUTCOME);
            to.push(outcome.kind() | if self.session.is_some() { SESSION_CHANGED } else { 0 });
            if let Some(session) = self.session {
                put_optional(to, session, put_rank);
            }
            outcome.put(to);
        });
    }
}

/// A recorded outcome, and the session if it has changed.
pub(super) fn read_outcome(from: &mut Reader<'_>) -> Option<(Outcome, Option<Option<WorkerRank>>)> {
    let kind = from.u8()?;
    let session = if kind & SESSION_CHANGED != 0 { Some(from.optional(super::recorded::read_rank)?) } else { None };
    Outcome::read(kind & !SESSION_CHANGED, from).map(|outcome| (outcome, session))
}
