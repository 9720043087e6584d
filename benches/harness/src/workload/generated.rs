//! Invents a workload: conversations of several turns behind shared system prompts.
//!
//! At any time 256 conversations go on. Each request belongs to one drawn among them: it says all that was said
//! in that conversation so far, and a new user turn; the reply then joins what was said. Few system prompts serve most
//! conversations. So there is both kinds of reuse that a router must find: within a conversation, and across them.

use std::ops::RangeInclusive;

use super::{Prompt, append_tokens};
use ::workload::{Rng, mix};

/// Conversations that go on at once.
const LIVE: u32 = 256;
/// Distinct system prompts; low numbers are drawn more often.
const SYSTEM_PROMPTS: u32 = 32;
const SYSTEM_TOKENS: RangeInclusive<u32> = 512..=4_096;
const TURNS: RangeInclusive<u32> = 1..=12;
const USER_TOKENS: RangeInclusive<u32> = 32..=1_536;
const REPLY_TOKENS: RangeInclusive<u32> = 32..=768;

struct Conversation {
    said: Vec<u32>,
    turns_left: u32,
}

/// `count` prompts, fixed by `seed`.
#[must_use]
pub fn generate(count: usize, seed: u64) -> Vec<Prompt> {
    let mut source = Source { rng: Rng::new(seed), next_text: mix(seed) };
    let mut live: Vec<Conversation> = (0..LIVE).map(|_| source.conversation(seed)).collect();
    (0..count)
        .map(|_| {
            let conversation = &mut live[source.rng.below(LIVE) as usize];
            source.say(conversation, USER_TOKENS);
            let prompt = conversation.said.clone().into_boxed_slice();
            source.say(conversation, REPLY_TOKENS);
            conversation.turns_left -= 1;
            if conversation.turns_left == 0 {
                *conversation = source.conversation(seed);
            }
            prompt
        })
        .collect()
}

struct Source {
    rng: Rng,
    /// Name of the next text that nobody has said before.
    next_text: u64,
}

impl Source {
    /// A conversation in which only the system prompt stands.
    fn conversation(&mut self, seed: u64) -> Conversation {
        let prompt = self.rng.below(SYSTEM_PROMPTS).min(self.rng.below(SYSTEM_PROMPTS));
        let id = mix(seed ^ u64::from(prompt)).wrapping_add(1);
        let mut said = Vec::new();
        append_tokens(&mut said, id, Rng::new(id).within(SYSTEM_TOKENS) as usize);
        Conversation { said, turns_left: self.rng.within(TURNS) }
    }

    fn say(&mut self, conversation: &mut Conversation, tokens: RangeInclusive<u32>) {
        self.next_text = self.next_text.wrapping_add(1);
        append_tokens(&mut conversation.said, self.next_text, self.rng.within(tokens) as usize);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_fixes_the_workload() {
        let first = generate(300, 1);
        assert_eq!(first, generate(300, 1));
        assert_eq!(first[..200], generate(200, 1));
        assert_ne!(first, generate(300, 2));
    }

    #[test]
    fn requests_share_prefixes_within_and_across_conversations() {
        let prompts = generate(800, 3);
        let mut blocks = std::collections::BTreeSet::new();
        let (mut seen, mut all) = (0_u32, 0_u32);
        for prompt in &prompts {
            for end in (512..=prompt.len()).step_by(512) {
                all += 1;
                seen += u32::from(!blocks.insert(&prompt[..end]));
            }
        }
        let reuse = f64::from(seen) / f64::from(all);
        assert!((0.4..0.9).contains(&reuse), "{reuse}");
    }
}
