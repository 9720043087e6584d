//! Agent programs: each call follows the end of its predecessor after a gap, so that a slow fleet delays all later calls.
//!
//! Lengths and gaps are log-normal fits to traces of coding agents (TraceLab, Weka's Claude Code traces). All programs of
//! one agent version share its tools and system prompt. Programs end without notice.
//!
//! - **Start**: 60 % start with a prompt of 8,000 tokens (median) after the head, the others resume one of 80,000 to
//!   150,000.
//! - **Growth**: 646 tokens per call (median), of which 223 are output.
//! - **Gap** after tool calls: 1/6 to 4/3 of `gap_ms`, and the tools with a median of a tenth and a long tail, at most
//!   600 s. After a stop: 86 s (median). The program ends at 5 % of the stops.
//! - **Compaction** at 160,000 to 200,000 tokens: a call writes a summary, which replaces all after the head.
//! - **Subagents**: at one call the parent waits for 1 to 4 children, one after the other or all at once, with 5 to 17
//!   calls each and the system prompt alone as head.

use std::num::NonZeroU32;

use super::settings::{Checked, assert_checked, check_count, check_rate, check_requests, settings};
use super::sources::{Arrival, Texts};
use super::workload;
use crate::workload::rng::exp;
use crate::workload::{Arrivals, Link, Request, Rng, Segment, Workload};

/// Maximum number of calls of an agent.
const CALLS_MAX: f64 = 1_000.0;

settings! {
    /// Settings of the programs workload.
    pub struct Programs {
        /// Programs started per second, unless `concurrency` is given. 0.05.
        pub rate: f64 = 0.05,
        /// Live programs of a closed loop; 0: an open loop. 0.
        pub concurrency: u32 = 0,
        /// Number of programs. 100.
        pub programs: u32 = 100,
        /// Median number of calls of the first agent of a program. 42.
        pub calls: u32 = 42,
        /// Median of gaps after tool calls in ms. 3000.
        pub gap_ms: u32 = 3_000,
        /// Share of answers that end a turn, in percent. 11.
        pub stop_percent: u32 = 11,
        /// Share of programs with subagents, in percent. 10.
        pub subagents_percent: u32 = 10,
        /// Number of agent versions. 3.
        pub versions: u32 = 3,
        /// Factor of all lengths, for runs with fewer tokens on equally smaller and slower engines. 1.
        pub scale: f64 = 1.0,
    }
}

/// Calls generated so far.
struct Made<'a> {
    of: &'a Programs,
    rng: Rng,
    texts: Texts,
    requests: Vec<Request>,
    links: Vec<Link>,
    agents: u64,
}

impl Programs {
    pub(super) fn check(&self) -> Checked {
        check_rate(self.rate)?;
        check_count("versions", self.versions)?;
        check_count("calls", self.calls)?;
        check_requests("programs and calls", &[self.programs, 200])?;
        for (name, percent) in [("stop_percent", self.stop_percent), ("subagents_percent", self.subagents_percent)] {
            if percent > 100 {
                return Err(format!("{name} is {percent}, must be at most 100"));
            }
        }
        if (0.01..=10.0).contains(&self.scale) {
            Ok(())
        } else {
            Err(format!("scale is {}, must be 0.01 to 10", self.scale))
        }
    }

