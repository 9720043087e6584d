//! Published placement rules of other routers, as contenders.
//!
//! A rule reads this router's index and bookings, which are fresher than the polled loads of its own router.

use std::cmp::Reverse;

use pointsman::policy::{RankPolicy, RankTable, RequestFacts};

/// Rule of another router, with its default weights and thresholds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// SMG with an index: the longest match unless its rank has more than 1.5 times and 64 more than the mean number of
    /// requests, else the fewest requests. Its tree has the placements at once.
    Smg,
    /// llm-d's scorers: 3 x cached share of the prompt, 2 x free queue (tokens to compute, relative to the range of the
    /// ranks), 2 x free KV memory.
    LlmD,
    /// llm-d's affinity filter, "sticky until saturated": of the ranks with four fifths of the prompt, if there are any,
    /// the one with the fewest uncached tokens. All ranks compete if its queue is 18 s longer than another, at 15,928 tokens a
    /// second.
    Sticky,
}

/// Facts of a rank for the rules.
#[derive(Clone, Copy, Debug)]
struct Facts {
    /// Share of the prompt.
    cached: f64,
    requests: u32,
    /// Tokens to compute, without the request.
    queue: f64,
    /// Share of the KV memory.
    used: f64,
    /// Order of equal ranks.
    key: u64,
}

impl Rule {
    /// The rule with this name on a command line.
    pub(crate) fn named(name: &str) -> Option<Self> {
        let rules = [("smg", Self::Smg), ("llm_d", Self::LlmD), ("sticky", Self::Sticky)];
        rules.into_iter().find(|(known, _)| *known == name).map(|(_, rule)| rule)
    }

    /// Index of the chosen rank.
    fn of(self, prompt_tokens: f64, ranks: &[Facts]) -> Option<usize> {
        let least = |queues: &mut dyn Iterator<Item = f64>| queues.fold(f64::INFINITY, f64::min);
        match self {
            Self::Smg => {
                let mean = ranks.iter().map(|rank| f64::from(rank.requests)).sum::<f64>() / ranks.len() as f64;
                let is_even = |load: f64| load <= 1.5 * mean || load <= mean + 64.0;
                let longest = best(ranks, |rank| (rank.cached > 0.0).then_some((rank.cached, Reverse(rank.requests))));
                let followed = longest.filter(|index| is_even(ranks[*index].requests.into()));
                followed.or_else(|| best(ranks, |rank| Some(Reverse(rank.requests))))
            }
            Self::LlmD => {
                let least = least(&mut ranks.iter().map(|rank| rank.queue));
                let range = ranks.iter().map(|rank| rank.queue - least).fold(1.0, f64::max);
                let queue = |rank: &Facts| 1.0 - (rank.queue - least) / range;
                best(ranks, |rank| Some(3.0 * rank.cached + 2.0 * queue(rank) + 2.0 * (1.0 - rank.used)))
            }
            Self::Sticky => {
                let is_warm = |rank: &Facts| rank.cached >= 0.8;
                let queue = |warm| least(&mut ranks.iter().filter(|rank| is_warm(rank) == warm).map(|rank| rank.queue));
                let is_sticky = queue(true).is_finite() && queue(true) <= queue(false) + 18.0 * 15_928.0;
                let uncached = |rank: &Facts| rank.queue + (1.0 - rank.cached) * prompt_tokens;
                best(ranks, |rank| (!is_sticky || is_warm(rank)).then(|| -uncached(rank)))
            }
        }
    }
}

/// Index of the highest score.
fn best<S: PartialOrd>(ranks: &[Facts], score: impl Fn(&Facts) -> Option<S>) -> Option<usize> {
    let scores = ranks.iter().enumerate().filter_map(|(index, rank)| Some((index, (score(rank)?, rank.key))));
    scores.reduce(|best, other| if other.1 > best.1 { other } else { best }).map(|(index, _)| index)
}

impl RankPolicy for Rule {
    fn choose(&self, request: &RequestFacts<'_>, ranks: &dyn RankTable) -> Option<usize> {
        let prompt_tokens = f64::from(request.prompt_tokens.max(1));
        let facts = |index| {
            let rank = ranks.candidate(index);
            let cached_tokens = f64::from(rank.overlap.total_blocks() * request.block_size);
            Facts {
                cached: (cached_tokens / prompt_tokens).min(1.0),
                requests: rank.active_requests,
                queue: rank.prefill_tokens as f64,
                used: rank.total_kv_blocks.map_or(0.5, |all| rank.potential_blocks as f64 / f64::from(all)).min(1.0),
                key: request.random_key(rank.rank),
            }
        };
        self.of(prompt_tokens, &(0..ranks.len()).map(facts).collect::<Vec<_>>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The chosen one of ranks with these shares of a prompt of 1,000 tokens, requests, tokens to compute, and shares of the
    /// memory.
    fn chosen(rule: Rule, ranks: &[(f64, u32, f64, f64)]) -> usize {
        let facts = |&(cached, requests, queue, used): &_| Facts { cached, requests, queue, used, key: 1 };
        rule.of(1_000.0, &ranks.iter().map(facts).collect::<Vec<_>>()).expect("ranks")
    }

    #[test]
    fn smg_follows_the_longest_match_up_to_its_thresholds() {
        let with =
            |n| chosen(Rule::Smg, &[(0.1, 9, 0.0, 0.0), (0.2, n, 0.0, 0.0), (0.2, 200, 0.0, 0.0), (0.0, 1, 0.0, 0.0)]);
        assert_eq!((with(190), with(4)), (3, 1), "64 more than the mean, and the match with fewer requests");
        assert_eq!(chosen(Rule::Smg, &[(0.0, 3, 0.0, 0.0), (0.0, 2, 0.0, 0.0)]), 1, "no match");
    }

    #[test]
    fn llm_d_weighs_three_scores() {
        let second = |cached, queue, used| chosen(Rule::LlmD, &[(0.0, 0, 0.0, 0.0), (cached, 0, queue, used)]) == 1;
        assert!(second(0.7, 9.0, 0.0) && !second(0.6, 9.0, 0.0), "a full queue is two thirds of a match");
        assert!(second(0.4, 0.0, 0.5) && !second(0.3, 0.0, 0.5), "half of the memory is one third");
    }

    #[test]
    fn sticky_leaves_a_match_that_is_saturated_only() {
        let ranks = |queue| chosen(Rule::Sticky, &[(0.8, 0, queue, 0.0), (0.79, 0, 0.0, 0.0)]);
        assert_eq!((ranks(286_000.0), ranks(287_000.0)), (0, 1), "18 s of 15,928 tokens");
        assert_eq!(chosen(Rule::Sticky, &[(0.8, 0, 500.0, 0.0), (0.9, 0, 350.0, 0.0), (0.85, 0, 410.0, 0.0)]), 1);
        assert_eq!(chosen(Rule::Sticky, &[(0.1, 0, 50.0, 0.0), (0.0, 0, 0.0, 0.0)]), 0, "950 of 1,000 tokens");
    }
}
