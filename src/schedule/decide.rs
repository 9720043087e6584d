//! Shortlists and decisions of batches.

use std::collections::VecDeque;

use super::appraisal::ShadowReport;
use super::choice::Choice;
use super::progress::{Progress, Verdict};
use super::search::Search;
use super::{Effect, LoadView, PendingRequest, PotentialLoad, Purpose, Request, ResolvedOptions, Schedule};
use crate::config::SessionAffinity;
use crate::load::{PrefillLoadHint, SpeedCell};
use crate::policy::Needs;
use crate::protocol::{Slot, WorkerRank};
use crate::select::Filter;
use crate::session::Call;

impl<T> Schedule<T> {
    /// Ranks whose exact load these requests need, in slot order. Also returns the search if its bounds or contenders apply
    /// to the decision of the batch, which is then a single request.
    pub(super) fn shortlist<V: LoadView>(
        &mut self,
        requests: &VecDeque<PendingRequest<T>>,
        loads: &V,
    ) -> (Vec<Slot>, Option<Box<Search>>) {
        let (mut search, mut slots, mut is_bounded) = (self.active.search(), Vec::new(), false);
        for (in_batch, pending) in requests.iter().enumerate() {
            let needs = self.active.case(&self.pool, pending, in_batch, loads).needs();
            if needs == Needs::All {
                self.pool.ranks.age();
            }
            search.list(&self.active.case(&self.pool, pending, in_batch, loads), needs, &mut slots);
            is_bounded = needs == Needs::Bounded;
        }
        slots.sort_unstable();
        slots.dedup();
        if is_bounded && requests.len() == 1 {
            return (slots, Some(search));
        }
        self.active.keep(Some(search));
        (slots, None)
    }

    /// Decides the next request of a batch. Each decision is visible to the next.
    ///
    /// If no rank was queried, another query would return nothing new: overlapping bounds are replaced by the upper
    /// bounds.
    pub(super) fn decide_next<V: LoadView>(
        &mut self,
        loads: &V,
        effects: &mut VecDeque<Effect<T>>,
    ) -> Option<Progress> {
        let batch = self.deciding.as_mut()?;
        let mut pending = batch.requests.pop_front()?;
        let (in_batch, remaining, mut listed) = (batch.in_batch, batch.requests.len(), batch.listed.take());
        let settle = !batch.queried && in_batch == 0;
        batch.in_batch += 1;
        if in_batch > 0 {
            self.pool.ranks.update_columns();
        }
        let before = pending.session;
        self.renew_session(&mut pending);
        let session = (before != pending.session).then_some(pending.session);
        if session.is_some() {
            listed = None; // other ranks are eligible
        }
        let verdict = if self.needs_choice(&pending) {
            let (choice, search) = self.active.choose(&self.pool, (&pending, in_batch), loads, settle, listed);
            let verdict = match (choice, pending.class) {
                (Choice::Rank(position), _) => {
                    let shadow = self.shadow_report(in_batch, loads, position, &pending);
                    let effect = self.place(in_batch, loads, (position, search.as_deref()), pending, shadow);
                    effects.push_back(effect);
                    Verdict::Placed
                }
                (Choice::None(reason), _) => {
                    effects.push_back(Effect::Reject { context: pending.request.context, reason });
                    Verdict::Rejected
                }
                (Choice::Wait, Some(class)) => {
                    if let Some(pending) = self.hold(pending, class, effects) {
                        self.return_to_batch(pending);
                    }
                    Verdict::Waits
                }
                (Choice::QueryAgain, _) | (Choice::Wait, None) => {
                    self.return_to_batch(pending);
                    Verdict::Again
                }
            };
            self.active.keep(search);
            verdict
        } else {
            self.answer(in_batch, loads, pending, effects)
        };
        let ended = self.deciding.take_if(|batch| batch.requests.len() > remaining || batch.requests.is_empty());
        let is_last = ended.is_some();
        if let Some(batch) = ended {
            self.query_again(batch.requests);
        }
        Some(Progress::Decided { verdict, session, is_last })
    }

    /// Puts a request that needs other loads back at the front of its batch.
    fn return_to_batch(&mut self, pending: PendingRequest<T>) {
        if let Some(batch) = &mut self.deciding {
            batch.requests.push_front(pending);
        }
    }

    fn needs_choice(&self, pending: &PendingRequest<T>) -> bool {
        let asks = matches!(pending.request.purpose, Purpose::Book | Purpose::Report);
        asks && !pending.cancelled && !self.is_expired(pending)
    }

