//! Burst: simultaneous requests, as after the start of a fleet or a reconnect of all clients.

use super::settings::{Checked, assert_checked, check_count, check_lengths, check_requests, settings};
use super::sources::Texts;
use super::{Span, workload};
use crate::workload::{Arrivals, Request, Rng, Workload};

settings! {
    /// Settings of the burst workload: all requests arrive at time 0.
    pub struct Burst {
        /// Number of requests. 1000.
        pub requests: u32 = 1_000,
        /// Number of shared prefixes, drawn uniformly. 50.
        pub prefixes: u32 = 50,
        /// Length of a shared prefix. 4096.
        pub prefix_tokens: Span = 4_096.into(),
        /// Length of each request's unique suffix. 512.
        pub own_tokens: Span = 512.into(),
        /// Length of an answer. 100.
        pub output_tokens: Span = 100.into(),
    }
}

impl Burst {
    pub(super) fn check(&self) -> Checked {
        let Self { requests, prefixes, prefix_tokens, own_tokens, output_tokens } = *self;
        check_requests("requests", &[requests])?;
        check_count("prefixes", prefixes)?;
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
        let (mut rng, mut texts) = (Rng::stream(seed, 0), Texts::new(seed, "burst"));
        let shared: Vec<_> = (0..self.prefixes).map(|_| texts.fresh(self.prefix_tokens.draw(&mut rng))).collect();
        let request = |_| Request {
            arrival_us: 0,
            prompt: vec![shared[rng.below(self.prefixes) as usize], texts.fresh(self.own_tokens.draw(&mut rng))],
            output_tokens: self.output_tokens.draw(&mut rng),
            session: None,
        };
        workload("burst", (0..self.requests).map(request).collect(), Arrivals::OpenLoop)
    }
}
