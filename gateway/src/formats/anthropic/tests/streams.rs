//! Streams of chunks as events, by example and by property.

use std::collections::BTreeMap;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::converted;
use crate::formats::anthropic::StreamTranslator;

pub(super) fn sse(chunks: &[Value]) -> Vec<u8> {
    let mut bytes: Vec<u8> = chunks.iter().flat_map(|chunk| format!("data: {chunk}\n\n").into_bytes()).collect();
    bytes.extend_from_slice(b"data: [DONE]\n\n");
    bytes
}

/// The events, with equal names in both lines of each.
fn parsed(bytes: &[u8]) -> Vec<(String, Value)> {
    let text = std::str::from_utf8(bytes).expect("text");
    let events = text.split_terminator("\n\n").map(|event| {
        let (name, data) = event.split_once('\n').expect("two lines");
        let name = name.strip_prefix("event: ").expect("a name");
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").expect("data")).expect("JSON");
        assert_eq!(data["type"], name);
        (name.to_owned(), data)
    });
    events.collect()
}

pub(super) fn events_of(bytes: &[u8]) -> Vec<(String, Value)> {
    let mut translator = StreamTranslator::new("m", 3);
    let mut events = translator.read(bytes);
    events.extend(translator.end());
    parsed(&events)
}

/// Content blocks, checked for order and nesting.
fn blocks_of(events: &[(String, Value)]) -> Vec<Value> {
    let (mut blocks, mut open): (Vec<Value>, bool) = (Vec::new(), false);
    for (name, event) in events {
        match name.as_str() {
            "content_block_start" => {
                assert!(!std::mem::replace(&mut open, true), "nested");
                assert_eq!(event["index"], blocks.len());
                let mut block = event["content_block"].clone();
                block["partial"] = json!("");
                blocks.push(block);
            }
            "content_block_delta" => {
                assert!(open);
                assert_eq!(event["index"], blocks.len() - 1);
                let delta = &event["delta"];
                let block = blocks.last_mut().expect("a block");
                let (kind, field) = match delta["type"].as_str().expect("a type") {
                    "text_delta" => ("text", "text"),
                    "thinking_delta" => ("thinking", "thinking"),
                    "signature_delta" => ("thinking", "signature"),
                    "input_json_delta" => ("tool_use", "partial_json"),
                    other => panic!("{other}"),
                };
                assert_eq!(block["type"], kind);
                let into = if field == "partial_json" { "partial" } else { field };
                block[into] =
                    json!([block[into].as_str().expect("text"), delta[field].as_str().expect("text")].concat());
            }
            "content_block_stop" => {
                assert!(std::mem::replace(&mut open, false));
                assert_eq!(event["index"], blocks.len() - 1);
            }
            _ => assert!(!open || name == "error"),
        }
    }
    blocks
}

#[test]
fn streams_are_converted() {
    let call = |index: usize, id: Value, name: Value, arguments: &str| {
        json!({ "choices": [{ "index": 0, "delta": { "tool_calls": [
            { "index": index, "id": id, "function": { "name": name, "arguments": arguments } }
        ] } }] })
    };
    let delta = |delta: Value| json!({ "id": "chatcmpl-9", "choices": [{ "index": 0, "delta": delta }] });
    let events = events_of(&sse(&[
        delta(json!({ "role": "assistant", "content": "" })),
        delta(json!({ "reasoning": "Th" })),
        delta(json!({ "reasoning_content": "ink", "reasoning": "ink" })),
        delta(json!({ "content": "One " })),
        delta(json!({ "content": "moment." })),
        call(0, json!("t1"), json!("f"), ""),
        call(0, Value::Null, Value::Null, "{\"a\":"),
        call(0, Value::Null, Value::Null, "1}"),
        call(1, json!("t2"), Value::Null, "{"),
        call(1, Value::Null, json!("g"), "}"),
        json!({ "choices": [{ "index": 0, "delta": {}, "finish_reason": "tool_calls" }] }),
        json!({ "choices": [], "usage": {
            "prompt_tokens": 10, "completion_tokens": 4, "prompt_tokens_details": { "cached_tokens": 8 }
        } }),
    ]));
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!((names[0], &names[names.len() - 2..]), ("message_start", &["message_delta", "message_stop"][..]));
    let start = &events[0].1["message"];
    assert_eq!((&start["id"], &start["model"], &start["content"]), (&json!("msg_9"), &json!("m"), &json!([])));
    assert_eq!(start["usage"]["input_tokens"], 3);
    let expected = [
        json!({ "type": "thinking", "thinking": "Think", "signature": "unsigned", "partial": "" }),
        json!({ "type": "text", "text": "One moment.", "partial": "" }),
        json!({ "type": "tool_use", "id": "t1", "name": "f", "input": {}, "partial": "{\"a\":1}" }),
        json!({ "type": "tool_use", "id": "t2", "name": "g", "input": {}, "partial": "{}" }),
    ];
    assert_eq!(blocks_of(&events), expected);
    let end = &events[events.len() - 2].1;
    assert_eq!(end["delta"], json!({ "stop_reason": "tool_use", "stop_sequence": null }));
    assert_eq!((&end["usage"]["input_tokens"], &end["usage"]["output_tokens"]), (&json!(2), &json!(4)));
}

