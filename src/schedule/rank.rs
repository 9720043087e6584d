//! Scheduler state of each rank: its board, the overlay of later Books, and, during a batch, its exact reply and the
//! batch's bookings on it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;

use super::pool::PoolSums;
pub(super) use super::projected::{Projected, ProjectedPrompt};
use super::rank_status::RankStatus;
use super::view::{Added, View, Wait};
use super::{Admission, BookNumber, LoadAnswer, LoadView};
use crate::engine_load::EngineLimits;
use crate::health::Exclusions;
use crate::load::{
    BoardLoad, BoardVersion, EngineSpeed, PrefillLoadHint, PromptBlocks, PromptFingerprint, PublishedSpeed, RankLoad,
};
use crate::protocol::{Generation, Slot, Timestamp, WorkerRank};
use crate::select::{RankConditions, RankTraits};

/// Registered ranks in [`WorkerRank`] order.
#[derive(Debug, Default)]
pub(super) struct Ranks {
    all: Vec<Rank>,
    /// Status of each rank, by position. Separate from `all`, because most decisions read nothing else of most ranks.
    statuses: Vec<RankStatus>,
    /// Whether any rank may be restricted; computed once per batch.
    troubled: bool,
    /// Whether any rank may have become eligible: a load has fallen, or a status has changed.
    eased: bool,
    /// Position in `all` and generation, by slot.
    positions: Vec<Option<(u32, Generation)>>,
    conditions: Arc<RankConditions>,
    /// Ranks excluded for health.
    exclusions: Arc<Exclusions>,
    /// Sums over all ranks.
    sums: PoolSums,
}

#[derive(Debug)]
pub(super) struct Rank {
    front: Front,
    pub(super) rank: WorkerRank,
    pub(super) generation: Generation,
    pub(super) about: Box<About>,
    /// The last good copy of the board and its time.
    seen: BoardLoad,
    seen_at: Timestamp,
    /// Prefill backlog ahead of a new request at the start of the batch.
    wait: Wait,
    /// Books above the board's applied number.
    overlay: VecDeque<Ahead>,
    issued: u32,
    answer: Option<Answer>,
    /// Bookings of the current batch.
    booked: SmallVec<[Booked; 1]>,
}

/// Fields that a pass over all ranks reads, on one cache line.
#[derive(Debug)]
#[repr(align(64))]
struct Front {
    /// The board load with the overlay, as of the start of the batch.
    view: View,
    /// Version of the last board copy.
    version: BoardVersion,
    slot: Slot,
    /// Whether the board is exact and constant in time: no query, no Book in the overlay, and no decay. True for most
    /// ranks.
    settled: bool,
}

const _: () = assert!(size_of::<Front>() == 64, "one cache line");

/// Fields that most decisions do not read. Separate, so that a pass over all ranks touches fewer cache lines.
#[derive(Debug)]
pub(super) struct About {
    pub(super) traits: Arc<RankTraits>,
    /// A published speed and its aged value; absent while the published speed is fresh.
    pub(super) aged_speed: Option<(PublishedSpeed, EngineSpeed)>,
    /// Time of joining.
    pub(super) since: Timestamp,
    /// Cost factor of the slow start; 1 after its end, permanently.
    pub(super) slow_start_factor: f64,
    /// Time of the last return from an ejection, and its cost factor.
    returned_at: Timestamp,
    return_factor: f64,
}

impl About {
    /// Cost factor of a new or returned rank.
    pub(super) fn start_factor(&self) -> f64 {
        self.slow_start_factor.max(self.return_factor)
    }
}

/// A Book that the board does not show yet.
#[derive(Clone, Copy, Debug)]
struct Ahead {
    number: u32,
    added: Added,
}

/// Result of a board read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum News {
    /// No freed capacity.
    Nothing,
    /// Some load is gone.
    Fell,
    /// A new incarnation of the sequence actor.
    Reborn,
}

/// State of the current batch's query to a rank.
#[derive(Debug)]
enum Answer {
    Awaited,
    Given {
        load: RankLoad,
        shared_blocks: SmallVec<[u32; 2]>,
    },
    /// The batch was closed without a reply.
    Missed,
}

#[derive(Debug)]
struct Booked {
    prompt: PromptBlocks,
    added: Added,
}

impl Ranks {
    pub(super) fn as_slice(&self) -> &[Rank] {
        &self.all
    }

