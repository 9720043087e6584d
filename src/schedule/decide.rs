//! Shortlists and choices of ranks by cost.

use std::collections::VecDeque;

use super::appraisal::ShadowReport;
use super::cost::Cost;
use super::eligible::Eligibility;
use super::outcome::{Outcome, OutcomeRecorder};
use super::pending::Case;
use super::rank::{Projected, ProjectedPrompt, Rank};
use super::search::scratch::Scratch;
use super::{Effect, LoadView, PendingRequest, PotentialLoad, Purpose, Rejection, Schedule, Target};
use crate::config::SessionAffinity;
use crate::load::PrefillLoadHint;
use crate::policy::{CostFacts, Needs, Policy};
use crate::protocol::Slot;
use crate::select::{Draw, Filter, RankOverlap, TierOverlap};

/// Result of a choice.
pub(super) enum Choice {
    Rank(usize),
    /// An unqueried rank could still win: query again with the rest of the batch.
    QueryAgain,
    /// All ranks are busy, although one was not at dequeue time.
    Wait,
    None(Rejection),
}

impl<T> Schedule<T> {
    /// Invalidates the bounds after a change of ranks, positions or sessions.
    pub(super) fn forget_bounds(&mut self) {
        if let Some(scratch) = &mut self.scratch {
            scratch.forget();
        }
    }

    /// Ranks whose exact load these requests need, in slot order; ranks with known loads are omitted.
    pub(super) fn shortlist<V: LoadView>(&mut self, requests: &VecDeque<PendingRequest<T>>, loads: &V) -> Vec<Slot> {
        let mut scratch = self.scratch.take().unwrap_or_default();
        scratch.listed.clear();
        for (in_batch, pending) in requests.iter().enumerate() {
            let candidate = pending.candidate(in_batch);
            match self.needs(pending) {
                Needs::Board => {}
                Needs::All => {
                    self.ranks.age();
                    self.list(&mut scratch, candidate, 0..self.ranks.as_slice().len());
                }
                Needs::Two => {
                    self.rules.evaluate(&self.ranks, pending.eligibility_inputs(), &mut scratch.eligibility);
                    let two = self.two_random_positions(pending, &scratch);
                    self.list(&mut scratch, candidate, two.into_iter().flatten());
                }
                Needs::Bounded if self.settings.policy == Policy::Latency => {
                    self.list_contenders(pending.case(in_batch, loads), &mut scratch);
                }
                Needs::Bounded => self.list_bounded(pending.case(in_batch, loads), &mut scratch),
            }
        }
        let alone = requests.len() == 1 && requests.iter().all(|pending| self.needs(pending) == Needs::Bounded);
        scratch.bounds_of = requests.front().filter(|_| alone).map(|pending| pending.number);
        scratch.listed.sort_unstable();
        scratch.listed.dedup();
        let slots = scratch.listed.clone();
        self.scratch = Some(scratch);
        slots
    }

    /// Knowledge required for an exact decision.
    fn needs(&self, pending: &PendingRequest<T>) -> Needs {
        let request = &pending.request;
        match (request.purpose, request.target) {
            (Purpose::LoadSnapshot | Purpose::Explain, _) => Needs::All,
            (Purpose::Book | Purpose::Report, Target::Exactly { .. }) => Needs::Board,
            (Purpose::Book | Purpose::Report, Target::Any) if self.extensions.policy.is_some() => self.settings.needs,
            (Purpose::Book | Purpose::Report, Target::Any)
                if self.settings.compares_costs
                    && (!self.extensions.scorers.is_empty() || self.targets_of(pending).is_some()) =>
            {
                Needs::All
            }
            (Purpose::Book | Purpose::Report, Target::Any) if self.temperature(pending) > 0.0 => {
                self.settings.needs_at_temperature
            }
            (Purpose::Book | Purpose::Report, Target::Any) => self.settings.needs,
        }
    }

