//! Replay of recorded decisions by the pure scheduler.
//!
//! [`Replay`] rebuilds the scheduler's state from a keyframe and follows the entries of a [`Recorder`](super::Recorder). It
//! decides each batch again and compares, or follows the recorded choices, which is cheaper, and on the way explains
//! decisions.

use std::collections::VecDeque;
use std::fmt;
use std::time::Duration;

use super::outcome::{Chosen, Outcome, read_outcome};
use super::reads::{Last, entry};
use super::replay_loads::ReplayLoads;
use super::request::BLOCKS_MAX;
use crate::config::RouterConfig;
use crate::load::{PlacementRate, PromptBlocks};
use crate::policy::Policy;
use crate::protocol::{Slot, Timestamp, WorkerRank};
use crate::record::bytes::{Reader, Recorded};
use crate::schedule::choice::Choice;
use crate::schedule::explanation::Explanation;
use crate::schedule::latency::typical::Typical;
use crate::schedule::pending::PendingRequest;
use crate::schedule::pool::Arrivals;
use crate::schedule::rank::Rank;
use crate::schedule::search::Search;
use crate::schedule::types::{LoadAnswer, Purpose};
use crate::schedule::{Extensions, Schedule};

/// Reason for which recorded entries cannot be replayed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplayError {
    /// The recorded settings are none of this version.
    #[error("the recorded settings cannot be read: {0}")]
    Settings(String),
    /// The bytes are no entries.
    #[error("the entries are malformed after {decisions} decisions")]
    Malformed {
        /// Decisions before the malformed entry.
        decisions: u64,
    },
}

/// Treatment of each decision in a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReplayMode {
    /// Decide again, and compare.
    Verify,
    /// Take the recorded choice.
    Follow,
}

/// A recorded choice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecordedChoice {
    /// A rank.
    Rank {
        /// The rank.
        rank: WorkerRank,
        /// Cached tokens according to the index.
        cached_tokens: u32,
        /// Predicted time to first token, if the policy predicts it.
        predicted_ttft: Option<Duration>,
    },
    /// No rank, with the reason.
    Rejected(String),
    /// The request returned to the queue, or a load query was needed first.
    Deferred,
}

/// A replayed decision.
#[derive(Clone, Debug, PartialEq)]
pub struct ReplayedDecision {
    /// Number of the decision.
    pub number: u64,
    /// Request id; empty for queries without one.
    pub id: String,
    /// Time of the decision on the router's clock.
    pub at: Timestamp,
    /// Active policy.
    pub policy: Policy,
    /// Prompt length in tokens.
    pub prompt_tokens: u32,
    /// Whether it booked; a query only reports.
    pub books: bool,
    /// The recorded choice.
    pub recorded: RecordedChoice,
    /// Whether the replay decided the same, bit for bit. Always true for a replay that follows.
    pub is_equal: bool,
    /// The choice of a replay that decided otherwise.
    pub replayed: Option<RecordedChoice>,
    /// The candidate table, if requested.
    pub explanation: Option<Box<Explanation>>,
}

/// Reads recorded settings.
type SettingsReader = Box<dyn Fn(&[u8]) -> Result<RouterConfig, String> + Send>;

/// Whether a decision is explained, by number and request id.
type ExplainedDecisions = Box<dyn Fn(u64, &str) -> bool + Send>;

/// Replays the entries of one tape, in order and from a keyframe on.
pub struct Replay {
    mode: ReplayMode,
    read_settings: SettingsReader,
    explains: ExplainedDecisions,
    settings: Option<(Box<[u8]>, RouterConfig)>,
    schedule: Option<Schedule<Box<str>>>,
    loads: ReplayLoads,
    in_flight: VecDeque<PendingRequest<Box<str>>>,
    /// The search that has listed the queried ranks.
    listed: Option<Box<Search>>,
    /// Position in the batch of the next outcome, and whether loads were queried for it.
    in_batch: usize,
    is_queried: bool,
    /// Whether the shortlist of the batch in flight is the recorded one.
    is_listed_alike: bool,
    last: Last,
    decisions: u64,
}

impl fmt::Debug for Replay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Replay").field("mode", &self.mode).field("decisions", &self.decisions).finish_non_exhaustive()
    }
}

impl Replay {
    /// A replay that decides again, and compares. `read_settings` reads the settings of a keyframe, which are JSON of a
    /// router.
    pub fn verifying(read_settings: impl Fn(&[u8]) -> Result<RouterConfig, String> + Send + 'static) -> Self {
        Self::new(ReplayMode::Verify, read_settings)
    }