/// Calls as engines stream them: same or no index, repeated ids and names, null and object arguments, interleaved.
#[test]
fn loose_forms_of_tool_calls_are_read() {
    let call = |index: Value, id: Value, name: Value, arguments: Value| json!({ "index": index, "id": id, "type": "function", "function": { "name": name, "arguments": arguments } });
    let (none, a, b) = (Value::Null, json!("{\"a\": 1}"), json!("{\"b\": [\"}\"]}"));
    let (first, second) = (json!("call_a"), json!("call_b"));
    let forms = [
        vec![
            json!([call(json!(0), first.clone(), json!("add"), json!(""))]),
            json!([call(json!(0), none.clone(), none.clone(), a.clone())]),
            json!([call(json!(0), second.clone(), json!("weather"), json!(""))]),
            json!([call(json!(0), none.clone(), none.clone(), b.clone())]),
        ],
        vec![
            json!([{ "id": "call_a", "function": { "name": "add", "arguments": a } }]),
            json!([{ "id": "call_b", "function": { "name": "weather", "arguments": b } }]),
        ],
        vec![
            json!([call(json!("0"), first.clone(), json!("add"), none.clone())]),
            json!([call(json!("0"), first.clone(), json!("add"), a.clone())]),
            json!([call(json!(1.0), second.clone(), json!("weather"), json!({ "b": ["}"] }))]),
            json!([call(json!(1), second.clone(), none.clone(), json!(""))]),
        ],
        vec![
            json!([
                call(json!(0), first.clone(), json!("add"), json!("")),
                call(json!(1), second.clone(), json!("weather"), json!(""))
            ]),
            json!([
                call(json!(0), none.clone(), none.clone(), json!("{\"a\"")),
                call(json!(1), none.clone(), none.clone(), json!("{\"b\":"))
            ]),
            json!([
                call(json!(1), none.clone(), none.clone(), json!(" [\"}\"]}")),
                call(json!(0), none.clone(), none.clone(), json!(": 1}"))
            ]),
        ],
    ];
    for (n, form) in forms.iter().enumerate() {
        let chunk =
            |calls: &Value| json!({ "id": "c", "choices": [{ "index": null, "delta": { "tool_calls": calls } }] });
        let mut chunks: Vec<Value> = form.iter().map(chunk).collect();
        chunks.push(json!({ "choices": [{ "index": "0", "delta": {}, "finish_reason": "tool_calls" }] }));
        chunks.push(json!({ "choices": [], "usage": { "prompt_tokens": "7", "completion_tokens": 4.0 } }));
        let events = events_of(&sse(&chunks));
        let blocks = blocks_of(&events);
        let found: Vec<_> = blocks
            .iter()
            .map(|block| {
                let input: Value = serde_json::from_str(block["partial"].as_str().expect("text")).expect("JSON");
                json!([block["id"], block["name"], input])
            })
            .collect();
        assert_eq!(
            found,
            [json!(["call_a", "add", { "a": 1 }]), json!(["call_b", "weather", { "b": ["}"] }])],
            "form {n}"
        );
        let end = &events[events.len() - 2].1;
        assert_eq!((&end["delta"]["stop_reason"], &end["usage"]["input_tokens"]), (&json!("tool_use"), &json!(7)));
    }
    // Calls without ids, of one name.
    let unnumbered = |name: Value, arguments: &str| json!({ "choices": [{ "delta": { "tool_calls": [{ "index": 0, "function": { "name": name, "arguments": arguments } }] } }] });
    let events = events_of(&sse(&[
        unnumbered(json!("f"), "{\"a\":"),
        unnumbered(json!("f"), "1}"),
        unnumbered(json!("f"), "{}"),
        json!({ "choices": [{ "delta": {}, "finish_reason": "stop" }] }),
    ]));
    let partial: Vec<Value> = blocks_of(&events).iter().map(|block| block["partial"].clone()).collect();
    assert_eq!(partial, [json!("{\"a\":1}"), json!("{}")]);
    let whole = json!({ "choices": [{ "index": "0", "finish_reason": "tool_calls", "message": {
        "content": [{ "type": "text", "text": "a" }],
        "tool_calls": [{ "id": 7, "function": { "name": "f", "arguments": { "a": 1 } } }],
    } }] });
    let message = converted(whole);
    assert_eq!(message["content"][0], json!({ "type": "text", "text": "a" }));
    assert_eq!(message["content"][1], json!({ "type": "tool_use", "id": "7", "name": "f", "input": { "a": 1 } }));
}