    /// Adds ranks to the shortlist that can be queried and whose load is not exact.
    fn list(&self, scratch: &mut Scratch, candidate: ProjectedPrompt<'_>, positions: impl Iterator<Item = usize>) {
        let (ranks, statuses) = (self.ranks.as_slice(), self.ranks.statuses());
        let inexact = positions
            .filter(|&position| !statuses[position].unresponsive && !ranks[position].project(candidate).is_exact());
        scratch.listed.extend(inexact.map(|position| ranks[position].slot()));
    }

    /// Lists every rank whose lower bound does not exceed the least upper bound by more than the tie factor.
    fn list_bounded<V: LoadView>(&self, case: Case<'_, T, V>, scratch: &mut Scratch) {
        self.rules.evaluate(&self.ranks, case.pending.eligibility_inputs(), &mut scratch.eligibility);
        self.fill_bounds(case, false, scratch);
        let Scratch { bounds, listed, .. } = scratch;
        let least_hi = bounds.iter().map(|bounds| bounds.hi).fold(f64::INFINITY, lesser);
        let most = least_hi * self.settings.tie_factor;
        for (position, bounds) in bounds.iter().enumerate() {
            if bounds.lo <= most && bounds.lo < bounds.hi {
                listed.push(self.ranks.as_slice()[position].slot());
            }
        }
    }

    /// Decides a batch in order, each decision visible to the next.
    ///
    /// If no rank was queried, another query would return nothing new: overlapping bounds are replaced by the upper
    /// bounds.
    pub(super) fn decide<V: LoadView>(
        &mut self,
        mut requests: VecDeque<PendingRequest<T>>,
        queried: bool,
        loads: &V,
        effects: &mut VecDeque<Effect<T>>,
    ) {
        self.record_decision(queried, loads);
        let mut in_batch = 0;
        while let Some(mut pending) = requests.pop_front() {
            let settle = !queried && in_batch == 0;
            if in_batch > 0 {
                self.ranks.update_columns();
            }
            let session = pending.session;
            self.renew_session(&mut pending);
            let recorder = OutcomeRecorder::new(loads, session, pending.session);
            match pending.request.purpose {
                Purpose::LoadSnapshot => {
                    recorder.record(&Outcome::Aged);
                    effects.push_back(self.load_snapshot(in_batch, pending));
                }
                Purpose::Explain => {
                    recorder.record(&Outcome::Aged);
                    effects.push_back(self.explain(in_batch, loads, pending));
                }
                Purpose::Book | Purpose::Report if self.is_expired(&pending) => {
                    recorder.record(&Outcome::Passed);
                    effects.push_back(self.expired(pending));
                }
                Purpose::Book | Purpose::Report if pending.cancelled => {
                    recorder.record(&Outcome::Passed);
                    effects.push_back(Effect::Cancelled { context: pending.request.context });
                }
                Purpose::Book | Purpose::Report => {
                    match (self.choose(pending.case(in_batch, loads), settle), pending.class) {
                        (Choice::Rank(position), _) => {
                            let shadow = self.shadow_report(in_batch, loads, position, &pending);
                            let effect = self.place(in_batch, loads, position, pending, shadow);
                            recorder.record(&Outcome::of_placed(&effect));
                            effects.push_back(effect);
                        }
                        (Choice::None(reason), _) => {
                            recorder.record(&Outcome::Rejected(reason.to_string()));
                            effects.push_back(Effect::Reject { context: pending.request.context, reason });
                        }
                        (Choice::Wait, Some(class)) => {
                            recorder.record(&Outcome::Waits);
                            if let Some(pending) = self.hold(pending, class, effects) {
                                requests.push_front(pending);
                                break;
                            }
                        }
                        (Choice::QueryAgain, _) | (Choice::Wait, None) => {
                            recorder.record(&Outcome::Again);
                            requests.push_front(pending);
                            break;
                        }
                    }
                }
            }
            in_batch += 1;
        }
        self.record_decided(loads);
        self.query_again(requests);
    }