    /// A replay that takes the recorded choices.
    pub fn following(read_settings: impl Fn(&[u8]) -> Result<RouterConfig, String> + Send + 'static) -> Self {
        Self::new(ReplayMode::Follow, read_settings)
    }

    fn new(mode: ReplayMode, read_settings: impl Fn(&[u8]) -> Result<RouterConfig, String> + Send + 'static) -> Self {
        Self {
            mode,
            read_settings: Box::new(read_settings),
            explains: Box::new(|_, _| false),
            settings: None,
            schedule: None,
            loads: ReplayLoads::default(),
            in_flight: VecDeque::new(),
            listed: None,
            in_batch: 0,
            is_queried: false,
            is_listed_alike: true,
            last: Last::default(),
            decisions: 0,
        }
    }

    /// Explains the decisions for which `explains` holds, by number and request id.
    #[must_use]
    pub fn explaining(self, explains: impl Fn(u64, &str) -> bool + Send + 'static) -> Self {
        Self { explains: Box::new(explains), ..self }
    }

    /// Decisions so far.
    #[must_use]
    pub fn decisions(&self) -> u64 {
        self.decisions
    }

    /// Replays entries, and passes each decision to `visit`. Entries before the first keyframe are skipped as a whole.
    ///
    /// # Errors
    /// Recorded settings that cannot be read, or malformed entries. The next entries must then begin with a keyframe.
    pub fn feed(&mut self, entries: &[u8], visit: &mut dyn FnMut(ReplayedDecision)) -> Result<(), ReplayError> {
        let mut from = Reader::new(entries);
        while !from.is_empty() {
            let kind = from.u8();
            if self.schedule.is_none() && kind != Some(entry::KEYFRAME) {
                return Ok(());
            }
            let read = match kind {
                Some(entry::KEYFRAME) => self.read_keyframe(&mut from)?,
                Some(entry::PREPARED) => self.prepare(&mut from),
                Some(entry::STATUSES) => self.read_statuses(&mut from),
                Some(entry::BATCH) => self.read_batch(&mut from),
                Some(entry::DECIDING) => self.begin_deciding(&mut from),
                Some(entry::OUTCOME) => self.decide(&mut from, visit),
                Some(entry::DECIDED) => {
                    self.in_flight.clear();
                    Some(())
                }
                Some(entry::WORKING) => self.read_working(&mut from),
                Some(kind) => self.loads.apply(kind, &mut from),
                None => None,
            };
            if read.is_none() {
                self.schedule = None;
                return Err(ReplayError::Malformed { decisions: self.decisions });
            }
        }
        Ok(())
    }

    /// The settings of the keyframe, read again only if they differ from the last ones.
    fn settings_of(&mut self, bytes: &[u8]) -> Result<RouterConfig, ReplayError> {
        if let Some((_, settings)) = self.settings.as_ref().filter(|(known, _)| **known == *bytes) {
            return Ok(settings.clone());
        }
        let settings = (self.read_settings)(bytes).map_err(ReplayError::Settings)?;
        self.settings = Some((bytes.into(), settings.clone()));
        Ok(settings)
    }

    /// Malformed bytes are `Ok(None)`.
    fn read_keyframe(&mut self, from: &mut Reader<'_>) -> Result<Option<()>, ReplayError> {
        let Some(bytes) = from.length().and_then(|length| from.bytes(length)) else { return Ok(None) };
        let mut schedule = Schedule::new(self.settings_of(bytes)?, 0, Extensions::default());
        (self.schedule, self.listed) = (None, None);
        Ok(self.restore(&mut schedule, from).map(|()| self.schedule = Some(schedule)))
    }

    fn restore(&mut self, schedule: &mut Schedule<Box<str>>, from: &mut Reader<'_>) -> Option<()> {
        schedule.pool.now = Timestamp(from.number()?);
        self.last = Last { now: schedule.pool.now.0, number: 0 };
        schedule.pool.turns = from.count()?;
        schedule.pool.typical = Typical::read(from)?;
        schedule.pool.arrival_rate = Arrivals::read(from)?;
        schedule.pool.ranks.read(from)?;
        let arrivals = PlacementRate::read(from)?;
        schedule.pool.peers = arrivals;
        self.loads.set_arrivals(arrivals);
        for _ in 0..from.length()? {
            let slot = Slot(from.u32()?);
            let position = schedule.pool.ranks.position_in(slot)?;
            let rank: &Rank = &schedule.pool.ranks.as_slice()[position];
            let (board, peers) = rank.published();
            self.loads.restore(slot, &board, peers, from)?;
        }
        Some(())
    }