    pub(super) fn position(&self, rank: WorkerRank) -> Option<usize> {
        self.all.binary_search_by_key(&rank, |known| known.rank).ok()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Rank> {
        self.all.iter_mut()
    }

    pub(super) fn statuses(&self) -> &[RankStatus] {
        &self.statuses
    }

    /// Whether no rank is restricted.
    #[inline]
    pub(super) fn all_good(&self) -> bool {
        !self.troubled
    }

    /// Call after a change of statuses.
    fn look_for_trouble(&mut self) {
        self.eased = true;
        self.troubled = self.statuses.iter().any(|status| *status != RankStatus::GOOD);
    }

    /// Whether any rank may have gained capacity since the last call.
    pub(super) fn take_eased(&mut self) -> bool {
        std::mem::take(&mut self.eased)
    }

    /// Adds a rank with the initial cost factor `slow_start_factor`, or replaces an earlier incarnation of it.
    pub(super) fn admit<V: LoadView>(&mut self, admission: Admission, loads: &V, slow_start_factor: f64) {
        let draining = admission.draining;
        let new = Rank::new(admission, loads, slow_start_factor);
        let position = match self.all.binary_search_by_key(&new.rank, |known| known.rank) {
            Ok(position) => {
                self.all[position] = new;
                position
            }
            Err(position) => {
                self.all.insert(position, new);
                self.statuses.insert(position, RankStatus::GOOD);
                position
            }
        };
        // An unreadable board means unknown load, not 0.
        let unresponsive = self.all[position].seen.incarnation == UNREAD;
        self.statuses[position] = RankStatus { draining, unresponsive, ..RankStatus::GOOD };
        self.index();
        self.apply_conditions();
    }

    pub(super) fn describe(&mut self, slot: Slot, generation: Generation, traits: Arc<RankTraits>) {
        if let Some(position) = self.position_of(slot, generation) {
            self.all[position].about.traits = traits;
            self.eased = true;
        }
    }

    pub(super) fn set_draining(&mut self, slot: Slot, generation: Generation, draining: bool) {
        if let Some(position) = self.position_of(slot, generation) {
            self.statuses[position].draining = draining;
            self.eased |= !draining;
            self.apply_conditions(); // ranks that only this one could restrict are open to others
        }
    }

    pub(super) fn retire(&mut self, slot: Slot, generation: Generation) -> Option<WorkerRank> {
        let position = self.position_of(slot, generation)?;
        let rank = self.all.remove(position).rank;
        self.statuses.remove(position);
        self.apply_conditions();
        self.index();
        Some(rank)
    }

    pub(super) fn set_conditions(&mut self, conditions: Arc<RankConditions>) {
        self.conditions = conditions;
        self.apply_conditions();
    }

    /// Replaces the ranks excluded for health. The cost of returning ranks is multiplied by `return_factor` from `now`
    /// on.
    pub(super) fn set_exclusions(&mut self, exclusions: Arc<Exclusions>, return_factor: f64, now: Timestamp) {
        let before = std::mem::replace(&mut self.exclusions, exclusions);
        for (rank, status) in self.all.iter_mut().zip(&mut self.statuses) {
            if before.has_ejected(rank.rank) && !self.exclusions.has_ejected(rank.rank) {
                (rank.about.returned_at, rank.about.return_factor) = (now, return_factor);
                status.returning = return_factor != 1.0;
            }
        }
        self.apply_conditions();
    }

    fn apply_conditions(&mut self) {
        let reachable = |rank: &Rank| !self.conditions.unavailable.contains(&rank.rank);
        let Exclusions { ejected, down, refusing } = &*self.exclusions;
        let serves = |(rank, status): (&Rank, &RankStatus)| {
            reachable(rank) && !status.draining && !self.exclusions.has_ejected(rank.rank)
        };
        // If only ejected ranks are left, they serve until the health actor has reacted.
        let others_serve = !ejected.is_empty() && self.all.iter().zip(&self.statuses).any(serves);
        for (rank, status) in self.all.iter().zip(&mut self.statuses) {
            status.overloaded = self.conditions.overloaded.contains(&rank.rank);
            status.unavailable = !reachable(rank) || others_serve && ejected.contains(&rank.rank);
            status.down = down.contains(&rank.rank);
            status.refusing = refusing.contains(&rank.rank);
        }
        self.look_for_trouble();
    }

    /// Whether any rank has a higher cost after an ejection.
    pub(super) fn any_returning(&self) -> bool {
        self.troubled && self.statuses.iter().any(|status| status.returning)
    }

    /// Advances the slow starts of returned ranks: `factor` maps elapsed time to the cost factor.
    pub(super) fn warm_returning(&mut self, factor: impl Fn(Duration) -> f64, now: Timestamp) {
        if !self.any_returning() {
            return;
        }
        let mut over = false;
        for (rank, status) in self.all.iter_mut().zip(&mut self.statuses).filter(|(_, known)| known.returning) {
            rank.about.return_factor = factor(now.since(rank.about.returned_at));
            status.returning = rank.about.return_factor != 1.0;
            over |= !status.returning;
        }
        if over {
            self.look_for_trouble();
        }
    }

    /// Reads engine-reported load.
    pub(super) fn look_at_engines<V: LoadView>(&mut self, limits: &EngineLimits, loads: &V, now: Timestamp) {
        let mut changed = false;
        for (rank, status) in self.all.iter().zip(&mut self.statuses) {
            let load = loads.engine_load(rank.slot());
            let exceeded = load.is_some_and(|load| limits.exceeded_by(&load, now));
            changed |= exceeded != std::mem::replace(&mut status.engine_overloaded, exceeded);
        }
        if changed {
            self.look_for_trouble();
        }
    }

    fn index(&mut self) {
        self.positions.clear();
        self.sums = PoolSums { ranks: u32::try_from(self.all.len()).unwrap_or(u32::MAX), ..PoolSums::default() };
        self.all.iter().for_each(|rank| self.sums.add(rank.counted()));
        for (position, rank) in self.all.iter().enumerate() {
            let at = rank.slot().index();
            if self.positions.len() <= at {
                self.positions.resize(at + 1, None);
            }
            let position = u32::try_from(position).expect("slots are numbered by u32, and ranks have one each");
            self.positions[at] = Some((position, rank.generation));
        }
    }

    /// Position of the occupant of a slot.
    pub(super) fn position_in(&self, slot: Slot) -> Option<usize> {
        self.positions.get(slot.index()).copied().flatten().map(|(position, _)| position as usize)
    }

    /// Position of a generation of a slot; `None` after its removal.
    pub(super) fn position_of(&self, slot: Slot, generation: Generation) -> Option<usize> {
        let (position, seated) = self.positions.get(slot.index()).copied().flatten()?;
        (seated == generation).then_some(position as usize)
    }

    /// Books a request of the current batch on the rank at `position`.
    pub(super) fn book(
        &mut self,
        position: usize,
        candidate: ProjectedPrompt<'_>,
        prefill: Option<PrefillLoadHint>,
    ) -> BookNumber {
        let rank = &mut self.all[position];
        self.sums.sub(rank.counted());
        let number = rank.book(candidate, prefill);
        self.sums.add(rank.counted());
        number
    }

    /// Sums over all ranks, as of the start of the batch and its bookings.
    pub(super) fn sums(&self) -> PoolSums {
        self.sums
    }

    /// Reads every board; a batch decides on the state at its start.
    pub(super) fn refresh<V: LoadView>(&mut self, loads: &V, now: Timestamp) {
        let (mut reborn, mut fell) = (false, false);
        for (rank, status) in self.all.iter_mut().zip(&mut self.statuses) {
            if rank.front.settled && !loads.has_board_news(rank.slot(), rank.front.version) {
                continue; // the view is unchanged
            }
            self.sums.sub(rank.counted());
            let news = rank.refresh(loads, now);
            self.sums.add(rank.counted());
            match news {
                News::Nothing => {}
                News::Fell => fell = true,
                News::Reborn => {
                    status.unresponsive = false;
                    reborn = true;
                }
            }
        }
        self.eased |= fell;
        if reborn {
            self.look_for_trouble();
        }
    }

    pub(super) fn queried(&mut self, slots: &[Slot]) {
        for slot in slots {
            if let Some(position) = self.position_in(*slot) {
                self.all[position].ask(Answer::Awaited);
            }
        }
    }

    /// Applies a reply to the current batch's query.
    pub(super) fn answered(&mut self, answer: LoadAnswer) {
        if let Some(position) = self.position_of(answer.slot, answer.generation) {
            if std::mem::take(&mut self.statuses[position].unresponsive) {
                self.look_for_trouble();
            }
            self.all[position].ask(Answer::Given { load: answer.load, shared_blocks: answer.shared_blocks });
        }
    }

    /// Marks queried ranks without a reply as timed out.
    pub(super) fn close(&mut self) {
        for (rank, status) in self.all.iter_mut().zip(&mut self.statuses) {
            if matches!(rank.answer, Some(Answer::Awaited)) {
                rank.answer = Some(Answer::Missed);
                status.unresponsive = true;
                self.troubled = true;
                self.eased = true; // without any responsive rank, the others become eligible
            }
        }
    }

    pub(super) fn is_alive(&mut self, slot: Slot, generation: Generation) {
        if let Some(position) = self.position_of(slot, generation) {
            self.statuses[position].unresponsive = false;
            self.look_for_trouble();
        }
    }
}

impl Rank {
    fn new<V: LoadView>(admission: Admission, loads: &V, slow_start_factor: f64) -> Self {
        let Admission { rank, slot, generation, traits, since, draining: _ } = admission;
        let (returned_at, return_factor) = (since, 1.0);
        let mut version = BoardVersion::default();
        let unread = BoardLoad { incarnation: UNREAD, ..BoardLoad::default() };
        let seen = loads.board(slot, &mut version).unwrap_or(unread);
        let view = View::of(&seen, seen.prefill.at());
        Self {
            front: Front { view, version, slot, settled: !seen.prefill.decays() },
            rank,
            generation,
            about: Box::new(About { traits, aged_speed: None, since, slow_start_factor, returned_at, return_factor }),
            issued: seen.applied,
            wait: Wait::of(&seen, since),
            seen,
            seen_at: since,
            overlay: VecDeque::new(),
            answer: None,
            booked: SmallVec::new(),
        }
    }