#[test]
fn failures_end_with_one_error() {
    let start = "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n";
    let event = |delta: Value| format!("data: {}\n\n", json!({ "choices": [{ "delta": delta }] }));
    let call = |name: Value| json!({ "tool_calls": [{ "index": 0, "function": { "name": name, "arguments": "{" } }] });
    let resumed = [event(call(json!("f"))), event(json!({ "content": "a" })), event(call(Value::Null))].concat();
    let unnamed = [event(call(Value::Null)), "data: [DONE]\n\n".to_owned()].concat();
    let cases = [
        (format!("{start}data: {{\"error\":{{\"message\":\"m\",\"code\":429}}}}\n\n"), "rate_limit_error", "m"),
        (format!("{start}data: {{\"error\":\"m\"}}\n\ndata: [DONE]\n\n"), "api_error", "m"),
        ("\u{feff}data: {\"error\":{}}\n\n".to_owned(), "api_error", "the worker reported an error"),
        (start.to_owned(), "api_error", "the response of the worker ended early"),
        (String::new(), "api_error", "the response of the worker ended early"),
        (format!("data: {}", "a".repeat(5 << 20)), "api_error", "the worker sent an event that is too long"),
        (resumed, "api_error", "the worker continued a tool call after its end"),
        (unnamed, "api_error", "the worker sent a tool call without a name"),
        (format!("{start}data: {{oops\n\n"), "api_error", "the worker sent an event of an unknown form"),
        (
            format!("{start}data: {{\"object\":\"error\",\"message\":\"m\",\"code\":503}}\n\ndata: [DONE]\n\n"),
            "overloaded_error",
            "m",
        ),
    ];
    for (bytes, kind, message) in cases {
        let events = events_of(bytes.as_bytes());
        let errors: Vec<&Value> = events.iter().filter(|(name, _)| name == "error").map(|(_, event)| event).collect();
        let expected = json!({ "type": "error", "error": { "type": kind, "message": message } });
        assert_eq!(errors, [&expected]);
        assert_eq!(events.last().expect("an event").1, expected);
    }
    let mut translator = StreamTranslator::new("m", 0);
    translator.read(&sse(&[json!({ "choices": [{ "delta": {}, "finish_reason": "stop" }] })]));
    assert!(translator.read(b"data: x\n\n").is_empty());
    assert!(translator.fail(502, "late").is_empty() && translator.read(start.as_bytes()).is_empty());
}

/// A piece of a response.
#[derive(Clone, Debug)]
enum Piece {
    Text(String),
    Thinking(String),
    Arguments(String),
    Call,
}

