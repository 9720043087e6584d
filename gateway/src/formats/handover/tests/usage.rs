//! Cached tokens in responses that pass in frames.

use axum::body::Bytes;
use proptest::prelude::*;

use super::text;
use crate::formats::handover::CachedTokensRewriter;

/// Passes `input` through the rewriter in frames that end at `splits`.
fn pass(mut rewriter: CachedTokensRewriter, input: &[u8], splits: &[usize], tokens: Option<u32>) -> Vec<u8> {
    let mut ends: Vec<usize> = splits.iter().map(|split| split % (input.len() + 1)).chain([input.len()]).collect();
    ends.sort_unstable();
    let (mut output, mut at) = (Vec::new(), 0);
    for end in ends {
        output.extend_from_slice(&rewriter.push(Bytes::copy_from_slice(&input[at..end]), tokens));
        at = end;
    }
    output.extend_from_slice(&rewriter.finish(tokens));
    output
}

fn events(input: &str) -> String {
    text(&pass(CachedTokensRewriter::new(true), input.as_bytes(), &[], Some(8)))
}

fn json(input: &str) -> String {
    text(&pass(CachedTokensRewriter::new(false), input.as_bytes(), &[], Some(8)))
}

#[test]
fn cached_tokens_are_replaced_or_added() {
    let cases = r#"
{"usage":{"prompt_tokens":9}}
{"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":8}}}
{"usage" : { "prompt_tokens_details" : null , "prompt_tokens":9}, "x":1e5 }
{"usage" : { "prompt_tokens_details" : {"cached_tokens":8} , "prompt_tokens":9}, "x":1e5 }
{"usage":{"prompt_tokens_details":{"audio_tokens":0}}}
{"usage":{"prompt_tokens_details":{"audio_tokens":0,"cached_tokens":8}}}
{"usage":{"prompt_tokens_details":{"cached_tokens": 0 ,"audio_tokens":0}},"b":2}
{"usage":{"prompt_tokens_details":{"cached_tokens": 8 ,"audio_tokens":0}},"b":2}
{"usage":{"input_tokens":9,"input_tokens_details":{"cached_tokens":null}}}
{"usage":{"input_tokens":9,"input_tokens_details":{"cached_tokens":8}}}
{"usage":{"input_tokens":9}}
{"usage":{"input_tokens":9,"input_tokens_details":{"cached_tokens":8}}}
{"type":"response.completed","response":{"usage":{"input_tokens":9,"input_tokens_details":{}},"id":"r"}}
{"type":"response.completed","response":{"usage":{"input_tokens":9,"input_tokens_details":{"cached_tokens":8}},"id":"r"}}
"#;
    let lines: Vec<&str> = cases.trim().lines().collect();
    for case in lines.chunks(2) {
        let (input, expected) = (case[0], case[1]);
        assert_eq!(json(input), expected);
        for (start, end) in [("data: ", "\n\n"), ("data:", "\r\n\r\n"), ("event: e\nid: 1\ndata: ", "")] {
            assert_eq!(events(&format!("{start}{input}{end}")), format!("{start}{expected}{end}"));
        }
        for line_end in ["\n", "\r\n"] {
            let middle = format!("\":{line_end}data:{line_end}data: {{");
            let in_lines = |json: &str| format!("data: {}{line_end}{line_end}", json.replacen("\":{", &middle, 1));
            assert_eq!(events(&in_lines(input)), in_lines(expected));
        }
    }
}

#[test]
fn other_content_remains() {
    for input in [
        r#"{"choices":[{"delta":{"content":"\"usage\":{\"prompt_tokens\":9}"}}]}"#,
        r#"{"choices":[{"usage":{"prompt_tokens":9}}]}"#,
        r#"{"delta":{"usage":{"prompt_tokens":9}},"usage":null}"#,
        r#"{"usage":{"prompt_tokens_details":7}}"#,
        r#"{"usage":{"prompt_tokens":1},"usage":{"prompt_tokens":2}}"#,
        r#"{"response":{"output":[{"usage":{}}]}}"#,
        r#"{"response":"x","x":{"usage":{}}}"#,
        r#"{"usage":{"prompt_tokens":9}"#,
        r#"["usage",{"usage":{}}]"#,
        "",
    ] {
        assert_eq!(json(input), input);
        assert_eq!(events(&format!("data: {input}\n\n")), format!("data: {input}\n\n"));
    }
    let comment = ": {\"usage\":{}}\nevent: {\"usage\":{}}\n\n";
    assert_eq!(events(comment), comment);
    assert_eq!(events("data: [DONE]\n\n"), "data: [DONE]\n\n");
}

