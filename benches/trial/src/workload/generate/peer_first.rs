//! The benchmark that NVIDIA Dynamo measures its router by first: a closed loop over ten prefixes of half the input.
//!
//! Its script (`benchmarks/router/prefix_ratio_benchmark.py` of <https://github.com/ai-dynamo/dynamo>) keeps a number of
//! requests in flight, so this workload's arrivals are a [concurrency](Arrivals::Concurrency). Its lengths are drawn from
//! a normal distribution with a quarter of the mean as deviation, or fixed; here they are drawn evenly, `vary` to either
//! side, and 0.43 gives that deviation.

use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};

use super::settings::{Checked, assert_checked, check_count, check_lengths, check_requests};
use super::sources::Texts;
use super::{Span, workload};
use crate::workload::{Arrivals, Request, Rng, Workload};

/// Prefixes of a fixed share of the input, in a closed loop.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PeerFirst {
    /// Requests in flight. 20.
    pub concurrency: NonZeroU32,
    /// Requests. 1000.
    pub requests: u32,
    /// Shared prefixes, drawn evenly. 10.
    pub prefixes: u32,
    /// Length of a prompt. 7000.
    pub input_tokens: u32,
    /// Length of an answer. 100.
    pub output_tokens: u32,
    /// The prefix' share of the prompt's mean length. 0.5.
    pub prefix_share: f64,
    /// How far lengths lie from the mean at most, as a share of it: what a prompt adds to its prefix varies, and answers
    /// do. 0: they are fixed.
    pub vary: f64,
}

impl Default for PeerFirst {
    fn default() -> Self {
        Self {
            concurrency: NonZeroU32::new(20).expect("not 0"),
            requests: 1_000,
            prefixes: 10,
            input_tokens: 7_000,
            output_tokens: 100,
            prefix_share: 0.5,
            vary: 0.0,
        }
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
            return Err(format!("prefix_share {prefix_share} and vary {vary} leave no prompts longer than prefixes"));
        }
        Ok(())
    }

    /// The workload that `seed` fixes.
    ///
    /// # Panics
    /// A setting is outside its bounds.
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
