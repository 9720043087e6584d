//! Shortlists and choices: the part of the scheduler that looks at costs.

use std::cmp::Reverse;
use std::collections::VecDeque;

use super::rank::{Candidate, Projected, Rank};
use super::{Decision, Effect, Numbered, PotentialLoad, Purpose, Rejection, Request, Schedule, Target};
use crate::load::PrefillLoadHint;
use crate::protocol::Slot;
use crate::select::{Bounds, CostFacts, Draw, KvCost, Needs, Policy, RankOverlap, TierOverlap};

/// Buffers kept between decisions.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    /// The current request's overlap on each rank, by position.
    overlaps: Vec<TierOverlap>,
    /// The current request's bounds on each rank, by position.
    bounds: Vec<Bounds>,
    /// The one request whose bounds these still are but for the answers since, if its batch has no other.
    bounds_of: Option<u64>,
    /// Slots on the shortlist.
    listed: Vec<Slot>,
}

impl Scratch {
    /// The ranks have changed: positions mean others now.
    pub(super) fn forget(&mut self) {
        self.bounds_of = None;
    }

    fn list<'a>(&mut self, ranks: impl Iterator<Item = (usize, &'a Rank)>) {
        self.listed.extend(ranks.map(|(_, rank)| rank.slot));
    }
}

impl<T> Numbered<T> {
    fn candidate(&self, in_batch: usize) -> Candidate<'_> {
        Candidate { prompt: &self.request.prompt, mark: &self.mark, in_batch }
    }
}

/// How the choice for one request went.
enum Choice {
    Rank(usize),
    /// A rank that nobody asked could still win: ask again with what is left of the batch.
    AskAgain,
    None,
}

impl<T> Schedule<T> {
    /// Ranks whose exact load these requests need, in slot order. Whoever is known exactly need not be asked.
    pub(super) fn shortlist(&mut self, requests: &VecDeque<Numbered<T>>) -> Vec<Slot> {
        if self.all_suspect() {
            return Vec::new(); // nobody answers: the board must do
        }
        let mut scratch = std::mem::take(&mut self.scratch);
        scratch.listed.clear();
        for (in_batch, numbered) in requests.iter().enumerate() {
            let needs = match (numbered.request.purpose, numbered.request.target) {
                (Purpose::Survey, _) => Needs::All,
                (_, Target::Exactly { .. }) => Needs::Board,
                (_, Target::Any) => self.config.needs(),
            };
            let candidate = numbered.candidate(in_batch);
            match needs {
                Needs::Board => {}
                Needs::All => {
                    scratch.list(self.eligible().filter(|(_, rank)| !rank.project(candidate).is_exact()));
                }
                Needs::Two => {
                    let two = self.two_drawn(self.draw(numbered)).into_iter().flatten();
                    let two = two.map(|position| (position, &self.ranks.as_slice()[position]));
                    scratch.list(two.filter(|(_, rank)| !rank.project(candidate).is_exact()));
                }
                Needs::Bounded => self.list_bounded(candidate, numbered, &mut scratch),
            }
        }
        let alone = requests.len() == 1 && self.config.needs() == Needs::Bounded;
        scratch.bounds_of = requests.front().filter(|_| alone).map(|numbered| numbered.number);
        scratch.listed.sort_unstable();
        scratch.listed.dedup();
        let slots = scratch.listed.clone();
        self.scratch = scratch;
        slots
    }

    /// Lists every rank whose least cost does not exceed the least of the highest costs.
    fn list_bounded(&self, candidate: Candidate<'_>, numbered: &Numbered<T>, scratch: &mut Scratch) {
        self.fill_bounds(candidate, numbered, false, scratch);
        let least_hi = scratch.bounds.iter().map(|bounds| bounds.hi).fold(f64::INFINITY, f64::min);
        let bounds = std::mem::take(&mut scratch.bounds);
        let ranks = self.ranks.as_slice().iter().enumerate().zip(&bounds);
        scratch.list(ranks.filter(|(_, bounds)| bounds.lo <= least_hi && bounds.lo < bounds.hi).map(|(rank, _)| rank));
        scratch.bounds = bounds;
    }