#[test]
fn frames_without_usage_share_their_memory() {
    let frame = Bytes::from_static(b"data: {\"choices\":[],\"usage\":null}\n\n");
    let mut rewriter = CachedTokensRewriter::new(true);
    assert_eq!(rewriter.push(frame.clone(), Some(8)).as_ptr(), frame.as_ptr());
}

#[test]
fn long_events_and_bodies_pass_unchanged() {
    let usage = "data: {\"usage\":{\"prompt_tokens\":9}}\n\n";
    let long = usage.replace('9', "9999");
    let changed = events(usage);
    let input = format!("{usage}{long}{usage}");
    for splits in [&[][..], &[3], &[40], &[40, 50, 60, 70, 80], &[79, 80, 81]] {
        let rewriter = CachedTokensRewriter::with_bytes_max(true, usage.len());
        let passed = pass(rewriter, input.as_bytes(), splits, Some(8));
        assert_eq!(text(&passed), format!("{changed}{long}{changed}"), "{splits:?}");
    }
    let body = usage.strip_prefix("data: ").unwrap();
    let rewriter = CachedTokensRewriter::with_bytes_max(false, body.len() - 1);
    assert_eq!(text(&pass(rewriter, body.as_bytes(), &[7], Some(8))), body);
    let rewriter = CachedTokensRewriter::with_bytes_max(false, body.len());
    assert_ne!(text(&pass(rewriter, body.as_bytes(), &[7], Some(8))), body);
}

/// Lines of a stream, with and without usage, valid and not.
fn line() -> impl Strategy<Value = String> {
    let data = prop_oneof![
        Just(r#"{"choices":[{"delta":{"content":"é\"usage\": {"}}],"usage":null}"#.to_owned()),
        Just(r#"{"usage":{"prompt_tokens":9}}"#.to_owned()),
        Just(r#"{"usage":{"prompt_tokens_details":{"cached_tokens":0}},"x":"ü"}"#.to_owned()),
        Just(r#"{"response":{"usage":{"input_tokens":1}}}"#.to_owned()),
        Just(r#"{"usage":{"#.to_owned()),
        Just("[DONE]".to_owned()),
        ".{0,12}",
    ];
    let starts = prop_oneof![Just("data: "), Just("data:"), Just("event: "), Just("")];
    let ends = prop_oneof![Just("\n"), Just("\r\n"), Just("\n\n"), Just("\r\n\r\n")];
    (starts, data, ends).prop_map(|(start, data, end)| format!("{start}{data}{end}"))
}

proptest! {
    #[test]
    fn splits_do_not_change_the_output(
        lines in proptest::collection::vec(line(), 0..8),
        cut in 0_usize..4,
        splits in proptest::collection::vec(0_usize..1000, 0..12),
        is_events: bool,
        bytes_max in prop_oneof![Just(1 << 20), 0_usize..90],
        tokens in proptest::option::of(0_u32..99),
    ) {
        let input = lines.concat();
        let input = &input.as_bytes()[..input.len().saturating_sub(cut)];
        let rewriter = || CachedTokensRewriter::with_bytes_max(is_events, bytes_max);
        let whole = pass(rewriter(), input, &[], tokens);
        prop_assert_eq!(&pass(rewriter(), input, &splits, tokens), &whole);
        let has_usage = lines.iter().any(|line| line.contains("\"usage\":{"));
        if tokens.is_none() || !has_usage {
            prop_assert_eq!(whole, input);
        }
    }
}
