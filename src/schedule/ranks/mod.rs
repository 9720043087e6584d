//! The ranks of the scheduler: membership, status, and one state of all loads per batch.
//!
//! A refresh visits the ranks whose boards have changed and those that the last batch queried or booked on, so its cost
//! does not grow with the number of ranks.

mod keyframe;

use std::sync::Arc;
use std::time::Duration;

pub(super) use keyframe::SLOTS_MAX;

use super::latency::columns::RankColumns;
use super::pool::PoolSums;
use super::rank::{Answer, News, ProjectedPrompt, Rank};
use super::rank_status::RankStatus;
use super::{Admission, BookNumber, LoadAnswer, LoadView};
use crate::engine_load::EngineLimits;
use crate::health::Exclusions;
use crate::load::{EngineSpeed, PrefillLoadHint};
use crate::protocol::{Generation, Slot, Timestamp, WorkerRank};
use crate::select::{RankConditions, RankTraits};

/// Registered ranks in [`WorkerRank`] order.
#[derive(Debug)]
pub(super) struct Ranks {
    all: Vec<Rank>,
    /// Status of each rank, by position. Separate from `all`, because most decisions read nothing else of most ranks.
    statuses: Vec<RankStatus>,
    /// Whether any rank may be restricted; computed once per batch.
    pub(super) troubled: bool,
    /// Whether any rank may have become eligible: a load has fallen, or a status has changed.
    eased: bool,
    /// Position in `all` and generation, by slot.
    positions: Vec<Option<(u32, Generation)>>,
    conditions: Arc<RankConditions>,
    /// Ranks excluded for health.
    exclusions: Arc<Exclusions>,
    /// Sums over all ranks.
    sums: PoolSums,
    /// Loads as columns, where bounds of costs read them.
    columns: Option<RankColumns>,
    /// Whether speeds and fills of caches are read.
    measures: bool,
    /// Typical speed of the pool.
    typical: EngineSpeed,
    /// Whether every refresh follows the decay of prefill tokens on all ranks, because limits or costs read them.
    follows_decay: bool,
    /// Slots that the current batch queried or booked on.
    touched: Vec<Slot>,
    /// Time of the last refresh.
    refreshed_at: Timestamp,
    /// Slots whose working sets have changed since they were last taken.
    working_changes: Vec<Slot>,
}

impl Ranks {
    /// No ranks. Without `follows_decay`, bounds of prefill tokens are valid only after [`age`](Self::age).
    /// With `measures`, speeds and fills of caches are read with the boards, and with `columns`, loads are also kept as
    /// columns. `typical` replaces unknown speeds.
    pub(super) fn new(follows_decay: bool, measures: bool, columns: bool, typical: EngineSpeed) -> Self {
        Self {
            all: Vec::new(),
            statuses: Vec::new(),
            troubled: false,
            eased: false,
            positions: Vec::new(),
            conditions: Arc::default(),
            exclusions: Arc::default(),
            sums: PoolSums::default(),
            columns: columns.then(RankColumns::default),
            measures,
            typical,
            follows_decay,
            touched: Vec::new(),
            refreshed_at: Timestamp::default(),
            working_changes: Vec::new(),
        }
    }

    /// Also keeps the facts that the costs of other policies read. Only without ranks.
    pub(super) fn follow(&mut self, measures: bool, columns: bool) {
        self.measures |= measures;
        if columns && self.columns.is_none() {
            self.columns = Some(RankColumns::default());
        }
    }

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

    /// Call after a change of statuses.
    fn look_for_trouble(&mut self) {
        self.eased = true;
        self.troubled = self.statuses.iter().any(|status| *status != RankStatus::default());
    }

    /// Whether any rank may have gained capacity since the last call.
    pub(super) fn take_eased(&mut self) -> bool {
        std::mem::take(&mut self.eased)
    }

    /// Adds a rank with the initial cost factor `slow_start_factor`, or replaces an earlier incarnation of it.
    pub(super) fn admit<V: LoadView>(&mut self, admission: Admission, loads: &V, slow_start_factor: f64) {
        let draining = admission.draining;
        let mut new = Rank::new(admission, loads, slow_start_factor);
        new.measure(loads, self.typical);
        let position = match self.all.binary_search_by_key(&new.rank, |known| known.rank) {
            Ok(position) => {
                self.all[position] = new;
                position
            }
            Err(position) => {
                self.all.insert(position, new);
                self.statuses.insert(position, RankStatus::default());
                position
            }
        };
        // An unreadable board means unknown load, not 0.
        let unresponsive = self.all[position].is_unread();
        self.statuses[position] = RankStatus { draining, unresponsive, ..RankStatus::default() };
        self.index();
        self.apply_conditions();
    }

    /// Sets the working set of a rank.
    pub(super) fn set_working_tokens(&mut self, rank: WorkerRank, tokens: u64) {
        let Some(position) = self.position(rank) else { return };
        let rank = &mut self.all[position];
        rank.about.working_tokens = tokens;
        self.working_changes.push(rank.slot());
    }

