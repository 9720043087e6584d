//! Multi-turn chats with think times, over shared system prompts.
//!
//! The prompt of a turn is the whole previous conversation, including replies, and a new question. Conversations start
//! independently of each other. A turn follows its predecessor after an estimated answer time and a think time. Both
//! are fixed in advance, so a slow fleet receives requests at the same rate.

use super::settings::{
    Checked, assert_checked, check_count, check_lengths, check_rate, check_requests, check_skew, settings,
};
use super::sources::{Arrival, Popularity, Texts};
use super::{Span, workload};
use crate::workload::{Arrivals, Request, Rng, Workload};

settings! {
    /// Settings of the chat workload.
    pub struct Chat {
        /// Mean requests per second while conversations start. Conversations start at this rate divided by the mean of
        /// `turns`. 4.
        pub rate: f64 = 4.0,
        /// Number of conversations. 400.
        pub sessions: u32 = 400,
        /// Turns per conversation. 1-9.
        pub turns: Span = (1..=9).into(),
        /// Number of system prompts. 16.
        pub prefixes: u32 = 16,
        /// Popularity skew of the system prompts: 0 uniform, 1 Zipf's law, 2 steeper. 1.
        pub skew: u32 = 1,
        /// Length of a system prompt. 512-4096.
        pub prefix_tokens: Span = (512..=4_096).into(),
        /// Length of a question. 32-1536.
        pub own_tokens: Span = (32..=1_536).into(),
        /// Length of a reply. 32-768.
        pub reply_tokens: Span = (32..=768).into(),
        /// Think time in ms from the estimated end of a reply to the next question. 2000-30000.
        pub think_ms: Span = (2_000..=30_000).into(),
        /// Estimated time to a reply's first token in ms. 500.
        pub first_token_ms: u32 = 500,
        /// Estimated time per reply token in ms. 10.
        pub token_ms: u32 = 10,
    }
}

impl Chat {
    /// Settings of the low workload: one request per second and fewer conversations.
    pub(super) fn low() -> Self {
        Self { rate: 1.0, sessions: 200, ..Self::default() }
    }

    pub(super) fn check(&self) -> Checked {
        let Self { sessions, turns, prefixes, skew, prefix_tokens, own_tokens, reply_tokens, .. } = *self;
        check_rate(self.rate)?;
        check_requests("sessions and turns", &[sessions, turns.max()])?;
        check_count("turns", turns.min())?;
        check_count("prefixes", prefixes)?;
        check_skew(skew)?;
        let of_turn = [("own_tokens", own_tokens, turns.max()), ("reply_tokens", reply_tokens, turns.max())];
        check_lengths(&[("prefix_tokens", prefix_tokens, 1), of_turn[0], of_turn[1]], 1)
    }

    /// Generates the workload for `seed`.
    ///
    /// # Panics
    /// A setting is out of its bounds.
    #[must_use]
    pub fn generate(&self, seed: u64) -> Workload {
        assert_checked(self.check());
        let (mut rng, mut texts) = (Rng::stream(seed, 0), Texts::new(seed, "chat"));
        let systems: Vec<_> = (0..self.prefixes).map(|_| texts.fresh(self.prefix_tokens.draw(&mut rng))).collect();
        let popularity = Popularity::new(self.prefixes, self.skew);
        let mut opened = Arrival::at_rate(self.rate / self.turns.mean());
        let mut requests = Vec::new();
        for session in 0..u64::from(self.sessions) {
            let mut arrival_us = opened.next_us(&mut rng);
            let mut segments = vec![systems[popularity.draw(&mut rng)]];
            for _ in 0..self.turns.draw(&mut rng) {
                segments.push(texts.fresh(self.own_tokens.draw(&mut rng)));
                let output_tokens = self.reply_tokens.draw(&mut rng);
                requests.push(Request { arrival_us, prompt: segments.clone(), output_tokens, session: Some(session) });
                segments.push(texts.fresh(output_tokens));
                let answer_ms = u64::from(self.first_token_ms) + u64::from(self.token_ms) * u64::from(output_tokens);
                arrival_us += 1_000 * (answer_ms + u64::from(self.think_ms.draw(&mut rng)));
            }
        }
        workload("chat", requests, Arrivals::OpenLoop)
    }
}