fn pieces() -> impl Strategy<Value = Vec<Piece>> {
    let piece = prop_oneof![
        ".{0,4}".prop_map(Piece::Text),
        ".{0,4}".prop_map(Piece::Thinking),
        ".{0,4}".prop_map(Piece::Arguments),
        Just(Piece::Call),
    ];
    proptest::collection::vec(piece, 0..24)
}

/// Chunks of the pieces, and the expected text by block type.
fn chunks_of(pieces: &[Piece]) -> (Vec<Value>, BTreeMap<&'static str, String>) {
    let (mut chunks, mut texts, mut n_calls) = (Vec::new(), BTreeMap::<_, String>::new(), 0);
    let mut is_call_open = false;
    for piece in pieces {
        let delta = match piece {
            Piece::Text(text) => {
                texts.entry("text").or_default().push_str(text);
                is_call_open &= text.is_empty();
                json!({ "content": text })
            }
            Piece::Thinking(text) => {
                texts.entry("thinking").or_default().push_str(text);
                is_call_open &= text.is_empty();
                json!({ "reasoning_content": text })
            }
            Piece::Arguments(text) if is_call_open => {
                texts.entry("tool_use").or_default().push_str(text);
                json!({ "tool_calls": [{ "index": n_calls - 1, "function": { "arguments": text } }] })
            }
            Piece::Arguments(_) | Piece::Call => {
                n_calls += 1;
                is_call_open = true;
                json!({ "tool_calls": [{ "index": n_calls - 1, "id": n_calls.to_string(), "function": { "name": "f" } }] })
            }
        };
        chunks.push(json!({ "id": "1", "choices": [{ "index": 0, "delta": delta }] }));
    }
    chunks.push(json!({ "id": "1", "choices": [{ "index": 0, "delta": {}, "finish_reason": "stop" }] }));
    (chunks, texts)
}

proptest! {
    /// Also for any line ends, and for data over several lines.
    #[test]
    fn any_split_gives_the_same_well_formed_events(
        pieces in pieces(),
        line_end in prop_oneof![Just("\n"), Just("\r\n"), Just("\r")],
        is_pretty: bool,
        cuts in proptest::collection::vec(any::<u16>(), 0..12),
    ) {
        let (chunks, texts) = chunks_of(&pieces);
        let events = events_of(&sse(&chunks));
        let json = |chunk: &Value| if is_pretty { format!("{chunk:#}") } else { chunk.to_string() };
        let data: String = chunks.iter().map(|chunk| format!("data: {}\n\n", json(chunk).replace('\n', "\ndata: "))).collect();
        let bytes = format!("{data}data: [DONE]\n\n").replace('\n', line_end).into_bytes();
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| usize::from(*cut) % (bytes.len() + 1)).collect();
        cuts.extend([0, bytes.len()]);
        cuts.sort_unstable();
        let mut translator = StreamTranslator::new("m", 3);
        let mut split = Vec::new();
        for range in cuts.windows(2) {
            split.extend(translator.read(&bytes[range[0]..range[1]]));
        }
        split.extend(translator.end());
        prop_assert_eq!(parsed(&split), events.clone());
        prop_assert_eq!(&events.last().expect("an event").0, "message_stop");
        prop_assert_eq!(events.iter().filter(|(name, _)| name == "message_stop").count(), 1);
        let mut found = BTreeMap::<&str, String>::new();
        for block in blocks_of(&events) {
            let (kind, field) = match block["type"].as_str().expect("a type") {
                "text" => ("text", "text"),
                "thinking" => ("thinking", "thinking"),
                _ => ("tool_use", "partial"),
            };
            found.entry(kind).or_default().push_str(block[field].as_str().expect("text"));
        }
        for (kind, text) in texts {
            prop_assert_eq!(found.get(kind).cloned().unwrap_or_default(), text);
        }
    }

    #[test]
    fn any_bytes_give_well_formed_events(bytes in "(data: |\\{|\\}|\"|choices|\\[|\\]|:|,|delta|content|error|\n|.){0,60}") {
        let events = events_of(bytes.as_bytes());
        blocks_of(&events);
        let last = &events.last().expect("an event").0;
        prop_assert!(last == "error" || last == "message_stop");
    }
}
