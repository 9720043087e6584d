//! Single questions over a few long shared prompts: applications with one system prompt each, or documents that many
//! users query.

use super::settings::{
    Checked, assert_checked, check_count, check_lengths, check_rate, check_requests, check_skew, settings,
};
use super::sources::{Arrival, Popularity, Texts};
use super::{Span, workload};
use crate::workload::{Arrivals, Request, Rng, Workload};

settings! {
    /// Settings of the shared-prefix workload.
    pub struct SharedPrefix {
        /// Requests per second. 10.
        pub rate: f64 = 10.0,
        /// Number of requests. 4000.
        pub requests: u32 = 4_000,
        /// Number of shared prompts. 40.
        pub prefixes: u32 = 40,
        /// Popularity skew of the shared prompts: 0 uniform, 1 Zipf's law, 2 steeper. 1.
        pub skew: u32 = 1,
        /// Length of a shared prompt. 2000-8000.
        pub prefix_tokens: Span = (2_000..=8_000).into(),
        /// Length of a question. 50-800.
        pub own_tokens: Span = (50..=800).into(),
        /// Length of an answer. 50-400.
        pub output_tokens: Span = (50..=400).into(),
    }
}

impl SharedPrefix {
    pub(super) fn check(&self) -> Checked {
        let Self { requests, prefixes, skew, prefix_tokens, own_tokens, output_tokens, .. } = *self;
        check_rate(self.rate)?;
        check_requests("requests", &[requests])?;
        check_count("prefixes", prefixes)?;
        check_skew(skew)?;
        check_lengths(&[("output_tokens", output_tokens, 1)], 1)?;
        check_lengths(&[("prefix_tokens", prefix_tokens, 1), ("own_tokens", own_tokens, 1)], 1)
    }

    /// Generates the workload for `seed`.
    ///
    /// # Panics
    /// A setting is out of its bounds.
    #[must_use]
    pub fn generate(&self, seed: u64) -> Workload {
        assert_checked(self.check());
        let (mut rng, mut texts) = (Rng::stream(seed, 0), Texts::new(seed, "shared-prefix"));
        let shared: Vec<_> = (0..self.prefixes).map(|_| texts.fresh(self.prefix_tokens.draw(&mut rng))).collect();
        let popularity = Popularity::new(self.prefixes, self.skew);
        let mut arrival = Arrival::at_rate(self.rate);
        let request = |_| Request {
            arrival_us: arrival.next_us(&mut rng),
            prompt: vec![shared[popularity.draw(&mut rng)], texts.fresh(self.own_tokens.draw(&mut rng))],
            output_tokens: self.output_tokens.draw(&mut rng),
            session: None,
        };
        workload("shared-prefix", (0..self.requests).map(request).collect(), Arrivals::OpenLoop)
    }
}
