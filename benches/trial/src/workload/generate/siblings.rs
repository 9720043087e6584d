//! Siblings: simultaneous requests with one long common prefix, as from samplers, graders and map-reduce programs. A
//! router that tracks caches by events alone misses this reuse, because the events are too late.

use super::settings::{Checked, assert_checked, check_count, check_lengths, check_rate, check_requests, settings};
use super::sources::{Arrival, Texts};
use super::{Span, workload};
use crate::workload::{Arrivals, Request, Rng, Workload};

settings! {
    /// Settings of the siblings workload.
    pub struct Siblings {
        /// Mean requests per second. Groups arrive at this rate divided by `siblings`. 10.
        pub rate: f64 = 10.0,
        /// Number of groups. 400.
        pub groups: u32 = 400,
        /// Requests per group. 8.
        pub siblings: u32 = 8,
        /// Length of a group's unique prefix. 4000-12000.
        pub prefix_tokens: Span = (4_000..=12_000).into(),
        /// Length of each request's unique suffix. 20-400.
        pub own_tokens: Span = (20..=400).into(),
        /// Length of an answer. 50-400.
        pub output_tokens: Span = (50..=400).into(),
    }
}

impl Siblings {
    pub(super) fn check(&self) -> Checked {
        let Self { groups, siblings, prefix_tokens, own_tokens, output_tokens, .. } = *self;
        check_rate(self.rate)?;
        check_requests("groups and siblings", &[groups, siblings])?;
        check_count("siblings", siblings)?;
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
        let (mut rng, mut texts) = (Rng::stream(seed, 0), Texts::new(seed, "siblings"));
        let mut groups = Arrival::at_rate(self.rate / f64::from(self.siblings));
        let mut requests = Vec::new();
        for group in 0..u64::from(self.groups) {
            let arrival_us = groups.next_us(&mut rng);
            let prefix = texts.fresh(self.prefix_tokens.draw(&mut rng));
            requests.extend((0..self.siblings).map(|_| Request {
                arrival_us,
                prompt: vec![prefix, texts.fresh(self.own_tokens.draw(&mut rng))],
                output_tokens: self.output_tokens.draw(&mut rng),
                session: Some(group),
            }));
        }
        workload("siblings", requests, Arrivals::OpenLoop)
    }
}