    pub(super) fn slot(&self) -> Slot {
        self.front.slot
    }

    /// Its part of the pool's sums.
    fn counted(&self) -> (u32, Duration) {
        (self.requests(), self.wait().modelled)
    }

    /// Records a query or its reply.
    fn ask(&mut self, answer: Answer) {
        self.answer = Some(answer);
        self.front.settled = false;
    }

    /// Reads the board.
    fn refresh<V: LoadView>(&mut self, loads: &V, now: Timestamp) -> News {
        self.answer = None;
        let news = loads.board(self.slot(), &mut self.front.version);
        let mut reborn = false;
        if let Some(load) = news {
            if load.incarnation != self.seen.incarnation {
                self.overlay.clear();
                self.issued = load.applied;
                reborn = true;
            }
            self.seen = load;
            self.seen_at = now;
        }
        let before = self.load_max();
        self.booked.clear();
        while self.overlay.front().is_some_and(|ahead| !is_after(ahead.number, self.seen.applied)) {
            self.overlay.pop_front();
        }
        self.front.view = View::of(&self.seen, now);
        self.wait = Wait::of(&self.seen, now);
        for ahead in &self.overlay {
            self.front.view.add(ahead.added);
            self.wait.add(ahead.added);
        }
        self.front.settled = self.overlay.is_empty() && !self.decays();
        let after = self.load_max();
        let fell = after.0 < before.0 || after.1 < before.1 || after.2 < before.2;
        match (reborn, fell) {
            (true, _) => News::Reborn,
            (false, true) => News::Fell,
            (false, false) => News::Nothing,
        }
    }

