//! First router benchmark of NVIDIA Dynamo: a closed loop over ten prefixes of half the input length.
//!
//! The original script (`benchmarks/router/prefix_ratio_benchmark.py` of <https://github.com/ai-dynamo/dynamo>) keeps a
//! fixed number of requests in flight, so the arrivals of this workload are a [concurrency](Arrivals::Concurrency). The
//! script draws lengths from a normal distribution with a standard deviation of a quarter of the mean, or fixes them.
//! This generator draws them uniformly from the mean ± `vary`; 0.43 gives the same standard deviation.

use std::num::NonZeroU32;

use super::settings::{Checked, assert_checked, check_count, check_lengths, check_requests, settings};
use super::sources::Texts;
use super::{Span, workload};
use crate::workload::{Arrivals, Request, Rng, Workload};

settings! {
    /// Settings of the peer-first workload.
    pub struct PeerFirst {
        /// Number of requests in flight. 20.
        pub concurrency: NonZeroU32 = NonZeroU32::new(20).expect("not 0"),
        /// Number of requests. 1000.
        pub requests: u32 = 1_000,
        /// Number of shared prefixes, drawn uniformly. 10.
        pub prefixes: u32 = 10,
        /// Length of a prompt. 7000.
        pub input_tokens: u32 = 7_000,
        /// Length of an answer. 100.
        pub output_tokens: u32 = 100,
        /// Share of the prefix in the mean length of a prompt. 0.5.
        pub prefix_share: f64 = 0.5,
        /// Maximum deviation of a length from its mean, as a share of the mean. Applies to the unique suffix of a prompt
        /// and to answers. 0: fixed lengths.
        pub vary: f64 = 0.0,
    }
}

impl PeerFirst {
    pub(super) fn check(&self) -> Checked {
        let Self { requests, prefixes, input_tokens, output_tokens, prefix_share, vary, .. } = *self;
        check_requests("requests", &[requests])?;
        check_count("prefixes", prefixes)?;
        check_lengths(&[("input_tokens", input_tokens.into(), 2)], 1)?;
        check_lengths(&[("output_tokens", output_tokens.into(), 2)], 1)?;
        if !(0.0..=1.0).contains(&prefix_share) || !(0.0..1.0).contains(&vary) || prefix_share + vary > 1.0 {
            return Err(format!("prefix_share {prefix_share} and vary {vary} leave no prompt longer than its prefix"));
        }
        Ok(())
    }

    /// Generates the workload for `seed`.
    ///
    /// # Panics
    /// A setting is out of its bounds.
    #[must_use]
    pub fn generate(&self, seed: u64) -> Workload {
        assert_checked(self.check());
        let (mut rng, mut texts) = (Rng::stream(seed, 0), Texts::new(seed, "peer-first"));
        let share = |tokens: u32, share: f64| (f64::from(tokens) * share).round() as u32;
        let varied = |tokens| {
            let by = share(tokens, self.vary);
            Span::from(tokens - by..=tokens + by)
        };
        let (inputs, outputs) = (varied(self.input_tokens), varied(self.output_tokens));
        let prefix_tokens = share(self.input_tokens, self.prefix_share);
        let shared: Vec<_> = (0..self.prefixes).map(|_| texts.fresh(prefix_tokens)).collect();
        let request = |_| {
            let prefix = shared[rng.below(self.prefixes) as usize];
            let own = texts.fresh(inputs.draw(&mut rng).saturating_sub(prefix_tokens));
            Request {
                arrival_us: 0,
                prompt: [prefix, own].into_iter().filter(|segment| segment.tokens > 0).collect(),
                output_tokens: outputs.draw(&mut rng).max(1),
                session: None,
            }
        };
        let requests = (0..self.requests).map(request).collect();
        workload("peer-first", requests, Arrivals::Concurrency(self.concurrency))
    }
}
