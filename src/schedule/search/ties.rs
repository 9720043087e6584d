//! Choice among ranks whose costs are as good as equal: those at most `tie_factor` times the least.

use smallvec::SmallVec;

use crate::schedule::LoadView;
use crate::schedule::case::Case;
use crate::select::TierOverlap;

impl<T, V: LoadView> Case<'_, T, V> {
    /// One of the ranks whose costs tie. The cheapest is chosen, and costs that are equal are a tie for every policy.
    /// Under `latency` costs are estimates: if the cheapest rank is idle, other idle ranks with no fewer cached tokens tie
    /// with it, so that neither load nor a hit is traded, and the one with the least recent work is chosen.
    pub(super) fn one_of_ties(&self, overlaps: &[TierOverlap], near: SmallVec<[(usize, f64); 16]>) -> Option<usize> {
        let (ranks, draw) = (self.ranks().as_slice(), self.draw());
        let cheapest = draw.cheapest(near.iter().map(|&(position, cost)| (position, ranks[position].rank, cost)))?;
        if near.len() == 1 || self.settings.tie_factor == 1.0 {
            return Some(cheapest);
        }
        let cached_tokens = |position: usize| {
            let rank = &ranks[position];
            self.expected_cached_tokens(rank, overlaps[position], &rank.project(self.candidate))
        };
        let is_idle = |position: usize| ranks[position].project(self.candidate).requests == 0;
        if !is_idle(cheapest) {
            return Some(cheapest);
        }
        let cached = self.own_hit(cached_tokens(cheapest));
        // Most ties are of prompts that are cached nowhere.
        let is_tie = |position: &usize| is_idle(*position) && (cached == 0 || cached_tokens(*position) >= cached);
        let ties = near.iter().map(|(position, _)| *position).filter(is_tie);
        ties.min_by(|&a, &b| {
            let order = ranks[a].about.recent_work.order(ranks[b].about.recent_work);
            order.then_with(|| draw.key(ranks[a].rank).cmp(&draw.key(ranks[b].rank)))
        })
    }

    /// Cached tokens that a tie must have, too: a hit of less than half of the prompt is probably a system prompt, which
    /// other ranks will also need. Ignoring it costs at most the difference between ties.
    pub(in crate::schedule) fn own_hit(&self, cached_tokens: u32) -> u32 {
        if cached_tokens < self.pending.request.prompt_tokens / 2 { 0 } else { cached_tokens }
    }
}