    /// Upper bounds of blocks, prefill tokens and requests.
    fn load_max(&self) -> (u64, u64, u32) {
        (self.active_blocks_max(), self.prefill_tokens_max(), self.requests())
    }

    /// Whether its slow start is in progress.
    pub(super) fn is_starting(&self) -> bool {
        self.about.slow_start_factor != 1.0
    }

    /// Whether a prefill on it is long overdue, so that the prompts its requests will have computed are unknown.
    pub(super) fn is_overdue(&self) -> bool {
        self.seen.prefill.is_overdue()
    }

    /// Time of its last observed load change.
    pub(super) fn seen_at(&self) -> Timestamp {
        self.seen_at
    }

    /// Whether its load falls with time alone.
    pub(super) fn decays(&self) -> bool {
        self.seen.prefill.decays()
    }

    /// Upper bound of active and booked blocks.
    pub(super) fn active_blocks_max(&self) -> u64 {
        self.booked
            .iter()
            .fold(self.front.view.active_blocks.1, |sum, booked| sum.saturating_add(booked.added.blocks.1))
    }

    /// Upper bound of prefill tokens to compute.
    pub(super) fn prefill_tokens_max(&self) -> u64 {
        self.booked
            .iter()
            .fold(self.front.view.prefill_tokens.1, |sum, booked| sum.saturating_add(booked.added.prefill_tokens))
    }

    /// Active and booked requests.
    pub(super) fn requests(&self) -> u32 {
        self.front.view.requests + u32::try_from(self.booked.len()).unwrap_or(u32::MAX)
    }