    fn prepare(&mut self, from: &mut Reader<'_>) -> Option<()> {
        let schedule = self.schedule.as_mut()?;
        schedule.pool.now = self.last.read_time(from)?;
        let mut before = -1_i64;
        let changed = from.list(|from| {
            before = from.signed()?.checked_add(before)?.checked_add(1)?;
            u32::try_from(before).ok().map(Slot)
        })?;
        self.loads.set_changed(changed);
        schedule.prepare(&self.loads, &mut VecDeque::new());
        Some(())
    }

    fn read_statuses(&mut self, from: &mut Reader<'_>) -> Option<()> {
        let schedule = self.schedule.as_mut()?;
        self.listed = None;
        schedule.pool.ranks.read_statuses(from)
    }

    fn read_working(&mut self, from: &mut Reader<'_>) -> Option<()> {
        let ranks = &mut self.schedule.as_mut()?.pool.ranks;
        for _ in 0..from.length()? {
            let (slot, tokens) = Recorded::read(from)?;
            let rank = ranks.as_slice()[ranks.position_in(slot)?].rank;
            ranks.set_working_tokens(rank, tokens);
        }
        Some(())
    }

    fn read_batch(&mut self, from: &mut Reader<'_>) -> Option<()> {
        let schedule = self.schedule.as_mut()?;
        self.in_flight.clear();
        let mut blocks_left = BLOCKS_MAX;
        for in_batch in 0..from.length()? {
            let batch = &self.in_flight;
            let prompt_at = |distance: usize| -> Option<&PromptBlocks> {
                Some(&batch.get(in_batch.checked_sub(distance)?)?.request.prompt)
            };
            let ranks = &schedule.pool.ranks;
            let generation_in = |slot| ranks.position_in(slot).map(|position| ranks.as_slice()[position].generation);
            let pending = PendingRequest::read(from, &mut self.last, prompt_at, generation_in, &mut blocks_left)?;
            self.in_flight.push_back(pending);
        }
        let slots: Vec<Slot> = Recorded::read(from)?;
        if self.mode == ReplayMode::Verify {
            let (found, listed) = schedule.shortlist(&self.in_flight, &self.loads);
            (self.is_listed_alike, self.listed) = (found == slots, listed);
        }
        if !slots.is_empty() {
            schedule.pool.ranks.queried(&slots);
        }
        Some(())
    }

    fn begin_deciding(&mut self, from: &mut Reader<'_>) -> Option<()> {
        let schedule = self.schedule.as_mut()?;
        schedule.pool.now = self.last.read_time(from)?;
        (self.in_batch, self.is_queried) = (0, from.u8()? != 0);
        if self.is_queried {
            read_answers(schedule, from)?;
        }
        Some(())
    }

    fn decide(&mut self, from: &mut Reader<'_>, visit: &mut dyn FnMut(ReplayedDecision)) -> Option<()> {
        let mut schedule = self.schedule.take()?;
        let (outcome, session) = read_outcome(from)?;
        let mut pending = self.in_flight.pop_front()?;
        if let Some(session) = session {
            pending.session = session;
            self.listed = None;
        }
        if self.in_batch > 0 {
            schedule.pool.ranks.update_columns();
        }
        if let Some(mut decision) = self.evaluate(&mut schedule, pending, outcome)? {
            decision.is_equal &= self.is_listed_alike;
            self.decisions += 1;
            visit(decision);
        }
        self.in_batch += 1;
        self.schedule = Some(schedule);
        Some(())
    }