    /// Decides a batch in order, each decision visible to the next.
    ///
    /// Where nobody was `asked`, asking again would find nothing new: bounds that do not meet are taken at their worst.
    pub(super) fn decide(
        &mut self,
        mut requests: VecDeque<Numbered<T>>,
        asked: bool,
        effects: &mut VecDeque<Effect<T>>,
    ) {
        let mut in_batch = 0;
        while let Some(numbered) = requests.pop_front() {
            if numbered.request.purpose == Purpose::Survey {
                effects.push_back(self.survey(in_batch, numbered));
            } else {
                let settle = !asked && in_batch == 0;
                match self.choose(in_batch, settle, &numbered) {
                    Choice::Rank(position) => effects.push_back(self.place(in_batch, position, numbered)),
                    Choice::None => effects.push_back(rejected(numbered.request)),
                    Choice::AskAgain => {
                        requests.push_front(numbered);
                        break;
                    }
                }
            }
            in_batch += 1;
        }
        while let Some(numbered) = requests.pop_back() {
            self.waiting.push_front(numbered);
        }
    }

    fn choose(&mut self, in_batch: usize, settle: bool, numbered: &Numbered<T>) -> Choice {
        if let Target::Exactly { rank, .. } = numbered.request.target {
            return self.ranks.position(rank).map_or(Choice::None, Choice::Rank);
        }
        if self.ranks.as_slice().is_empty() {
            return Choice::None;
        }
        let draw = self.draw(numbered);
        let position = match self.config.policy {
            Policy::Kv => return self.choose_by_cost(in_batch, settle, numbered, draw),
            Policy::RoundRobin => self.in_turn(),
            Policy::Random => self.eligible().max_by_key(|(_, rank)| draw.key(rank.rank)).map(|(position, _)| position),
            Policy::PowerOfTwo => {
                let two = self.two_drawn(draw).into_iter().flatten();
                self.least(draw, two, |rank| {
                    let projected = rank.project(numbered.candidate(in_batch));
                    (projected.requests, projected.potential_blocks.1)
                })
            }
            Policy::LeastLoaded => {
                let eligible = self.eligible().map(|(position, _)| position);
                self.least(draw, eligible, Rank::requests)
            }
        };
        position.map_or(Choice::None, Choice::Rank)
    }

    fn choose_by_cost(&mut self, in_batch: usize, settle: bool, numbered: &Numbered<T>, draw: Draw) -> Choice {
        let candidate = numbered.candidate(in_batch);
        let mut scratch = std::mem::take(&mut self.scratch);
        let choice = if self.config.needs() == Needs::All {
            self.cheapest_of_all(candidate, &numbered.request, draw, &mut scratch)
        } else {
            if scratch.bounds_of.take() == Some(numbered.number) {
                self.update_bounds(candidate, numbered, &mut scratch);
            } else {
                self.fill_bounds(candidate, numbered, false, &mut scratch);
            }
            match self.cheapest_within_bounds(draw, &scratch.bounds) {
                Choice::AskAgain if settle => {
                    self.fill_bounds(candidate, numbered, true, &mut scratch);
                    self.cheapest_within_bounds(draw, &scratch.bounds)
                }
                choice => choice,
            }
        };
        self.scratch = scratch;
        choice
    }

    /// The least cost, with every rank's cost taken as exact: they were all asked.
    fn cheapest_of_all(
        &self,
        candidate: Candidate<'_>,
        request: &Request<T>,
        draw: Draw,
        scratch: &mut Scratch,
    ) -> Choice {
        self.fill_overlaps(&request.overlaps, scratch);
        let eligible: Vec<(usize, &Rank, Projected)> =
            self.eligible().map(|(position, rank)| (position, rank, rank.project(candidate))).collect();
        let least = eligible.iter().map(|(_, _, projected)| projected.prefill_tokens.1).min().unwrap_or(0);
        let cost = self.config.kv_cost();
        let costs: Vec<f64> = eligible
            .iter()
            .map(|(position, _, projected)| {
                let facts = facts(request, scratch.overlaps[*position], projected);
                cost.cost(&CostFacts { prefill_tokens_least: least, ..facts })
            })
            .collect();
        let picked = if self.config.temperature > 0.0 {
            draw.sampled(&costs, self.config.temperature)
        } else {
            draw.cheapest(
                eligible.iter().zip(&costs).enumerate().map(|(n, ((_, rank, _), cost))| (n, rank.rank, *cost)),
            )
        };
        picked.map_or(Choice::None, |picked| Choice::Rank(eligible[picked].0))
    }

