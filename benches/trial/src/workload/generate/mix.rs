//! Mix of chats, agents, documents, shared prompts and unique prompts, each at a fifth of the rate, as in a fleet that
//! serves several applications.
//!
//! The applications have their own default settings, except rate and size. They start together and end at different
//! times, so a run has a tail with fewer of them.

use super::settings::{Checked, assert_checked, check_rate, settings};
use super::{Agents, Chat, Documents, SharedPrefix, Unique, workload};
use crate::workload::{Arrivals, REQUESTS_MAX, Workload};

/// Number of applications.
const PARTS: u32 = 5;

settings! {
    /// Settings of the mix workload.
    pub struct Mix {
        /// Mean requests per second. 8.
        pub rate: f64 = 8.0,
        /// Expected number of requests; conversations have random lengths. 4000.
        pub requests: u32 = 4_000,
    }
}

impl Mix {
    pub(super) fn check(&self) -> Checked {
        check_rate(self.rate)?;
        check_rate(self.rate / f64::from(PARTS))?;
        // A quarter of the general maximum, because random lengths exceed their mean.
        let max = REQUESTS_MAX / 4;
        if (PARTS as usize..=max).contains(&(self.requests as usize)) {
            return Ok(());
        }
        Err(format!("requests is {}, must be {PARTS} to {max}", self.requests))
    }

    /// Generates the workload for `seed`.
    ///
    /// # Panics
    /// A setting is out of its bounds.
    #[must_use]
    pub fn generate(&self, seed: u64) -> Workload {
        assert_checked(self.check());
        let (rate, requests) = (self.rate / f64::from(PARTS), self.requests / PARTS);
        let (chat, agents, documents) = (Chat::default(), Agents::default(), Documents::default());
        let groups = |mean: f64| ((f64::from(requests) / mean) as u32).max(1);
        let parts = [
            Chat { rate, sessions: groups(chat.turns.mean()), ..chat }.generate(seed),
            Agents { rate, agents: groups(agents.turns.mean()), ..agents }.generate(seed),
            Documents { rate, readings: groups(documents.questions.mean()), ..documents }.generate(seed),
            SharedPrefix { rate, requests, ..SharedPrefix::default() }.generate(seed),
            Unique { rate, requests, ..Unique::default() }.generate(seed),
        ];
        let mut all = Vec::new();
        for (part, of) in (0_u64..).zip(parts) {
            all.extend(of.requests.into_iter().map(|mut request| {
                request.session = request.session.map(|session| session * u64::from(PARTS) + part);
                request
            }));
        }
        workload("mix", all, Arrivals::OpenLoop)
    }
}
