//! Agents: tool-calling loops whose context grows with each call and each result.
//!
//! All agents of a kind share instructions and tool descriptions. Agents start independently of each other. A step
//! follows its predecessor after an estimated answer time and the tool's duration, both fixed in advance.

use super::settings::{Checked, assert_checked, check_count, check_lengths, check_rate, check_requests, settings};
use super::sources::{Arrival, Texts};
use super::{Span, workload};
use crate::workload::{Arrivals, Request, Rng, Workload};

settings! {
    /// Settings of the agents workload.
    pub struct Agents {
        /// Mean requests per second while agents start. Agents start at this rate divided by the mean of `turns`. 8.
        pub rate: f64 = 8.0,
        /// Number of agents. 150.
        pub agents: u32 = 150,
        /// Maximum number of steps per agent. 8-32.
        pub turns: Span = (8..=32).into(),
        /// Number of agent kinds, drawn uniformly. 6.
        pub prefixes: u32 = 6,
        /// Length of a kind's instructions. 3000-8000.
        pub prefix_tokens: Span = (3_000..=8_000).into(),
        /// Length of an agent's task. 100-2000.
        pub own_tokens: Span = (100..=2_000).into(),
        /// Length of an answer, usually a tool call. 30-250.
        pub reply_tokens: Span = (30..=250).into(),
        /// Length of a tool's result. 50-2500.
        pub tool_tokens: Span = (50..=2_500).into(),
        /// Duration of a tool call in ms. 200-8000.
        pub tool_ms: Span = (200..=8_000).into(),
        /// Maximum context length in tokens, at which an agent stops. 100000.
        pub context_tokens_max: u32 = 100_000,
        /// Estimated time to an answer's first token in ms. 300.
        pub first_token_ms: u32 = 300,
        /// Estimated time per answer token in ms. 10.
        pub token_ms: u32 = 10,
    }
}

impl Agents {
    pub(super) fn check(&self) -> Checked {
        let Self { agents, turns, prefixes, prefix_tokens, own_tokens, reply_tokens, tool_tokens, .. } = *self;
        check_rate(self.rate)?;
        check_requests("agents and turns", &[agents, turns.max()])?;
        check_count("turns", turns.min())?;
        check_count("prefixes", prefixes)?;
        let of_turn = [("reply_tokens", reply_tokens, turns.max()), ("tool_tokens", tool_tokens, turns.max())];
        check_lengths(&[("prefix_tokens", prefix_tokens, 1), ("own_tokens", own_tokens, 1), of_turn[0], of_turn[1]], 1)
    }

    /// Generates the workload for `seed`.
    ///
    /// # Panics
    /// A setting is out of its bounds.
    #[must_use]
    pub fn generate(&self, seed: u64) -> Workload {
        assert_checked(self.check());
        let (mut rng, mut texts) = (Rng::stream(seed, 0), Texts::new(seed, "agents"));
        let kinds: Vec<_> = (0..self.prefixes).map(|_| texts.fresh(self.prefix_tokens.draw(&mut rng))).collect();
        let mut started = Arrival::at_rate(self.rate / self.turns.mean());
        let mut requests = Vec::new();
        for session in 0..u64::from(self.agents) {
            let mut arrival_us = started.next_us(&mut rng);
            let kind = kinds[rng.below(self.prefixes) as usize];
            let mut context = vec![kind, texts.fresh(self.own_tokens.draw(&mut rng))];
            let mut context_tokens = kind.tokens + context[1].tokens;
            for _ in 0..self.turns.draw(&mut rng) {
                let output_tokens = self.reply_tokens.draw(&mut rng);
                requests.push(Request { arrival_us, prompt: context.clone(), output_tokens, session: Some(session) });
                let result_tokens = self.tool_tokens.draw(&mut rng);
                let answer_ms = u64::from(self.first_token_ms) + u64::from(self.token_ms) * u64::from(output_tokens);
                arrival_us += 1_000 * (answer_ms + u64::from(self.tool_ms.draw(&mut rng)));
                context.extend([texts.fresh(output_tokens), texts.fresh(result_tokens)]);
                context_tokens += output_tokens + result_tokens;
                if context_tokens > self.context_tokens_max {
                    break;
                }
            }
        }
        workload("agents", requests, Arrivals::OpenLoop)
    }
}