    /// The least exact cost, if no rank that is known only by its bounds could be as cheap.
    fn cheapest_within_bounds(&self, draw: Draw, bounds: &[Bounds]) -> Choice {
        let mut least_unproven = f64::INFINITY;
        let exact = self.ranks.as_slice().iter().zip(bounds).enumerate().filter_map(|(position, (rank, bounds))| {
            if bounds.lo < bounds.hi {
                least_unproven = least_unproven.min(bounds.lo);
            }
            (bounds.lo == bounds.hi && bounds.lo.is_finite()).then_some((position, rank.rank, bounds.lo))
        });
        match draw.cheapest(exact) {
            Some(position) if bounds[position].lo < least_unproven => Choice::Rank(position),
            Some(_) | None => Choice::AskAgain,
        }
    }

    /// The position with the least load; ties go to the highest lot.
    fn least<L: Ord>(
        &self,
        draw: Draw,
        positions: impl Iterator<Item = usize>,
        load: impl Fn(&Rank) -> L,
    ) -> Option<usize> {
        let ranks = self.ranks.as_slice();
        positions.min_by_key(|&position| (load(&ranks[position]), Reverse(draw.key(ranks[position].rank))))
    }

    /// The rank whose turn it is.
    fn in_turn(&self) -> Option<usize> {
        let eligible = u64::try_from(self.eligible().count()).ok()?;
        let turn = usize::try_from(self.turns.checked_rem(eligible)?).ok()?;
        self.eligible().nth(turn).map(|(position, _)| position)
    }

    /// The two ranks with the highest lots; one or none where there are no more.
    fn two_drawn(&self, draw: Draw) -> [Option<usize>; 2] {
        let mut best: [Option<(u64, usize)>; 2] = [None, None];
        for (position, rank) in self.eligible() {
            let lot = Some((draw.key(rank.rank), position));
            if lot > best[0] {
                best = [lot, best[0]];
            } else if lot > best[1] {
                best[1] = lot;
            }
        }
        best.map(|lot| lot.map(|(_, position)| position))
    }

    fn eligible(&self) -> impl Iterator<Item = (usize, &Rank)> {
        let all_suspect = self.all_suspect();
        self.ranks.as_slice().iter().enumerate().filter(move |(_, rank)| all_suspect || !rank.suspect)
    }

    fn all_suspect(&self) -> bool {
        self.ranks.as_slice().iter().all(|rank| rank.suspect)
    }

    fn draw(&self, numbered: &Numbered<T>) -> Draw {
        Draw { seed: self.config.seed, request: numbered.number }
    }

    /// Books, or reports, the request on the rank at `position`.
    fn place(&mut self, in_batch: usize, position: usize, numbered: Numbered<T>) -> Effect<T> {
        let rank = self.ranks.at_mut(position);
        let request = &numbered.request;
        let overlap = overlap_on(&request.overlaps, rank);
        let (cached_tokens, expected_duration) = match request.target {
            Target::Exactly { cached_tokens: Some(tokens), expected_duration, .. } => (tokens, expected_duration),
            Target::Exactly { cached_tokens: None, expected_duration, .. } => {
                (overlap.cached_tokens(self.config.tier_weights(), self.config.block_size), expected_duration)
            }
            Target::Any => (overlap.cached_tokens(self.config.tier_weights(), self.config.block_size), None),
        };
        let track = self.config.track_prefill_tokens;
        let hint = PrefillLoadHint::new(request.isl_tokens, cached_tokens, track, expected_duration);
        let Rank { rank: name, slot, generation, .. } = *rank;
        let decision = Decision { request: numbered.number, rank: name, slot, generation, overlap, hint };
        match request.purpose {
            Purpose::Book => {
                let prefill_tokens = hint.map_or(0, |hint| u64::from(hint.effective_tokens()));
                let number = rank.book(numbered.candidate(in_batch), prefill_tokens);
                self.turns += 1;
                Effect::Book { ticket: numbered.request.ticket, decision, number }
            }
            Purpose::Report | Purpose::Survey => Effect::Report { ticket: numbered.request.ticket, decision },
        }
    }

