//! Usage and token counts read from an answer, compared with a JSON parser, for every way to split the answer.

use pointsman::{AnswerKind, AnswerReader, Usage};
use proptest::prelude::*;
use serde_json::{Value, json};

fn read<'a>(kind: AnswerKind, pieces: impl IntoIterator<Item = &'a [u8]>) -> (u64, Option<Usage>) {
    let mut reader = AnswerReader::new(kind);
    pieces.into_iter().for_each(|piece| reader.read(piece));
    reader.end();
    (reader.output_tokens(), reader.usage())
}

/// The same answer in two pieces, cut at every position, and byte by byte.
fn assert_cuts_change_nothing(kind: AnswerKind, answer: &[u8]) {
    let whole = read(kind, [answer]);
    for at in 0..=answer.len() {
        let (front, back) = answer.split_at(at);
        assert_eq!(read(kind, [front, back]), whole, "cut at {at}");
    }
    assert_eq!(read(kind, answer.chunks(1)), whole, "byte by byte");
}

/// Text with every character that JSON must escape, and text that resembles the searched fields.
fn text() -> impl Strategy<Value = String> {
    prop_oneof![
        Just(String::new()),
        "[a-z\"\\\\{}:\\[\\] \n\r\u{e9}]{0,12}",
        Just("\"usage\":{\"completion_tokens\":5}".to_owned()),
        Just("data: [DONE]\n\ndata: {}".to_owned()),
        Just("\\".to_owned()),
        Just("ends with \"usage".to_owned()),
    ]
}

fn usage() -> impl Strategy<Value = Value> {
    let count = || prop_oneof![Just(None), (0..40u32).prop_map(Some)];
    let details = prop_oneof![Just(Value::Null), (0..9u32).prop_map(|cached| json!({ "cached_tokens": cached }))];
    prop_oneof![
        Just(Value::Null),
        (count(), count(), details).prop_map(|(prompt, output, details)| {
            json!({ "prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": details })
        }),
    ]
}

fn event() -> impl Strategy<Value = Value> {
    let delta = prop_oneof![
        text().prop_map(|content| json!({ "content": content })),
        text().prop_map(|content| json!({ "role": "assistant", "reasoning_content": content })),
        text().prop_map(|name| json!({ "tool_calls": [{ "function": { "name": name } }] })),
        Just(json!({})),
    ];
    prop_oneof![
        (delta, usage()).prop_map(|(delta, usage)| json!({ "choices": [{ "delta": delta }], "usage": usage })),
        (text(), usage()).prop_map(|(text, usage)| json!({ "choices": [{ "text": text }], "usage": usage })),
        usage().prop_map(|usage| json!({ "choices": [], "usage": usage })),
        text().prop_map(|message| json!({ "error": { "message": message, "content": "none" } })),
    ]
}

/// The usage according to the JSON parser.
fn said(usage: &Value) -> Option<Usage> {
    let count = |value: &Value| value.as_u64().and_then(|count| u32::try_from(count).ok());
    let said = Usage {
        prompt_tokens: count(&usage["prompt_tokens"]),
        output_tokens: count(&usage["completion_tokens"]),
        cached_tokens: count(&usage["prompt_tokens_details"]["cached_tokens"]),
    };
    Some(said).filter(|said| *said != Usage::default())
}

/// Token count and usage of a sequence of events.
fn told(events: &[Value]) -> (u64, Option<Usage>) {
    let (mut tokens, mut known) = (0, None);
    for event in events {
        let choice = &event["choices"][0];
        let given = |value: &Value| value.as_str().is_some_and(|text| !text.is_empty());
        let output = [&choice["text"], &choice["delta"]["content"], &choice["delta"]["reasoning_content"]];
        tokens += u64::from(output.into_iter().any(given) || choice["delta"]["tool_calls"].is_array());
        if let Some(said) = said(&event["usage"]) {
            tokens = said.output_tokens.map_or(tokens, u64::from);
            let before: Usage = known.unwrap_or_default();
            known = Some(Usage {
                prompt_tokens: said.prompt_tokens.or(before.prompt_tokens),
                output_tokens: said.output_tokens.or(before.output_tokens),
                cached_tokens: said.cached_tokens.or(before.cached_tokens),
            });
        }
    }
    (tokens, known)
}

fn stream(events: &[Value], end: &str) -> Vec<u8> {
    let lines = events.iter().map(|event| format!("data: {event}{end}{end}"));
    lines.chain([format!("data: [DONE]{end}{end}")]).collect::<String>().into_bytes()
}

proptest! {
    // Each case is read once per byte.
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn stream_results_match_the_events(events in prop::collection::vec(event(), 0..5), windows: bool) {
        let answer = stream(&events, if windows { "\r\n" } else { "\n" });
        prop_assert_eq!(read(AnswerKind::Events, [&*answer]), told(&events));
        assert_cuts_change_nothing(AnswerKind::Events, &answer);
    }

    #[test]
    fn json_results_match_the_usage_record(content in text(), usage in usage(), pretty: bool) {
        let answer = json!({ "choices": [{ "message": { "content": content } }], "usage": usage, "z": null });
        let written = if pretty { serde_json::to_vec_pretty(&answer) } else { serde_json::to_vec(&answer) };
        let written = written.expect("valid JSON");
        let said = said(&usage);
        let tokens = said.and_then(|said| said.output_tokens).map_or(0, u64::from);
        prop_assert_eq!(read(AnswerKind::Json, [&*written]), (tokens, said));
        assert_cuts_change_nothing(AnswerKind::Json, &written);
    }

    #[test]
    fn invalid_responses_never_panic(
        bytes in prop::collection::vec(prop_oneof![Just(b'{'), Just(b'"'), Just(b'\\'), Just(b'\n'), any::<u8>()], 0..200),
        events: bool,
    ) {
        let mut answer = b"data: {\"choices\":[{\"text\":".to_vec();
        answer.extend(bytes);
        assert_cuts_change_nothing(if events { AnswerKind::Events } else { AnswerKind::Json }, &answer);
    }
}

/// Lengths above the limit for buffered values. The storage method changes at this limit.
#[test]
fn long_lines_and_values_may_be_split_anywhere() {
    for filler in [65_000, 65_536, 70_000, 200_000] {
        let text = "a\\\"".repeat(filler / 3);
        let event = format!("{{\"choices\":[{{\"text\":\"{text}\"}}],\"usage\":{{\"completion_tokens\":7}}}}");
        let line = format!("data: {event}\n\ndata: {{\"choices\":[{{\"text\":\"b\"}}]}}\n");
        for (kind, answer, tokens) in [(AnswerKind::Events, line, 8), (AnswerKind::Json, event, 7)] {
            let answer = answer.as_bytes();
            assert_eq!(read(kind, [answer]).0, tokens);
            for piece in [1, 7, 1_000, 16_383, 16_384, 16_385, 65_535, 65_536, 65_537, 100_000] {
                assert_eq!(read(kind, answer.chunks(piece)), read(kind, [answer]), "in pieces of {piece}");
            }
        }
    }
}
