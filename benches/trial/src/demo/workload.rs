//! Workload of the demo: conversations over shared system prompts, with think times.
//!
//! Generates the script of every client and the bodies of its requests. Equal seeds, numbers of clients and numbers of
//! requests give the same script on every machine. Later requests of a conversation quote the engine's answers. A mock
//! engine derives its answers from the prompt alone, so whole runs are repeatable. [`super::drive`] sends the requests.

use std::ops::RangeInclusive;
use std::sync::Arc;

use axum::body::Bytes;
use serde_json::json;

use crate::workload::Rng;

/// Number of system prompts, shared by all conversations.
pub(super) const SYSTEMS: u32 = 12;

/// Length of a system prompt. All lengths are in words; the mock tokenizer gives each word one token.
const SYSTEM_WORDS: RangeInclusive<u32> = 1536..=3072;

/// Length of the first question of a conversation, including its document.
const OPENING_WORDS: RangeInclusive<u32> = 512..=3072;

/// Length of every later question.
const QUESTION_WORDS: RangeInclusive<u32> = 32..=160;

/// Length of an answer in tokens.
const OUTPUT_TOKENS: RangeInclusive<u32> = 32..=96;

/// Number of questions per conversation.
pub(super) const TURNS: RangeInclusive<u32> = 3..=7;

/// Think time in milliseconds from an answer to the next question.
pub(super) const THINK_MS: RangeInclusive<u32> = 400..=2000;

/// Range in milliseconds over which client starts are spread.
const START_MS: u32 = 2000;

/// Scripts of all clients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ClientScripts {
    systems: Vec<Arc<str>>,
    pub(super) sessions: Vec<Session>,
}

/// Script of one client: its conversations in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Session {
    pub(super) start_ms: u32,
    pub(super) conversations: Vec<ConversationScript>,
}

/// Questions over one system prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ConversationScript {
    system: Arc<str>,
    pub(super) turns: Vec<Turn>,
}

/// One question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Turn {
    question: String,
    output_tokens: u32,
    /// Think time after the answer in milliseconds.
    pub(super) think_ms: u32,
}

impl ClientScripts {
    /// Generates `requests` questions in total, divided evenly among `clients`.
    pub(super) fn new(seed: u64, clients: u32, requests: u32) -> Self {
        let mut rng = Rng::stream(seed, 0);
        let systems: Vec<Arc<str>> = (0..SYSTEMS).map(|_| words(&mut rng, SYSTEM_WORDS).into()).collect();
        let session = |client: u32| {
            let quota = requests / clients + u32::from(client < requests % clients);
            Session::new(&mut Rng::stream(seed, 1 + u64::from(client)), &systems, quota)
        };
        let sessions = (0..clients).map(session).collect();
        Self { systems, sessions }
    }

    /// Total number of questions.
    pub(super) fn requests(&self) -> usize {
        self.sessions.iter().flat_map(|session| &session.conversations).map(|talk| talk.turns.len()).sum()
    }
}

impl Session {
    fn new(rng: &mut Rng, systems: &[Arc<str>], quota: u32) -> Self {
        let start_ms = rng.below(START_MS);
        let (mut conversations, mut left) = (Vec::new(), quota);
        while left > 0 {
            let turns = rng.within(TURNS).min(left);
            conversations.push(ConversationScript::new(rng, systems, turns));
            left -= turns;
        }
        Self { start_ms, conversations }
    }
}

impl ConversationScript {
    fn new(rng: &mut Rng, systems: &[Arc<str>], turns: u32) -> Self {
        let count = u32::try_from(systems.len()).expect("few words");
        // The lower of two draws: low-numbered prompts are used more often.
        let system = rng.below(count).min(rng.below(count));
        let turn = |n: u32| Turn {
            question: words(rng, if n == 0 { OPENING_WORDS } else { QUESTION_WORDS }),
            output_tokens: rng.within(OUTPUT_TOKENS),
            think_ms: rng.within(THINK_MS),
        };
        Self { system: Arc::clone(&systems[system as usize]), turns: (0..turns).map(turn).collect() }
    }

    /// Body of the next request after `answers`, the answers so far.
    pub(super) fn body(&self, model: &str, answers: &[String]) -> Bytes {
        let message = |role: &str, content: &str| json!({ "role": role, "content": content });
        let mut messages = vec![message("system", &self.system)];
        for (turn, answer) in self.turns.iter().zip(answers) {
            messages.extend([message("user", &turn.question), message("assistant", answer)]);
        }
        let Turn { question, output_tokens, .. } = &self.turns[answers.len()];
        messages.push(message("user", question));
        let body = json!({
            "model": model, "messages": messages, "max_tokens": output_tokens, "stream": true,
            "stream_options": { "include_usage": true },
        });
        body.to_string().into()
    }
}

/// Generates words of two or three syllables. Each word with the space before it is one token of the mock tokenizer.
fn words(rng: &mut Rng, count: RangeInclusive<u32>) -> String {
    const CONSONANTS: &[u8] = b"bdfgklmnprstvz";
    const VOWELS: &[u8] = b"aeiou";
    let count = rng.within(count);
    let mut text = String::with_capacity(count as usize * 6);
    for n in 0..count {
        if n > 0 {
            text.push(' ');
        }
        // One 64-bit number has enough bits for a word.
        let mut bits = rng.number();
        let mut pick = |from: &[u8]| {
            let at = bits % from.len() as u64;
            bits /= from.len() as u64;
            char::from(from[usize::try_from(at).expect("below a length")])
        };
        for _ in 0..2 + n % 2 {
            text.push(pick(CONSONANTS));
            text.push(pick(VOWELS));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_requests_are_distributed_over_clients() {
        for (clients, requests) in [(1, 1), (5, 43), (7, 3), (64, 640)] {
            let workload = ClientScripts::new(1, clients, requests);
            assert_eq!((workload.sessions.len(), workload.requests()), (clients as usize, requests as usize));
        }
    }

    #[test]
    fn a_turn_quotes_previous_turns() {
        let workload = ClientScripts::new(1, 1, 3);
        let talk = &workload.sessions[0].conversations[0];
        let json: serde_json::Value = serde_json::from_slice(&talk.body("m", &[" t1".to_owned()])).expect("JSON");
        let roles: Vec<_> = json["messages"].as_array().expect("a list").iter().map(|m| m["role"].clone()).collect();
        assert_eq!(roles, ["system", "user", "assistant", "user"]);
        assert_eq!((&json["messages"][2]["content"], &json["model"]), (&" t1".into(), &"m".into()));
        assert_eq!((&json["stream"], &json["stream_options"]["include_usage"]), (&true.into(), &true.into()));
    }
}
