//! Which of the ranks is chosen whose costs are as good as equal.
//!
//! Owns what ties, and the draw. Leaves to `decide` which ranks come into question: those whose exact cost is at most
//! [`Settings::tie_factor`](crate::schedule::Settings) times the least.

use smallvec::SmallVec;

use crate::schedule::rank::ProjectedPrompt;
use crate::schedule::{PendingRequest, Schedule};
use crate::select::{Draw, TierOverlap};

impl<T> Schedule<T> {
    /// One of the ranks whose costs tie. The cheapest is chosen, and costs that are equal are a tie for every policy.
    /// Under `latency` costs are estimates: if the cheapest rank is idle, other idle ranks with no fewer cached tokens tie
    /// with it, so that neither load nor a hit is traded, and the one with the least recent work is chosen.
    pub(in crate::schedule) fn one_of_ties(
        &self,
        candidate: ProjectedPrompt<'_>,
        pending: &PendingRequest<T>,
        draw: Draw,
        overlaps: &[TierOverlap],
        near: SmallVec<[(usize, f64); 16]>,
    ) -> Option<usize> {
        let ranks = self.ranks.as_slice();
        let lot = |position: usize| draw.key(ranks[position].rank);
        let cheapest = draw.cheapest(near.iter().map(|&(position, cost)| (position, ranks[position].rank, cost)))?;
        if near.len() == 1 || self.settings.tie_factor == 1.0 {
            return Some(cheapest);
        }
        let cached_tokens = |position: usize| {
            let (rank, overlap) = (&ranks[position], overlaps[position]);
            self.expected_cached_tokens(pending, rank, overlap, &rank.project(candidate))
        };
        let is_idle = |position: usize| ranks[position].project(candidate).requests == 0;
        if !is_idle(cheapest) {
            return Some(cheapest);
        }
        let cached = self.own_hit(pending, cached_tokens(cheapest));
        // Most ties are of prompts that are cached nowhere.
        let is_tie = |position: &usize| is_idle(*position) && (cached == 0 || cached_tokens(*position) >= cached);
        let ties = near.iter().map(|(position, _)| *position).filter(is_tie);
        ties.min_by(|&a, &b| {
            let order = ranks[a].about.recent_work.order(ranks[b].about.recent_work);
            order.then_with(|| lot(a).cmp(&lot(b)))
        })
    }

    /// Cached tokens that a tie must have, too: a hit of less than half of the prompt is probably a system prompt, which
    /// other ranks will also need. Ignoring it costs at most the difference between ties.
    pub(in crate::schedule) fn own_hit(&self, pending: &PendingRequest<T>, cached_tokens: u32) -> u32 {
        if cached_tokens < pending.request.prompt_tokens / 2 { 0 } else { cached_tokens }
    }
}