    /// Evaluates eligibility and chooses among the eligible ranks.
    pub(super) fn choose<V: LoadView>(&mut self, case: Case<'_, T, V>, settle: bool) -> Choice {
        if let Target::Exactly { rank, .. } = case.pending.request.target {
            return self.ranks.position(rank).map_or(Choice::None(Rejection::UnknownRank(rank)), Choice::Rank);
        }
        let mut scratch = self.scratch.take().unwrap_or_default();
        let choice = self.choose_with(case, settle, &mut scratch);
        self.scratch = Some(scratch);
        choice
    }

    fn choose_with<V: LoadView>(&self, case: Case<'_, T, V>, settle: bool, scratch: &mut Scratch) -> Choice {
        let pending = case.pending;
        self.rules.evaluate(&self.ranks, pending.eligibility_inputs(), &mut scratch.eligibility);
        if !scratch.eligibility.any_open() {
            let busy = scratch.eligibility.has(Filter::Busy);
            return if busy { Choice::Wait } else { Choice::None(self.rejection(pending, &scratch.eligibility)) };
        }
        if let Err(missed) = self.restrict_to_targets(case, scratch) {
            return Choice::None(Rejection::TargetsMissed(missed));
        }
        if self.settings.compares_costs {
            return self.choose_by_cost(case, settle, self.draw(pending), scratch);
        }
        self.choose_by_policy(case, settle, scratch)
    }

    fn choose_by_cost<V: LoadView>(
        &self,
        case: Case<'_, T, V>,
        settle: bool,
        draw: Draw,
        scratch: &mut Scratch,
    ) -> Choice {
        let Case { pending, candidate, .. } = case;
        if self.needs(pending) == Needs::All {
            return self.cheapest_of_all(case, draw, scratch);
        }
        if self.settings.policy == Policy::Latency {
            return self.choose_contender(case, settle, draw, scratch);
        }
        if scratch.bounds_of.take() == Some(pending.number) {
            self.update_bounds(case, scratch);
        } else {
            self.fill_bounds(case, false, scratch);
        }
        match self.cheapest_within_bounds(candidate, pending, draw, scratch) {
            Choice::QueryAgain if settle => {
                self.fill_bounds(case, true, scratch);
                match self.cheapest_within_bounds(candidate, pending, draw, scratch) {
                    // All eligible ranks have infinite or undefined cost; another query would not change that.
                    Choice::QueryAgain => self.drawn(draw, &scratch.eligibility),
                    choice => choice,
                }
            }
            choice => choice,
        }
    }

    /// The lowest cost with all costs exact, because all ranks were queried.
    fn cheapest_of_all<V: LoadView>(&self, case: Case<'_, T, V>, draw: Draw, scratch: &mut Scratch) -> Choice {
        let Case { pending, candidate, .. } = case;
        self.fill_overlaps(&pending.request.overlaps, scratch);
        let ranks = self.ranks.as_slice();
        let open: Vec<(usize, Projected)> =
            scratch.eligibility.open().map(|position| (position, ranks[position].project(candidate))).collect();
        let least = open.iter().map(|(_, projected)| projected.prefill_tokens.1).min().unwrap_or(0);
        let cost = self.cost_of(pending);
        let mut costs: Vec<f64> = open
            .iter()
            .map(|(position, projected)| {
                let overlap = scratch.overlaps[*position];
                let cost = match &cost {
                    Cost::Kv(cost) => {
                        let facts = self.cost_facts(pending, overlap, projected);
                        cost.cost(&CostFacts { prefill_tokens_least: least, ..facts })
                    }
                    Cost::Latency(cost) => {
                        cost.cost(&self.latency_facts(pending, &ranks[*position], overlap, projected))
                    }
                };
                cost * scratch.eligibility.factor(*position)
            })
            .collect();
        for ((position, projected), cost) in open.iter().zip(&mut costs) {
            match self.added_cost(case, *position, projected, scratch) {
                Ok(added) => *cost += added,
                Err(error) => return Choice::None(Rejection::Policy(error)),
            }
        }
        let temperature = self.temperature(pending);
        let picked = if temperature > 0.0 {
            draw.sampled(&costs, temperature).map(|picked| open[picked].0)
        } else {
            let most = costs.iter().copied().fold(f64::INFINITY, lesser) * self.settings.tie_factor;
            let near = open.iter().zip(&costs).filter(|(_, cost)| **cost <= most);
            let near = near.map(|((position, _), cost)| (*position, *cost)).collect();
            self.one_of_ties(candidate, pending, draw, &scratch.overlaps, near)
        };
        match picked {
            Some(position) => Choice::Rank(position),
            None => Choice::None(self.rejection(pending, &scratch.eligibility)),
        }
    }

