//! Probabilities of the prompt's tokens, byte by byte.

use std::sync::Arc;

use axum::body::Bytes;
use proptest::prelude::*;

use crate::formats::handover::{CachedTokensRewriter, PromptLogprobs};

const PREFILL: &str = r#"{"id":"r","choices":[{"index":0,"text":"Hi all.","logprobs":{"text_offset":[-1,-1,-1],"token_logprobs":[null, -1.50,-0.2],"tokens":["Hi"," all","."],"top_logprobs":[null,{" all":-1.5},{".":-0.2}]},"finish_reason":"length"}],"usage":{"prompt_tokens":2,"completion_tokens":1}}"#;
const DECODE: &str = r#"{"id":"r","choices":[{"index":0,"text":"Hi all. So","logprobs":{"text_offset":[-1,-1],"token_logprobs":[-0.2,-0.30],"tokens":["."," So"],"top_logprobs":[{".":-0.2},{" So":-0.3}]},"finish_reason":"length"}],"usage":{"prompt_tokens":2,"completion_tokens":2}}"#;
const MERGED: &str = r#"{"id":"r","choices":[{"index":0,"text":"Hi all. So","logprobs":{"text_offset":[-1,-1,-1,-1],"token_logprobs":[null,-1.50,-0.2,-0.30],"tokens":["Hi"," all","."," So"],"top_logprobs":[null,{" all":-1.5},{".":-0.2},{" So":-0.3}]},"finish_reason":"length"}],"usage":{"prompt_tokens":2,"completion_tokens":2}}"#;

#[test]
fn entries_of_the_prompt_precede_those_of_the_output() {
    let prompt = PromptLogprobs::read(PREFILL);
    assert_eq!(prompt.merged(DECODE, &mut Vec::new()).as_deref(), Some(MERGED));
    assert_eq!(prompt.merged(MERGED, &mut Vec::new()), None, "the decode engine has sent them");
}

#[test]
fn responses_without_probabilities_remain() {
    let prompt = PromptLogprobs::read(PREFILL);
    for body in [
        "{}",
        "[DONE]",
        r#"{"choices":[]}"#,
        r#"{"choices":[{"index":0,"text":"a","logprobs":null}]}"#,
        r#"{"choices":[{"index":1,"logprobs":{"tokens":["."],"token_logprobs":[-1]}}]}"#,
        r#"{"choices":[{"index":0,"logprobs":{"content":[{"token":"."}]}}]}"#,
    ] {
        assert_eq!(prompt.merged(body, &mut Vec::new()), None, "{body}");
        assert!(PromptLogprobs::read(body).merged(DECODE, &mut Vec::new()).is_none(), "{body}");
    }
    assert!(PromptLogprobs::read("not JSON").is_empty());
}

#[test]
fn each_choice_has_its_own_prompt() {
    let choice = |index: u32, tokens: &str, probabilities: &str| {
        format!(r#"{{"index":{index},"logprobs":{{"tokens":[{tokens}],"token_logprobs":[{probabilities}]}}}}"#)
    };
    let body = |choices: [String; 2]| format!(r#"{{"choices":[{}]}}"#, choices.join(","));
    let prefill = body([choice(1, r#""c","d""#, "null,-4"), choice(0, r#""a","b""#, "null,-2")]);
    let decode = body([choice(0, r#""b""#, "-2"), choice(1, r#""d""#, "-4")]);
    let expected = body([choice(0, r#""a","b""#, "null,-2"), choice(1, r#""c","d""#, "null,-4")]);
    assert_eq!(PromptLogprobs::read(&prefill).merged(&decode, &mut Vec::new()), Some(expected));
}

/// A stream whose first event of a choice has the prompt's text.
fn stream() -> (String, String, String) {
    let event = |text: &str, logprobs: &str| {
        format!(r#"data: {{"choices":[{{"index":0,"text":"{text}","logprobs":{logprobs}}}]}}"#)
    };
    let usage = r#"data: {"choices":[],"usage":{"prompt_tokens":2}}"#;
    let done = |events: &[String]| format!("{}\n\n{usage}\n\ndata: [DONE]\n\n", events.join("\n\n"));
    let first =
        |tokens: &str, probabilities: &str| format!(r#"{{"tokens":[{tokens}],"token_logprobs":[{probabilities}]}}"#);
    let prefill = done(&[event("Hi all.", &first(r#""Hi"," all",".""#, "null,-1.5,-0.2"))]);
    let second = event(" So", &first(r#"" So""#, "-0.3"));
    let decode = done(&[event("", "null"), event("Hi all.", &first(r#"".""#, "-0.2")), second.clone()]);
    let merged = done(&[event("", "null"), event("Hi all.", &first(r#""Hi"," all",".""#, "null,-1.5,-0.2")), second]);
    (prefill, decode, merged)
}

fn rewriter(prefill: &str) -> CachedTokensRewriter {
    let mut rewriter = CachedTokensRewriter::new(true).adding_logprobs();
    rewriter.set_prompt_logprobs(Arc::new(PromptLogprobs::read(prefill)));
    rewriter
}

#[test]
fn frames_with_probabilities_wait_for_the_prefill_leg() {
    let (prefill, decode, _) = stream();
    let frame = decode.split_inclusive("\n\n").nth(1).unwrap();
    let waits = CachedTokensRewriter::new(true).adding_logprobs();
    assert!(waits.needs_prefill(frame.as_bytes()) && !waits.needs_prefill(b"data: {\"logprobs\":null}\n\n"));
    assert!(!rewriter(&prefill).needs_prefill(frame.as_bytes()), "known");
    assert!(!CachedTokensRewriter::new(true).needs_prefill(frame.as_bytes()), "not wanted");
}

#[test]
fn lines_of_data_are_joined() {
    let (prefill, decode, merged) = stream();
    let in_lines = |stream: &str| stream.replace(",\"logprobs\":", ",\ndata: \"logprobs\":\ndata:");
    let frame = in_lines(&decode);
    assert!(CachedTokensRewriter::new(true).adding_logprobs().needs_prefill(frame.as_bytes()));
    let sent = rewriter(&in_lines(&prefill)).push(frame.into(), None);
    assert_eq!(str::from_utf8(&sent), Ok(&*in_lines(&merged)));
}

proptest! {
    #[test]
    fn the_first_probabilities_of_a_stream_change_wherever_frames_split(split in 0..400_usize) {
        let (prefill, decode, merged) = stream();
        let (first, second) = decode.split_at(split.min(decode.len()));
        let mut rewriter = rewriter(&prefill);
        let mut sent = Vec::new();
        for part in [first, second] {
            sent.extend_from_slice(&rewriter.push(Bytes::copy_from_slice(part.as_bytes()), None));
        }
        sent.extend_from_slice(&rewriter.finish(None));
        prop_assert_eq!(String::from_utf8(sent).unwrap(), merged);
    }
}
