//! Choice among ranks whose costs are as good as equal: those at most `tie_factor` times the least.

use std::cmp::Ordering;

use smallvec::SmallVec;

use crate::schedule::LoadView;
use crate::schedule::case::Case;
use crate::schedule::rank::About;
use crate::select::TierOverlap;

impl<T, V: LoadView> Case<'_, T, V> {
    /// One of the ranks whose costs tie. The cheapest is chosen, and costs that are equal are a tie for every policy.
    /// Under `latency` costs are estimates: if the cheapest rank is idle, other idle ranks with no fewer cached tokens tie
    /// with it, so that neither load nor a hit is traded, and the one with the least recent work is chosen. Where a program
    /// begins, all ranks with no fewer cached tokens tie, and the one with the most room is chosen.
    pub(super) fn one_of_ties(&self, overlaps: &[TierOverlap], near: SmallVec<[(usize, f64); 16]>) -> Option<usize> {
        let (ranks, draw) = (self.ranks().as_slice(), self.draw());
        let cheapest = draw.cheapest(near.iter().map(|&(position, cost)| (position, ranks[position].rank, cost)))?;
        let room = self.room_to_begin(cheapest);
        if near.len() == 1 || self.settings.tie_factor == 1.0 && room.is_none() {
            return Some(cheapest);
        }
        let cached_tokens = |position: usize| {
            let rank = &ranks[position];
            self.expected_cached_tokens(rank, overlaps[position], &rank.project(self.candidate))
        };
        let may_tie = |position: usize| room.is_some() || ranks[position].project(self.candidate).requests == 0;
        if !may_tie(cheapest) {
            return Some(cheapest);
        }
        let cached = self.own_hit(cached_tokens(cheapest));
        // Most ties are of prompts that are cached nowhere.
        let is_tie = |position: &usize| may_tie(*position) && (cached == 0 || cached_tokens(*position) >= cached);
        let ties = near.iter().map(|(position, _)| *position).filter(is_tie);
        ties.min_by(|&a, &b| {
            let order = self.order_by_room(room, a, b);
            let order = order.then_with(|| ranks[a].about.recent_work.order(ranks[b].about.recent_work));
            order.then_with(|| draw.key(ranks[a].rank).cmp(&draw.key(ranks[b].rank)))
        })
    }

    /// Tokens of the context with which a program begins on the rank with the most room among those that tie with the
    /// `cheapest`, idle or not: its next calls follow it there. `None` if no program begins, or without a known capacity.
    pub(in crate::schedule) fn room_to_begin(&self, cheapest: usize) -> Option<u32> {
        if !self.pending.begins {
            return None;
        }
        let held_tokens = self.tokens(self.pending.held_blocks().into());
        let own_tokens = self.pending.request.prompt_tokens.saturating_sub(held_tokens);
        self.fill_with(own_tokens, cheapest).is_finite().then_some(own_tokens)
    }

    /// Order of ties by the room for a context of so many tokens, if a program begins.
    pub(in crate::schedule) fn order_by_room(&self, tokens: Option<u32>, a: usize, b: usize) -> Ordering {
        tokens.map_or(Ordering::Equal, |tokens| self.fill_with(tokens, a).total_cmp(&self.fill_with(tokens, b)))
    }

    /// Working set of a rank with further tokens, as a share of the cache; infinite for an unknown capacity.
    fn fill_with(&self, tokens: u32, position: usize) -> f64 {
        let About { traits, working_tokens, .. } = &*self.ranks().as_slice()[position].about;
        let capacity = traits.total_kv_blocks.map(|blocks| f64::from(self.tokens(blocks.into())));
        capacity.map_or(f64::INFINITY, |capacity| (*working_tokens + u64::from(tokens)) as f64 / capacity)
    }

    /// Cached tokens that a tie must have, too: a hit of less than half of the prompt is probably a system prompt, which
    /// other ranks will also need. Ignoring it costs at most the difference between ties.
    pub(in crate::schedule) fn own_hit(&self, cached_tokens: u32) -> u32 {
        if cached_tokens < self.pending.request.prompt_tokens / 2 { 0 } else { cached_tokens }
    }
}