    /// Reason for an empty choice.
    pub(super) fn rejection(&self, pending: &PendingRequest<T>, eligibility: &Eligibility) -> Rejection {
        let ranks = self.ranks.as_slice();
        if let Some(pin) = pending.request.options.as_ref().and_then(|options| options.constraints.hard_pin()) {
            let named = ranks.iter().position(|rank| pin.names(rank.rank));
            return Rejection::Pinned { pin, refused_by: named.and_then(|position| eligibility.of(position)) };
        }
        if ranks.is_empty() {
            return Rejection::NoRanks;
        }
        let removed = eligibility.removed();
        if eligibility.has(Filter::Overloaded) {
            return Rejection::AllOverloaded { removed };
        }
        Rejection::NoneEligible { removed }
    }

    /// The lowest exact cost or a tie with it, unless an inexact rank could match it.
    fn cheapest_within_bounds(
        &self,
        candidate: ProjectedPrompt<'_>,
        pending: &PendingRequest<T>,
        draw: Draw,
        scratch: &Scratch,
    ) -> Choice {
        let Scratch { bounds, overlaps, .. } = scratch;
        let (mut least, mut least_unproven) = (f64::INFINITY, f64::INFINITY);
        for bounds in bounds {
            if bounds.lo != bounds.hi {
                least_unproven = lesser(bounds.lo, least_unproven);
            } else {
                least = lesser(bounds.lo, least);
            }
        }
        // Without any exact rank, `least` is infinite and compares below nothing.
        let most = least * self.settings.tie_factor;
        if most >= least_unproven {
            return Choice::QueryAgain;
        }
        let near = bounds.iter().enumerate().filter(|(_, bounds)| bounds.lo == bounds.hi && bounds.hi <= most);
        let near = near.map(|(position, bounds)| (position, bounds.hi)).collect();
        self.one_of_ties(candidate, pending, draw, overlaps, near).map_or(Choice::QueryAgain, Choice::Rank)
    }

    /// A random eligible rank.
    pub(super) fn drawn(&self, draw: Draw, eligibility: &Eligibility) -> Choice {
        let equal = eligibility.open().map(|position| (position, self.ranks.as_slice()[position].rank, 0.0));
        draw.cheapest(equal).map_or(Choice::None(Rejection::NoRanks), Choice::Rank)
    }

    pub(super) fn draw(&self, pending: &PendingRequest<T>) -> Draw {
        Draw { seed: self.settings.seed, request: pending.number }
    }