    /// Evaluates a request with the recorded outcome. `Some(None)` if nothing was decided, and `None` if the record
    /// contradicts itself.
    fn evaluate(
        &mut self,
        schedule: &mut Schedule<Box<str>>,
        pending: PendingRequest<Box<str>>,
        outcome: Outcome,
    ) -> Option<Option<ReplayedDecision>> {
        match &outcome {
            Outcome::Passed => return Some(None),
            Outcome::Aged => {
                schedule.pool.ranks.age();
                return Some(None);
            }
            Outcome::Chosen(_) | Outcome::Rejected(_) | Outcome::Deferred => {}
        }
        let chosen = match outcome {
            Outcome::Chosen(chosen) => Some((schedule.pool.ranks.position_in(chosen.slot)?, chosen)),
            _ => None,
        };
        let (choice, search) = if self.mode == ReplayMode::Verify {
            let Schedule { active, pool, .. } = &mut *schedule;
            let (settle, listed) = (!self.is_queried && self.in_batch == 0, self.listed.take());
            let (choice, search) = active.choose(pool, (&pending, self.in_batch), &self.loads, settle, listed);
            (Some(choice), search)
        } else {
            (None, None)
        };
        let recorded = recorded(schedule, chosen, &outcome);
        let replayed = choice.map(|choice| replayed(schedule, choice, chosen, &recorded));
        let (number, prompt_tokens) = (pending.number, pending.request.prompt_tokens);
        let mut decision = ReplayedDecision {
            number,
            id: pending.request.context.to_string(),
            at: schedule.pool.now,
            policy: schedule.active.settings.policy,
            prompt_tokens,
            books: pending.request.purpose == Purpose::Book,
            is_equal: replayed.as_ref().is_none_or(|replayed| *replayed == recorded),
            replayed: replayed.filter(|replayed| *replayed != recorded),
            recorded,
            explanation: None,
        };
        if (self.explains)(number, &decision.id) {
            decision.explanation = Some(self.explanation(schedule, &pending, &decision.recorded));
        }
        if let Some((position, chosen)) = chosen {
            // Shadows age ranks and learn speeds.
            let _ = schedule.shadow_report(self.in_batch, &self.loads, position, &pending);
            let effect = schedule.place(self.in_batch, &self.loads, (position, search.as_deref()), pending, None);
            // The rank is the recorded one, so that the digest compares the facts.
            let is_same = Chosen::of(&effect) == Some(chosen);
            decision.is_equal &= is_same || self.mode == ReplayMode::Follow;
        }
        schedule.active.keep(search);
        let is_decision = decision.recorded != RecordedChoice::Deferred || !decision.is_equal;
        Some(is_decision.then_some(decision))
    }

    fn explanation(
        &self,
        schedule: &mut Schedule<Box<str>>,
        pending: &PendingRequest<Box<str>>,
        recorded: &RecordedChoice,
    ) -> Box<Explanation> {
        let outcome = match recorded {
            RecordedChoice::Rank { rank, .. } => Ok(*rank),
            RecordedChoice::Rejected(reason) => Err(reason.clone()),
            RecordedChoice::Deferred => Err("deferred".to_owned()),
        };
        schedule.pool.ranks.age();
        schedule.active.case(&schedule.pool, pending, self.in_batch, &self.loads).explanation(outcome)
    }
}

fn read_answers(schedule: &mut Schedule<Box<str>>, from: &mut Reader<'_>) -> Option<()> {
    for _ in 0..from.length()? {
        let (slot, (load, shared_blocks)) = Recorded::read(from)?;
        let position = schedule.pool.ranks.position_in(slot)?;
        let generation = schedule.pool.ranks.as_slice()[position].generation;
        schedule.pool.ranks.answered(LoadAnswer { slot, generation, load, shared_blocks });
    }
    schedule.pool.ranks.close();
    Some(())
}

fn recorded(schedule: &Schedule<Box<str>>, chosen: Option<(usize, Chosen)>, outcome: &Outcome) -> RecordedChoice {
    match (chosen, outcome) {
        (Some((position, chosen)), _) => choice_at(schedule, position, chosen),
        (None, Outcome::Rejected(reason)) => RecordedChoice::Rejected(reason.clone()),
        (None, _) => RecordedChoice::Deferred,
    }
}

fn choice_at(
    schedule: &Schedule<Box<str>>,
    position: usize,
    Chosen { cached_tokens, ttft_us, .. }: Chosen,
) -> RecordedChoice {
    let rank = schedule.pool.ranks.as_slice()[position].rank;
    RecordedChoice::Rank { rank, cached_tokens, predicted_ttft: ttft_us.map(Duration::from_micros) }
}

/// The choice of the replay, with the recorded facts where the rank is the same.
fn replayed(
    schedule: &Schedule<Box<str>>,
    choice: Choice,
    chosen: Option<(usize, Chosen)>,
    recorded: &RecordedChoice,
) -> RecordedChoice {
    match choice {
        Choice::Rank(position) if chosen.is_some_and(|(known, _)| known == position) => recorded.clone(),
        Choice::Rank(position) => {
            let rank = schedule.pool.ranks.as_slice()[position].rank;
            RecordedChoice::Rank { rank, cached_tokens: 0, predicted_ttft: None }
        }
        Choice::None(reason) => RecordedChoice::Rejected(reason.to_string()),
        Choice::QueryAgain | Choice::Wait => RecordedChoice::Deferred,
    }
}