    /// Answers a request that needs no choice, or none any more.
    fn answer<V: LoadView>(
        &mut self,
        in_batch: usize,
        loads: &V,
        pending: PendingRequest<T>,
        effects: &mut VecDeque<Effect<T>>,
    ) -> Verdict {
        let (verdict, effect) = match pending.request.purpose {
            Purpose::LoadSnapshot => (Verdict::Aged, self.load_snapshot(in_batch, loads, pending)),
            Purpose::Explain => (Verdict::Aged, self.explain(in_batch, loads, pending)),
            Purpose::Book | Purpose::Report if self.is_expired(&pending) => (Verdict::Passed, self.expired(pending)),
            Purpose::Book | Purpose::Report => {
                (Verdict::Passed, Effect::Cancelled { context: pending.request.context })
            }
        };
        effects.push_back(effect);
        verdict
    }

    /// Books, or reports, the request on the rank at `position`, with what the search for it has found.
    pub(super) fn place<V: LoadView>(
        &mut self,
        in_batch: usize,
        loads: &V,
        (position, search): (usize, Option<&Search>),
        pending: PendingRequest<T>,
        shadow: Option<Box<ShadowReport>>,
    ) -> Effect<T> {
        let request = &pending.request;
        let case = self.active.case(&self.pool, &pending, in_batch, loads);
        let decision = case.decision(position, search);
        if request.purpose != Purpose::Book {
            return Effect::Report { context: pending.request.context, decision };
        }
        let tracks = case.tracks_prefill();
        let trace = case.is_traced().then(|| {
            self.pool.ranks.age();
            self.active.case(&self.pool, &pending, in_batch, loads).explanation(Ok(decision.rank))
        });
        if self.active.settings.rules.session_affinity != SessionAffinity::Off {
            self.remember(&pending, decision.rank);
        }
        self.claim(&pending, decision.slot);
        let pool = &mut self.pool;
        let number = pool.ranks.book(position, pending.candidate(in_batch), decision.prefill_load);
        if self.learns_typical {
            let new_tokens = decision.prefill_load.map_or(0, PrefillLoadHint::effective_tokens);
            let prompt_tokens = if tracks { request.prompt_tokens } else { 0 };
            let output_tokens = loads.with_speed(decision.slot, SpeedCell::output_tokens);
            let prefill = decision.prefill_load.and_then(PrefillLoadHint::expected_duration);
            pool.arrival_rate.placed(prefill.unwrap_or_default(), pool.now);
            pool.typical.placed(prompt_tokens, prompt_tokens.saturating_sub(new_tokens), output_tokens);
        }
        pool.turns += 1;
        Effect::Book { context: pending.request.context, decision, number, trace, shadow }
    }

    /// Remembers the rank and the context of the request's session.
    fn remember(&mut self, pending: &PendingRequest<T>, rank: WorkerRank) {
        let Request { options, prompt, prompt_tokens, .. } = &pending.request;
        let Some(ResolvedOptions { session_id: Some(id), program, .. }) = options.as_deref() else { return };
        let held_blocks = pending.held_blocks();
        let held_tokens = held_blocks.saturating_mul(self.active.settings.pool.block_size);
        let (program, fingerprint, prompt_tokens) = (*program, pending.fingerprint, *prompt_tokens);
        let call = Call { program, prompt, fingerprint, prompt_tokens, held_blocks, held_tokens };
        self.sessions.call(id, rank, &call, self.pool.now);
        self.update_working_sets();
    }

    fn load_snapshot<V: LoadView>(&mut self, in_batch: usize, loads: &V, pending: PendingRequest<T>) -> Effect<T> {
        self.pool.ranks.age();
        let case = self.active.case(&self.pool, &pending, in_batch, loads);
        let (track, overlaps) = (case.tracks_prefill(), case.overlaps());
        let ranks = self.pool.ranks.as_slice().iter().zip(overlaps);
        let loads = ranks.map(|(rank, overlap)| {
            let projected = rank.project(case.candidate);
            let cached_tokens = case.cached_tokens(overlap);
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
        Effect::LoadSnapshot { context: pending.request.context, loads }
    }

    fn explain<V: LoadView>(&mut self, in_batch: usize, loads: &V, pending: PendingRequest<T>) -> Effect<T> {
        self.pool.ranks.age();
        let (choice, search) = self.active.choose(&self.pool, (&pending, in_batch), loads, true, None);
        self.active.keep(search);
        let outcome = match choice {
            Choice::Rank(position) => Ok(self.pool.ranks.as_slice()[position].rank),
            Choice::None(reason) => Err(reason.to_string()),
            Choice::QueryAgain | Choice::Wait => Err(Filter::Busy.name().to_owned()),
        };
        let explanation = self.active.case(&self.pool, &pending, in_batch, loads).explanation(outcome);
        Effect::Explain { context: pending.request.context, explanation }
    }
}