    /// Books, or reports, the request on the rank at `position`.
    pub(super) fn place<V: LoadView>(
        &mut self,
        in_batch: usize,
        loads: &V,
        position: usize,
        pending: PendingRequest<T>,
        shadow: Option<Box<ShadowReport>>,
    ) -> Effect<T> {
        let request = &pending.request;
        let books = request.purpose == Purpose::Book;
        let decision = self.decision(pending.case(in_batch, loads), position);
        if !books {
            return Effect::Report { context: pending.request.context, decision };
        }
        let trace = self.is_traced(pending.number).then(|| {
            self.ranks.age();
            let mut scratch = self.scratch.take().unwrap_or_default();
            let explanation = self.explanation(pending.case(in_batch, loads), Ok(decision.rank), &mut scratch);
            self.scratch = Some(scratch);
            explanation
        });
        let remembers = self.rules.session_affinity != SessionAffinity::Off;
        if let Some(session_id) =
            request.options.as_ref().and_then(|options| options.session_id.as_ref()).filter(|_| remembers)
        {
            self.sessions.bind(session_id, decision.rank, self.now);
        }
        let tracks = self.tracks_prefill(&pending);
        let number = self.ranks.book(position, pending.candidate(in_batch), decision.prefill_load);
        if self.learns_typical {
            let new_tokens = decision.prefill_load.map_or(0, PrefillLoadHint::effective_tokens);
            let prompt_tokens = if tracks { request.prompt_tokens } else { 0 };
            let output_tokens = loads.output_tokens(decision.slot);
            let prefill = decision.prefill_load.and_then(PrefillLoadHint::expected_duration);
            self.arrival_rate.placed(prefill.unwrap_or_default(), self.now);
            self.typical.placed(prompt_tokens, prompt_tokens.saturating_sub(new_tokens), output_tokens);
        }
        self.turns += 1;
        Effect::Book { context: pending.request.context, decision, number, trace, shadow }
    }

    fn load_snapshot(&mut self, in_batch: usize, pending: PendingRequest<T>) -> Effect<T> {
        let (weights, track) = (self.settings.cost.tier_weights, self.tracks_prefill(&pending));
        self.ranks.age();
        let mut scratch = self.scratch.take().unwrap_or_default();
        self.fill_overlaps(&pending.request.overlaps, &mut scratch);
        let ranks = self.ranks.as_slice().iter().zip(&scratch.overlaps);
        let loads = ranks.map(|(rank, overlap)| {
            let projected = rank.project(pending.candidate(in_batch));
            let cached_tokens = overlap.cached_tokens(weights, self.settings.cost.block_size);
            let new = PrefillLoadHint::new(pending.request.prompt_tokens, cached_tokens, track, None);
            let new_tokens = new.map_or(0, |hint| u64::from(hint.effective_tokens()));
            PotentialLoad {
                rank: rank.rank,
                potential_prefill_tokens: projected.prefill_tokens.1.saturating_add(new_tokens), // a bound may mean "at least"
                potential_decode_blocks: projected.potential_blocks.1,
                active_requests: projected.requests,
            }
        });
        let loads = loads.collect();
        self.scratch = Some(scratch);
        Effect::LoadSnapshot { context: pending.request.context, loads }
    }

    fn explain<V: LoadView>(&mut self, in_batch: usize, loads: &V, pending: PendingRequest<T>) -> Effect<T> {
        self.ranks.age();
        let case = pending.case(in_batch, loads);
        let outcome = match self.choose(case, true) {
            Choice::Rank(position) => Ok(self.ranks.as_slice()[position].rank),
            Choice::None(reason) => Err(reason.to_string()),
            Choice::QueryAgain | Choice::Wait => Err(Filter::Busy.name().to_owned()),
        };
        let mut scratch = self.scratch.take().unwrap_or_default();
        let explanation = self.explanation(case, outcome, &mut scratch);
        self.scratch = Some(scratch);
        Effect::Explain { context: pending.request.context, explanation }
    }
}

/// The lesser of two numbers, neither NaN: one instruction, while `f64::min` checks for NaN.
fn lesser(a: f64, b: f64) -> f64 {
    if a < b { a } else { b }
}

pub(super) fn overlap_on(overlaps: &[RankOverlap], rank: &Rank) -> TierOverlap {
    let known = overlaps.iter().find(|known| (known.slot, known.generation) == (rank.slot(), rank.generation));
    known.map(|known| known.overlap).unwrap_or_default()
}