    /// Slots whose working sets have changed since the last call.
    pub(super) fn take_working_changes(&mut self) -> Vec<Slot> {
        std::mem::take(&mut self.working_changes)
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
        let Exclusions { ejected, down, refusing, asleep } = &*self.exclusions;
        let serves = |(rank, status): (&Rank, &RankStatus)| {
            let is_out = self.exclusions.has_ejected(rank.rank) || asleep.contains(&rank.rank);
            reachable(rank) && !status.draining && !is_out
        };
        // If only ejected ranks are left, they serve until the health actor has reacted.
        let others_serve = !ejected.is_empty() && self.all.iter().zip(&self.statuses).any(serves);
        for (rank, status) in self.all.iter().zip(&mut self.statuses) {
            status.overloaded = self.conditions.overloaded.contains(&rank.rank);
            status.unavailable = !reachable(rank) || others_serve && ejected.contains(&rank.rank);
            status.down = down.contains(&rank.rank);
            status.refusing = refusing.contains(&rank.rank);
            let was_asleep = std::mem::replace(&mut status.asleep, asleep.contains(&rank.rank));
            self.eased |= was_asleep && !status.asleep;
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
        self.sums.requests = self.all.iter().fold(0, |sum, rank| sum.wrapping_add(rank.requests()));
        for (position, rank) in self.all.iter().enumerate() {
            let at = rank.slot().index();
            if self.positions.len() <= at {
                self.positions.resize(at + 1, None);
            }
            let position = u32::try_from(position).expect("slots are numbered by u32, and ranks have one each");
            self.positions[at] = Some((position, rank.generation));
        }
        self.rebuild_columns();
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
        self.sums.requests = self.sums.requests.wrapping_sub(rank.requests());
        let number = rank.book(candidate, prefill);
        let work = prefill.and_then(PrefillLoadHint::expected_duration);
        rank.about.recent_work.add(work.unwrap_or_default(), self.refreshed_at);
        self.sums.requests = self.sums.requests.wrapping_add(rank.requests());
        self.touched.push(rank.slot());
        number
    }

    /// Sums over all ranks, as of the start of the batch and its bookings.
    pub(super) fn sums(&self) -> PoolSums {
        self.sums
    }

    /// Copies the bookings of the current batch to the columns.
    pub(super) fn update_columns(&mut self) {
        let Some(columns) = &mut self.columns else { return };
        for slot in &self.touched {
            if let Some((position, _)) = self.positions.get(slot.index()).copied().flatten() {
                columns.set(position as usize, &self.all[position as usize], self.refreshed_at);
            }
        }
    }

    /// Time of the last refresh, to which all loads refer.
    pub(super) fn refreshed_at(&self) -> Timestamp {
        self.refreshed_at
    }

    /// Reads every changed board; a batch decides on the state at its start.
    pub(super) fn refresh<V: LoadView>(&mut self, loads: &V, now: Timestamp) {
        self.refreshed_at = now;
        let mut slots = std::mem::take(&mut self.touched);
        loads.take_changed(&mut slots);
        slots.sort_unstable();
        slots.dedup();
        let mut reborn = false;
        for slot in slots.drain(..) {
            if let Some(position) = self.position_in(slot) {
                reborn |= self.refresh_at(position, loads);
            }
        }
        self.touched = slots;
        if self.follows_decay {
            for position in 0..self.all.len() {
                if self.all[position].decays() {
                    reborn |= self.refresh_at(position, loads);
                }
            }
        }
        if reborn {
            self.look_for_trouble();
        }
    }

    /// Reads the board of one rank. Returns whether its sequence actor is a new incarnation.
    fn refresh_at<V: LoadView>(&mut self, position: usize, loads: &V) -> bool {
        let rank = &mut self.all[position];
        self.sums.requests = self.sums.requests.wrapping_sub(rank.requests());
        let news = rank.refresh(loads, self.refreshed_at);
        self.sums.requests = self.sums.requests.wrapping_add(rank.requests());
        if self.measures {
            rank.measure(loads, self.typical);
        }
        if let Some(columns) = &mut self.columns {
            columns.set(position, rank, self.refreshed_at);
        }
        match news {
            News::Nothing => {}
            News::Fell => self.eased = true,
            News::Reborn => self.statuses[position].unresponsive = false,
        }
        news == News::Reborn
    }

    /// Updates the bounds of prefill tokens of all ranks to the last refresh.
    pub(super) fn age(&mut self) {
        if !self.follows_decay {
            self.all.iter_mut().filter(|rank| rank.decays()).for_each(|rank| rank.age(self.refreshed_at));
        }
    }

    /// Reads speeds and fills of all ranks, with `typical` for unknown speeds.
    pub(super) fn measure<V: LoadView>(&mut self, loads: &V, typical: EngineSpeed) {
        self.typical = typical;
        self.all.iter_mut().for_each(|rank| rank.measure(loads, typical));
        self.rebuild_columns();
    }

    fn rebuild_columns(&mut self) {
        if let Some(columns) = &mut self.columns {
            columns.rebuild(&self.all, self.refreshed_at);
        }
    }

    /// Loads as columns, where bounds of costs read them.
    pub(super) fn columns(&self) -> Option<&RankColumns> {
        self.columns.as_ref()
    }

    /// Mean duration of a step, as a multiple of an empty one.
    pub(super) fn mean_step_ratio(&self) -> f64 {
        let ratio = |rank: &Rank| {
            let speed = rank.measured().speed;
            speed.step(f64::from(rank.requests()), f64::from(rank.read_blocks())) / speed.step_seconds
        };
        self.all.iter().map(ratio).sum::<f64>() / f64::from(self.sums.ranks.max(1))
    }

    /// Mean duration of the queued prefills of a rank, in seconds.
    pub(super) fn mean_wait_seconds(&self) -> f64 {
        let sum: Duration = self.all.iter().map(|rank| rank.wait(self.refreshed_at).modelled).sum();
        sum.as_secs_f64() / f64::from(self.sums.ranks.max(1))
    }

    pub(super) fn queried(&mut self, slots: &[Slot]) {
        for slot in slots {
            if let Some(position) = self.position_in(*slot) {
                self.all[position].ask(Answer::Awaited);
                self.touched.push(*slot);
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
        for slot in &self.touched {
            let Some(position) = self.positions.get(slot.index()).copied().flatten().map(|(at, _)| at as usize) else {
                continue;
            };
            if self.all[position].miss() {
                self.statuses[position].unresponsive = true;
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