    fn survey(&self, in_batch: usize, numbered: Numbered<T>) -> Effect<T> {
        let request = &numbered.request;
        let weights = self.config.tier_weights();
        let loads = self.ranks.as_slice().iter().map(|rank| {
            let projected = rank.project(numbered.candidate(in_batch));
            let cached_tokens = overlap_on(&request.overlaps, rank).cached_tokens(weights, self.config.block_size);
            let track = self.config.track_prefill_tokens;
            let new = PrefillLoadHint::new(request.isl_tokens, cached_tokens, track, None);
            PotentialLoad {
                rank: rank.rank,
                potential_prefill_tokens: projected.prefill_tokens.1
                    + new.map_or(0, |hint| u64::from(hint.effective_tokens())),
                potential_decode_blocks: projected.potential_blocks.1,
                active_requests: projected.requests,
            }
        });
        let loads = loads.collect();
        Effect::Survey { ticket: numbered.request.ticket, loads }
    }

    fn fill_overlaps(&self, overlaps: &[RankOverlap], scratch: &mut Scratch) {
        scratch.overlaps.clear();
        scratch.overlaps.resize(self.ranks.as_slice().len(), TierOverlap::default());
        for known in overlaps {
            if let Some(position) = self.ranks.position_of(known.slot, known.generation) {
                scratch.overlaps[position] = known.overlap;
            }
        }
    }

    /// Bounds of every rank's cost; `settle` takes each at its worst.
    fn fill_bounds(&self, candidate: Candidate<'_>, numbered: &Numbered<T>, settle: bool, scratch: &mut Scratch) {
        self.fill_overlaps(&numbered.request.overlaps, scratch);
        let (cost, all_suspect) = (self.config.kv_cost(), self.all_suspect());
        let ranks = self.ranks.as_slice().iter().zip(&scratch.overlaps);
        let bounds = ranks.map(|(rank, overlap)| {
            if rank.suspect && !all_suspect {
                return NOT_ELIGIBLE;
            }
            bounds(&cost, rank, settle || all_suspect, candidate, numbered, *overlap)
        });
        scratch.bounds.clear();
        scratch.bounds.extend(bounds);
    }

    /// Brings bounds that were filled before the queries up to date: only who was asked can have changed.
    fn update_bounds(&self, candidate: Candidate<'_>, numbered: &Numbered<T>, scratch: &mut Scratch) {
        let (cost, all_suspect) = (self.config.kv_cost(), self.all_suspect());
        for slot in &scratch.listed {
            if let Some(position) = self.ranks.position_in(*slot) {
                let (rank, overlap) = (&self.ranks.as_slice()[position], scratch.overlaps[position]);
                scratch.bounds[position] = match rank.suspect && !all_suspect {
                    true => NOT_ELIGIBLE,
                    false => bounds(&cost, rank, all_suspect, candidate, numbered, overlap),
                };
            }
        }
    }
}

/// The cost of a rank that may not be chosen. Every other cost is finite.
const NOT_ELIGIBLE: Bounds = Bounds { lo: f64::INFINITY, hi: f64::INFINITY };

/// Bounds of an eligible rank's cost, or its worst.
#[inline]
fn bounds<T>(
    cost: &KvCost,
    rank: &Rank,
    settle: bool,
    candidate: Candidate<'_>,
    numbered: &Numbered<T>,
    overlap: TierOverlap,
) -> Bounds {
    let mut projected = rank.project(candidate);
    if settle {
        projected.take_worst();
    }
    let facts = facts(&numbered.request, overlap, &projected);
    cost.bounds(&facts, projected.potential_blocks, projected.prefill_tokens)
}

/// The facts of a rank taken at their upper ends, which for exact ones are the only ends.
fn facts<T>(request: &Request<T>, overlap: TierOverlap, projected: &Projected) -> CostFacts {
    CostFacts {
        isl_tokens: u64::from(request.isl_tokens),
        overlap,
        prefill_tokens: projected.prefill_tokens.1,
        prefill_tokens_least: 0,
        potential_blocks: projected.potential_blocks.1,
        active_requests: projected.requests,
    }
}

fn overlap_on(overlaps: &[RankOverlap], rank: &Rank) -> TierOverlap {
    let known = overlaps.iter().find(|known| (known.slot, known.generation) == (rank.slot, rank.generation));
    known.map(|known| known.overlap).unwrap_or_default()
}

fn rejected<T>(request: Request<T>) -> Effect<T> {
    let reason = match request.target {
        Target::Any => Rejection::NoRanks,
        Target::Exactly { rank, .. } => Rejection::UnknownRank(rank),
    };
    Effect::Reject { ticket: request.ticket, reason }
}