    /// Projected load of this rank with a request of the current batch, as bounds that are exact if its shared blocks
    /// are known. Includes earlier bookings of the batch.
    #[inline(always)] // inlined into the loop over all ranks, which is most of a decision
    pub(super) fn project(&self, candidate: ProjectedPrompt<'_>) -> Projected {
        if !self.front.settled {
            return self.project_unsettled(candidate);
        }
        let shared_blocks_max = u64::from(self.seen.prompts.shared_blocks_max(candidate.fingerprint));
        let View { active_blocks, prefill_tokens, requests, read_blocks } = self.front.view;
        let most = active_blocks.0 + candidate.block_count;
        let least = most - shared_blocks_max.min(candidate.block_count);
        Projected { active_blocks, potential_blocks: (least, most), prefill_tokens, requests, read_blocks }
    }

    #[inline(never)]
    fn project_unsettled(&self, candidate: ProjectedPrompt<'_>) -> Projected {
        let request_blocks = candidate.block_count;
        let (mut view, mut shared) = match &self.answer {
            Some(Answer::Given { load, shared_blocks }) => {
                let shared = u64::from(shared_blocks.get(candidate.in_batch).copied().unwrap_or(0));
                (View::exactly(load), (shared, shared))
            }
            Some(Answer::Awaited | Answer::Missed) | None => (self.front.view, (0, self.shared_blocks_max(candidate))),
        };
        for booked in &self.booked {
            view.add(booked.added);
            let with_it = u64::from(candidate.prompt.shared_blocks(&booked.prompt));
            shared = (shared.0.max(with_it), shared.1.max(with_it));
        }
        let lo = view.active_blocks.0 + request_blocks - shared.1.min(request_blocks);
        let hi = view.active_blocks.1 + request_blocks - shared.0.min(request_blocks);
        let View { active_blocks, prefill_tokens, requests, read_blocks } = view;
        let mut projected =
            Projected { active_blocks, potential_blocks: (lo, hi), prefill_tokens, requests, read_blocks };
        if matches!(self.answer, Some(Answer::Missed)) {
            projected.take_worst(); // without a reply the upper bounds apply
        }
        projected
    }

    /// Upper bound of request blocks that are already active here, before bookings of the batch.
    fn shared_blocks_max(&self, candidate: ProjectedPrompt<'_>) -> u64 {
        // The board does not show the prompts in the overlay.
        let known = self.overlay.len() == self.booked.len();
        let most = if known {
            self.seen.prompts.shared_blocks_max(candidate.fingerprint)
        } else {
            candidate.fingerprint.block_count()
        };
        u64::from(most)
    }

    /// Prefill backlog ahead of a new request, including bookings of the batch. Load replies do not contain it.
    pub(super) fn wait(&self) -> Wait {
        let mut wait = self.wait;
        self.booked.iter().for_each(|booked| wait.add(booked.added));
        wait
    }

    /// Adds a Book and numbers it.
    fn book(&mut self, candidate: ProjectedPrompt<'_>, prefill: Option<PrefillLoadHint>) -> BookNumber {
        let with = self.project(candidate).potential_blocks;
        let nothing = ProjectedPrompt {
            prompt: &NOTHING,
            block_count: 0,
            fingerprint: &PromptFingerprint::unshared(),
            ..candidate
        };
        let without = self.project(nothing).potential_blocks;
        let added = Added {
            blocks: (with.0.saturating_sub(without.0), with.1.saturating_sub(without.1)),
            read_blocks: u32::try_from(candidate.block_count).unwrap_or(u32::MAX),
            prefill_tokens: prefill.map_or(0, |hint| u64::from(hint.effective_tokens())),
            prefill_duration: prefill.and_then(PrefillLoadHint::expected_duration),
        };
        self.booked.push(Booked { prompt: candidate.prompt.clone(), added });
        self.front.settled = false;
        self.issued = self.issued.wrapping_add(1);
        self.overlay.push_back(Ahead { number: self.issued, added });
        BookNumber { incarnation: self.seen.incarnation, number: self.issued }
    }
}

/// Incarnation of a board without any consistent read. No sequence actor uses it: the first snapshot counts as a new
/// incarnation, and Books continue from its applied number.
const UNREAD: u32 = u32::MAX;

const NOTHING: PromptBlocks = PromptBlocks::Counted(0);

/// Whether `number` was counted after `other`, across the wrap.
fn is_after(number: u32, other: u32) -> bool {
    number != other && number.wrapping_sub(other) < u32::MAX / 2
}
