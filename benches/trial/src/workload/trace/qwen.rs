//! Alibaba's Qwen traces, of the paper "KVCache Cache in the Wild" (USENIX ATC'25), as specified by the repository
//! <https://github.com/alibaba-edu/qwen-bailian-usagetraces-anon>.
//!
//! Each line is a JSON object: `chat_id`, `parent_chat_id` (-1 for none), `timestamp` (seconds from the start of the
//! trace), `input_length` and `output_length` (tokens), `type` (text, search, image, file), `turn` (from 1),
//! `hash_ids`. Each hash id identifies 16 tokens by their content; equal ids mean equal tokens. `type` and `turn` are
//! ignored: conversations are derived from the parents.
//!
//! The specification does not define whether an incomplete last block has an id. If it has one, the id's tokens are
//! truncated. Otherwise the remaining tokens are unique to the request.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::lines::Lines;
use super::{Rule, collect, input_length, output_length, time_us, wrong_hash_ids};
use crate::workload::{Request, Segment, WorkloadError, mix};

/// Number of tokens per hash id.
pub const TOKENS_PER_ID: u32 = 16;

#[derive(Deserialize)]
struct QwenLine {
    chat_id: i64,
    parent_chat_id: i64,
    timestamp: f64,
    input_length: u64,
    output_length: u64,
    hash_ids: Vec<u64>,
}

/// The first `limit` requests.
pub(super) fn requests(lines: &mut Lines, limit: usize) -> Result<Vec<Request>, WorkloadError> {
    let mut chats = Chats::default();
    collect(lines, |line| parse(line, &mut chats), |read| read.len() >= limit)
}

/// Conversation of each chat so far, identified by its first ancestor.
#[derive(Default)]
struct Chats {
    roots: BTreeMap<i64, i64>,
}

impl Chats {
    /// Conversation of a chat. A parent that is missing in the trace also starts one.
    fn root(&mut self, chat: i64, parent: i64) -> i64 {
        let root = if parent < 0 { chat } else { *self.roots.get(&parent).unwrap_or(&parent) };
        self.roots.insert(chat, root);
        root
    }
}

fn parse(line: &str, chats: &mut Chats) -> Result<Request, Rule> {
    let line: QwenLine = serde_json::from_str(line).map_err(|error| error.to_string())?;
    let tokens = input_length("input_length", line.input_length)?;
    Ok(Request {
        arrival_us: time_us(line.timestamp, 1e6)?,
        prompt: segments(tokens, &line.hash_ids, line.chat_id)?,
        output_tokens: output_length("output_length", line.output_length)?,
        session: Some(chats.root(line.chat_id, line.parent_chat_id).cast_unsigned()),
    })
}

fn segments(input_length: u32, hash_ids: &[u64], chat: i64) -> Result<Vec<Segment>, Rule> {
    let (whole, rest) = ((input_length / TOKENS_PER_ID) as usize, input_length % TOKENS_PER_ID);
    let needed = input_length.div_ceil(TOKENS_PER_ID) as usize;
    if hash_ids.len() != needed && hash_ids.len() != whole {
        return Err(wrong_hash_ids(input_length, needed, hash_ids.len()));
    }
    let named = hash_ids.iter().take(whole).map(|&id| Segment { id, tokens: TOKENS_PER_ID });
    // Ids of the trace count from 0; ids of unique text are spread over 64 bits.
    let own = mix(!chat.cast_unsigned());
    let tail = (rest > 0).then(|| Segment { id: hash_ids.get(whole).copied().unwrap_or(own), tokens: rest });
    Ok(named.chain(tail).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"{"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "input_length": 40,
        "output_length": 132, "type": "text", "turn": 2, "hash_ids": [1089, 1090, 1091]}"#;

    fn parsed(line: &str) -> Result<Request, Rule> {
        parse(line, &mut Chats::default())
    }

    #[test]
    fn a_line_is_a_request_of_its_conversation() {
        let request = parsed(GOOD).expect("good line");
        assert_eq!((request.arrival_us, request.output_tokens, request.session), (61_114_000, 132, Some(55)));
        let lengths: Vec<(u64, u32)> = request.prompt.iter().map(|segment| (segment.id, segment.tokens)).collect();
        assert_eq!(lengths, [(1089, 16), (1090, 16), (1091, 8)]);
    }

    #[test]
    fn an_incomplete_block_without_an_id_is_unique() {
        let tail = |line: &str| parsed(line).expect("good line").prompt[2];
        let line = GOOD.replace(", 1091]", "]");
        assert_eq!(tail(&line).tokens, 8);
        assert_ne!(tail(&line).id, tail(&line.replace("159", "160")).id);
    }

    #[test]
    fn a_conversation_is_identified_by_its_first_chat() {
        let mut chats = Chats::default();
        assert_eq!([chats.root(1, -1), chats.root(2, 1), chats.root(3, 2), chats.root(4, 1)], [1; 4]);
        // The trace starts in the middle of another conversation.
        assert_eq!([chats.root(9, 7), chats.root(10, 7), chats.root(11, 10)], [7; 3]);
    }

    #[test]
    fn invalid_lines_are_rejected_with_a_reason() {
        let cases = [
            (GOOD.replace(": 40", ": 49"), "input_length 49 needs 4 hash_ids, found 2"),
            (GOOD.replace(": 40", ": 32"), "input_length 32 needs 2 hash_ids, found 3"),
            (GOOD.replace(": 40", ": 0"), "input_length is 0"),
            (GOOD.replace("61.114", "-3"), "timestamp is -3, must be a time"),
            (GOOD.replace("parent_chat_id", "parent"), "missing field `parent_chat_id`"),
        ];
        for (line, expected) in cases {
            let line = if expected.ends_with("found 2") { line.replace(", 1091]", "]") } else { line };
            let error = parsed(&line).expect_err(&line).to_string();
            assert!(error.contains(expected), "{line}: {error}");
        }
    }
}