    /// Generates the workload for `seed`.
    ///
    /// # Panics
    /// A setting is out of its bounds.
    #[must_use]
    pub fn generate(&self, seed: u64) -> Workload {
        assert_checked(self.check());
        let (rng, mut texts) = (Rng::stream(seed, 0), Texts::new(seed, "programs"));
        let length = |tokens: f64| self.length(tokens);
        let heads: Vec<_> =
            (0..self.versions).map(|_| [3_000.0, 12_000.0].map(|tokens| texts.fresh(length(tokens)))).collect();
        let mut started = Arrival::at_rate(self.rate);
        let mut made = Made { of: self, rng, texts, requests: Vec::new(), links: Vec::new(), agents: 0 };
        for program in 0..self.programs {
            let arrival_us = started.next_us(&mut made.rng);
            let head = &heads[made.rng.below(self.versions) as usize];
            let calls = made.rng.log_normal(self.calls.into(), 0.96).clamp(1.0, CALLS_MAX) as u32;
            let own = match made.rng.below(10) {
                0..6 => made.rng.log_normal(8_000.0, 1.0),
                _ => 80_000.0 * exp(made.rng.share() * 0.6286),
            };
            let first = Link { program, ..Link::default() };
            made.agent(arrival_us, head, own.min(150_000.0), calls, first);
        }
        let Made { requests, links, .. } = made;
        let mut workload = workload("programs", requests, Arrivals::OpenLoop);
        workload.arrivals = Arrivals::Causal { links, programs: NonZeroU32::new(self.concurrency) };
        workload
    }

    fn length(&self, tokens: f64) -> u32 {
        (tokens * self.scale).max(1.0) as u32
    }
}

impl Made<'_> {
    /// Appends the calls of an agent, the first of them with `link`, and returns the position of the last one.
    fn agent(&mut self, arrival_us: u64, head: &[Segment], own: f64, calls: u32, mut link: Link) -> u32 {
        let session = self.agents;
        self.agents += 1;
        let (program, is_main) = (link.program, head.len() > 1);
        let mut prompt = head.to_vec();
        prompt.push(self.texts.fresh(self.of.length(own)));
        let has_children = is_main && self.rng.below(100) < self.of.subagents_percent;
        let children_at = has_children.then(|| self.rng.below(calls));
        let mut last = 0;
        for call in 0..calls {
            let tokens: u32 = prompt.iter().map(|segment| segment.tokens).sum();
            let is_full = tokens > self.of.length(160_000.0 + f64::from(self.rng.below(40_000)));
            let summary = 2_000.0 + f64::from(self.rng.below(6_000));
            let output = if is_full { summary } else { self.rng.log_normal(223.0, 1.11).min(8_000.0) };
            let output_tokens = self.of.length(output);
            let is_stop = is_main && self.rng.below(100) < self.of.stop_percent;
            last = self.requests.len() as u32;
            self.requests.push(Request { arrival_us, prompt: prompt.clone(), output_tokens, session: Some(session) });
            self.links.push(Link { is_stop, ..link });
            let mut after = vec![last];
            if children_at == Some(call) {
                let (children, is_parallel) = (1 + self.rng.below(4), self.rng.below(2) == 0);
                let mut ends = Vec::new();
                for _ in 0..children {
                    let (own, calls) = (self.rng.log_normal(2_000.0, 1.0), self.rng.within(5..=17));
                    let before = if is_parallel { last } else { ends.last().copied().unwrap_or(last) };
                    let first = Link { program, after: vec![before], ..Link::default() };
                    ends.push(self.agent(arrival_us, &head[..1], own, calls, first));
                }
                after = ends;
            } else if is_stop && self.rng.below(20) == 0 {
                break;
            }
            if is_full {
                prompt.truncate(head.len());
            }
            let grown = output.max(self.rng.log_normal(646.0, 1.26).min(32_000.0));
            prompt.push(self.texts.fresh(self.of.length(if is_full { output } else { grown })));
            link = Link { program, after, gap_us: self.gap_us(is_stop), is_stop: false };
        }
        last
    }

    fn gap_us(&mut self, is_stop: bool) -> u64 {
        let gap_s = f64::from(self.of.gap_ms) / 1e3;
        let client_s = gap_s * (1.0 / 6.0 + 7.0 / 6.0 * self.rng.share());
        let rest_s =
            if is_stop { self.rng.log_normal(86.0, 2.1) } else { self.rng.log_normal(gap_s / 10.0, 3.0).min(600.0) };
        ((client_s + rest_s) * 1e6) as u64
    }
}
