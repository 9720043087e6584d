//! Unique prompts without a common prefix: classification, translation, or summaries of new texts. Caches do not help.

use super::settings::{Checked, assert_checked, check_lengths, check_rate, check_requests, settings};
use super::sources::{Arrival, Texts};
use super::{Span, workload};
use crate::workload::{Arrivals, Request, Rng, Workload};

settings! {
    /// Settings of the unique workload.
    pub struct Unique {
        /// Requests per second. 10.
        pub rate: f64 = 10.0,
        /// Number of requests. 4000.
        pub requests: u32 = 4_000,
        /// Length of a prompt. 200-8000.
        pub own_tokens: Span = (200..=8_000).into(),
        /// Length of an answer. 50-400.
        pub output_tokens: Span = (50..=400).into(),
    }
}

impl Unique {
    pub(super) fn check(&self) -> Checked {
        check_rate(self.rate)?;
        check_requests("requests", &[self.requests])?;
        check_lengths(&[("output_tokens", self.output_tokens, 1)], 1)?;
        check_lengths(&[("own_tokens", self.own_tokens, 1)], 1)
    }

    /// Generates the workload for `seed`.
    ///
    /// # Panics
    /// A setting is out of its bounds.
    #[must_use]
    pub fn generate(&self, seed: u64) -> Workload {
        assert_checked(self.check());
        let (mut rng, mut texts) = (Rng::stream(seed, 0), Texts::new(seed, "unique"));
        let mut arrival = Arrival::at_rate(self.rate);
        let request = |_| Request {
            arrival_us: arrival.next_us(&mut rng),
            prompt: vec![texts.fresh(self.own_tokens.draw(&mut rng))],
            output_tokens: self.output_tokens.draw(&mut rng),
            session: None,
        };
        workload("unique", (0..self.requests).map(request).collect(), Arrivals::OpenLoop)
    }
}
