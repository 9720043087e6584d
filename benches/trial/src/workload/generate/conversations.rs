//! Interleaved multi-turn conversations over shared system prompts, for closed loops.
//!
//! 256 conversations are active at any time. Each request belongs to a random one: its prompt is the whole conversation
//! so far and a new user message; the reply then becomes part of the conversation. A few system prompts serve most
//! conversations. The workload therefore contains both kinds of prefix reuse: within a conversation, and across
//! conversations.
//!
//! There are no think times: requests arrive in a Poisson process, independently of their conversation. Use
//! [`super::Chat`] if times matter. The tokens of a seed must not change, because published measurements used these
//! prompts.

use std::ops::RangeInclusive;

use super::settings::{Checked, assert_checked, check_rate, check_requests, settings};
use super::sources::Arrival;
use super::workload;
use crate::workload::{Arrivals, Request, Rng, Segment, Workload, mix};

/// Number of active conversations.
const LIVE: u32 = 256;
/// Number of distinct system prompts; low numbers are drawn more often.
const SYSTEM_PROMPTS: u32 = 32;
const SYSTEM_TOKENS: RangeInclusive<u32> = 512..=4_096;
const TURNS: RangeInclusive<u32> = 1..=12;
const USER_TOKENS: RangeInclusive<u32> = 32..=1_536;
const REPLY_TOKENS: RangeInclusive<u32> = 32..=768;

settings! {
    /// Settings of the conversations workload.
    pub struct Conversations {
        /// Requests per second. 4.
        pub rate: f64 = 4.0,
        /// Number of requests. 4000.
        pub requests: u32 = 4_000,
    }
}

struct Conversation {
    session: u64,
    segments: Vec<Segment>,
    turns_left: u32,
}

impl Conversations {
    pub(super) fn check(&self) -> Checked {
        check_rate(self.rate)?;
        check_requests("requests", &[self.requests])
    }

    /// Generates the workload for `seed`. A smaller number of requests gives a prefix of the same requests.
    ///
    /// # Panics
    /// A setting is out of its bounds.
    #[must_use]
    pub fn generate(&self, seed: u64) -> Workload {
        assert_checked(self.check());
        let mut source = Source { rng: Rng::new(seed), next_text: mix(seed), opened: 0 };
        let mut live: Vec<Conversation> = (0..LIVE).map(|_| source.conversation(seed)).collect();
        let (mut arrival, mut gaps) = (Arrival::at_rate(self.rate), Rng::stream(seed, 0));
        let request = |_| {
            let conversation = &mut live[source.rng.below(LIVE) as usize];
            source.append(conversation, USER_TOKENS);
            let (prompt, session) = (conversation.segments.clone(), Some(conversation.session));
            let output_tokens = source.append(conversation, REPLY_TOKENS);
            conversation.turns_left -= 1;
            if conversation.turns_left == 0 {
                *conversation = source.conversation(seed);
            }
            Request { arrival_us: arrival.next_us(&mut gaps), prompt, output_tokens, session }
        };
        workload("conversations", (0..self.requests).map(request).collect(), Arrivals::OpenLoop)
    }
}

struct Source {
    rng: Rng,
    /// Id of the next new text.
    next_text: u64,
    opened: u64,
}

impl Source {
    /// Starts a conversation that contains only its system prompt.
    fn conversation(&mut self, seed: u64) -> Conversation {
        let prompt = self.rng.below(SYSTEM_PROMPTS).min(self.rng.below(SYSTEM_PROMPTS));
        let id = mix(seed ^ u64::from(prompt)).wrapping_add(1);
        self.opened += 1;
        let segments = vec![Segment { id, tokens: Rng::new(id).within(SYSTEM_TOKENS) }];
        Conversation { session: self.opened, segments, turns_left: self.rng.within(TURNS) }
    }

    /// Appends a new text with a random length and returns the length.
    fn append(&mut self, conversation: &mut Conversation, length: RangeInclusive<u32>) -> u32 {
        self.next_text = self.next_text.wrapping_add(1);
        let tokens = self.rng.within(length);
        conversation.segments.push(Segment { id: self.next_text, tokens });
        tokens
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_match_those_of_published_measurements() {
        for (requests, seed, tokens, hash) in
            [(300, 1, 1_135_203, 0x24d5_6701_ea22_e538), (800, 3, 3_680_627, 0xf2e7_9763_e76e_3112_u64)]
        {
            let prompts = Conversations { requests, ..Conversations::default() }.generate(seed).prompts();
            assert_eq!(prompts.iter().map(|prompt| prompt.len()).sum::<usize>(), tokens);
            let folded = prompts.iter().fold(0, |hash, prompt| {
                let start = mix(hash ^ prompt.len() as u64);
                prompt.iter().fold(start, |hash, &token| mix(hash.wrapping_add(u64::from(token))))
            });
            assert_eq!(folded, hash);
        }
    }
}
