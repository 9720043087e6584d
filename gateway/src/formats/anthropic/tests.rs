//! Examples and properties of the conversions.

use std::collections::BTreeMap;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::{Purpose, StreamTranslator, chat_body, error_body, error_message, message};
use crate::formats::openai::ApiError;

fn chat(body: Value) -> Result<Value, ApiError> {
    let mut body = body;
    let fields = body.as_object_mut().expect("an object");
    fields.entry("max_tokens").or_insert(json!(5));
    let chat = chat_body(body.to_string().as_bytes(), Purpose::Generate)?;
    Ok(serde_json::from_slice(&chat).expect("JSON"))
}

fn messages_of(messages: Value) -> Value {
    chat(json!({ "messages": messages })).expect("valid")["messages"].take()
}

fn rejection(body: Value) -> String {
    let error = chat(body).expect_err("rejected");
    assert_eq!(error.status.as_u16(), 400);
    error.message
}

#[test]
fn system_is_text_or_blocks_without_a_billing_header() {
    let user = json!([{ "role": "user", "content": "Hi" }]);
    let system = |system: Value| chat(json!({ "system": system, "messages": user.clone() })).expect("valid");
    assert_eq!(system(json!("a\n\"b"))["messages"][0], json!({ "role": "system", "content": "a\n\"b" }));
    let blocks = json!([
        { "type": "text", "text": "x-anthropic-billing-header: cch=12" },
        { "type": "text", "text": "a", "cache_control": { "type": "ephemeral" } },
        { "type": "text", "text": "b\u{e9}" },
    ]);
    assert_eq!(system(blocks)["messages"][0], json!({ "role": "system", "content": "ab\u{e9}" }));
    assert_eq!(system(json!([]))["messages"], json!([{ "role": "user", "content": "Hi" }]));
    assert_eq!(system(Value::Null)["messages"], json!([{ "role": "user", "content": "Hi" }]));
}

#[test]
fn blocks_of_a_user_become_parts() {
    let content = json!([
        { "type": "text", "text": "Compare", "cache_control": { "type": "ephemeral" } },
        { "type": "image", "source": { "type": "base64", "media_type": "image/png", "data": "AAA=" } },
        { "type": "image", "source": { "type": "url", "url": "https://example.com/a.png" } },
        { "type": "document", "title": "T", "source": { "type": "text", "media_type": "text/plain", "data": "D" } },
        { "type": "document", "source": { "type": "content", "content": [{ "type": "text", "text": "E" }] } },
    ]);
    let expected = json!([{ "role": "user", "content": [
        { "type": "text", "text": "Compare" },
        { "type": "image_url", "image_url": { "url": "data:image/png;base64,AAA=" } },
        { "type": "image_url", "image_url": { "url": "https://example.com/a.png" } },
        { "type": "text", "text": "T\nD" },
        { "type": "text", "text": "E" },
    ] }]);
    assert_eq!(messages_of(json!([{ "role": "user", "content": content }])), expected);
    let single =
        json!([{ "role": "user", "content": [{ "type": "text", "text": "" }, { "type": "text", "text": "a" }] }]);
    assert_eq!(messages_of(single), json!([{ "role": "user", "content": "a" }]));
}

#[test]
fn tool_use_and_results_become_calls_and_tool_messages() {
    let messages = json!([
        { "role": "user", "content": "Weather?" },
        { "role": "assistant", "content": [
            { "type": "thinking", "thinking": "Ask the tool.", "signature": "s" },
            { "type": "redacted_thinking", "data": "x" },
            { "type": "text", "text": "One moment." },
            { "type": "tool_use", "id": "t1", "name": "weather", "input": { "city": "Bern" } },
            { "type": "tool_use", "id": "t2", "name": "time", "input": {} },
        ] },
        { "role": "user", "content": [
            { "type": "tool_result", "tool_use_id": "t1", "content": "sunny" },
            { "type": "tool_result", "tool_use_id": "t2", "is_error": true, "content": [
                { "type": "text", "text": "no" }, { "type": "text", "text": "clock" },
                { "type": "image", "source": { "type": "url", "url": "u" } },
            ] },
            { "type": "tool_result", "tool_use_id": "t3" },
            { "type": "text", "text": "Go on." },
        ] },
        { "role": "system", "content": "Be brief." },
        { "role": "assistant", "content": [] },
    ]);
    let call = |id: &str, name: &str, arguments: &str| json!({ "id": id, "type": "function", "function": { "name": name, "arguments": arguments } });
    let expected = json!([
        { "role": "user", "content": "Weather?" },
        { "role": "assistant", "reasoning": "Ask the tool.", "reasoning_content": "Ask the tool.",
          "content": "One moment.", "tool_calls": [call("t1", "weather", r#"{"city":"Bern"}"#), call("t2", "time", "{}")] },
        { "role": "tool", "tool_call_id": "t1", "content": "sunny" },
        { "role": "tool", "tool_call_id": "t2", "content": "no\nclock" },
        { "role": "tool", "tool_call_id": "t3", "content": "" },
        { "role": "user", "content": [
            { "type": "image_url", "image_url": { "url": "u" } }, { "type": "text", "text": "Go on." }
        ] },
        { "role": "system", "content": "Be brief." },
        { "role": "assistant", "content": "" },
    ]);
    assert_eq!(messages_of(messages), expected);
}

#[test]
fn fields_are_converted() {
    let body = json!({
        "model": "m", "max_tokens": 7, "stop_sequences": ["a", "b"], "temperature": 0.5, "top_p": 1, "top_k": 3,
        "stream": true, "metadata": { "user_id": "u" }, "thinking": { "type": "enabled", "budget_tokens": 1024 },
        "output_config": { "effort": "max", "format": { "type": "json_schema", "schema": { "type": "object" } } },
        "cache_salt": "s", "session_id": "i", "service_tier": "auto", "context_management": {},
        "tools": [
            { "name": "f", "description": "F", "input_schema": { "type": "object" }, "cache_control": {} },
            { "type": "custom", "name": "g", "input_schema": {} },
        ],
        "tool_choice": { "type": "tool", "name": "f", "disable_parallel_tool_use": true },
        "messages": [{ "role": "user", "content": "Hi" }],
    });
    let expected = json!({
        "model": "m", "max_tokens": 7, "stop": ["a", "b"], "temperature": 0.5, "top_p": 1, "top_k": 3,
        "stream": true, "stream_options": { "include_usage": true }, "user": "u", "reasoning_effort": "high",
        "chat_template_kwargs": { "enable_thinking": true, "thinking": true },
        "response_format": {
            "type": "json_schema", "json_schema": { "name": "response", "schema": { "type": "object" } },
        },
        "cache_salt": "s", "session_id": "i",
        "tools": [
            { "type": "function", "function": { "name": "f", "description": "F", "parameters": { "type": "object" } } },
            { "type": "function", "function": { "name": "g", "parameters": {} } },
        ],
        "tool_choice": { "type": "function", "function": { "name": "f" } }, "parallel_tool_calls": false,
        "messages": [{ "role": "user", "content": "Hi" }],
    });
    assert_eq!(chat(body.clone()).expect("valid"), expected);
    let counted = chat_body(body.to_string().as_bytes(), Purpose::Count).expect("valid");
    let counted: Value = serde_json::from_slice(&counted).expect("JSON");
    assert_eq!((&counted["max_tokens"], &counted["stream"]), (&Value::Null, &Value::Null));
    assert_eq!((&counted["tools"], &counted["messages"]), (&expected["tools"], &expected["messages"]));
}

#[test]
fn tool_choices_and_thinking_have_counterparts() {
    let tools = json!([{ "name": "f", "input_schema": {} }]);
    let of = |kind: &str, tools: &Value| {
        let body =
            json!({ "messages": [{ "role": "user", "content": "" }], "tools": tools, "tool_choice": { "type": kind } });
        chat(body).map(|mut chat| chat["tool_choice"].take())
    };
    for (kind, expected) in [("auto", json!("auto")), ("any", json!("required")), ("none", json!("none"))] {
        assert_eq!(of(kind, &tools).expect("valid"), expected);
    }
    assert_eq!(of("auto", &json!([])).expect("valid"), Value::Null, "engines reject a choice without tools");
    assert!(of("any", &json!([])).is_err() && of("other", &tools).is_err());
    let thinking = |kind: &str| {
        let body = json!({ "messages": [{ "role": "user", "content": "" }], "thinking": { "type": kind } });
        chat(body).map(|mut chat| chat["chat_template_kwargs"]["enable_thinking"].take())
    };
    assert_eq!(thinking("adaptive").expect("valid"), json!(true));
    assert_eq!(thinking("disabled").expect("valid"), json!(false));
    assert!(thinking("other").is_err());
}

#[test]
fn content_without_a_counterpart_is_rejected_by_name() {
    let user = |block: Value| json!({ "messages": [{ "role": "user", "content": [block] }] });
    let cases = [
        (user(json!({ "type": "server_tool_use" })), "messages[0].content[0]: the block type \"server_tool_use\""),
        (user(json!({ "type": "image", "source": { "type": "file", "file_id": "f" } })), "image source type \"file\""),
        (user(json!({ "type": "document", "source": { "type": "base64" } })), "document source type \"base64\""),
        (user(json!({ "text": "a" })), "messages[0].content[0] has no type"),
        (user(json!({ "type": "text" })), "messages[0].content[0].text must be a string"),
        (json!({ "messages": [{ "role": "tool", "content": "" }] }), "messages[0].role must be user or assistant"),
        (json!({ "messages": [{ "role": "user" }] }), "messages[0] has no content"),
        (json!({ "messages": [{ "role": "user", "content": 1 }] }), "messages[0].content must be"),
        (json!({ "messages": "Hi" }), "messages must be a list"),
        (json!({ "messages": [] }), "messages must not be empty"),
        (json!({}), "the body has no messages"),
        (json!({ "messages": [{ "role": "user", "content": "" }], "max_tokens": 0 }), "max_tokens must be"),
        (json!({ "messages": [{ "role": "user", "content": "" }], "stream": 1 }), "stream must be"),
        (json!({ "messages": [{ "role": "user", "content": "" }], "stop_sequences": [1] }), "stop_sequences must be"),
        (json!({ "messages": [{ "role": "user", "content": "" }], "mcp_servers": [{ "url": "u" }] }), "mcp_servers"),
        (
            json!({ "messages": [{ "role": "user", "content": "" }], "tools": [{ "type": "web_search_20250305", "name": "w" }] }),
            "tools[0]: the tool type \"web_search_20250305\" is not supported",
        ),
    ];
    for (body, expected) in cases {
        let message = rejection(body);
        assert!(message.contains(expected), "{message}");
    }
    for body in [&b"[]"[..], b"{", b"", b"\xff", b"{\"model\":1,\"model\":2}"] {
        assert!(chat_body(body, Purpose::Generate).is_err());
    }
}

fn converted(chat: Value) -> Value {
    let message = message(chat.to_string().as_bytes(), "m").expect("a chat response");
    serde_json::from_slice(&message).expect("JSON")
}

#[test]
fn responses_are_converted() {
    let chat = json!({
        "id": "chatcmpl-9", "choices": [{ "finish_reason": "tool_calls", "stop_reason": null, "message": {
            "role": "assistant", "content": "One moment.", "reasoning": "Ask.", "tool_calls": [
                { "id": "t1", "type": "function", "function": { "name": "f", "arguments": "{\"a\": 1}" } },
                { "type": "function", "function": { "name": "g", "arguments": "" } },
                { "id": "t3", "type": "function", "function": { "name": "h", "arguments": "oops" } },
            ],
        } }],
        "usage": { "prompt_tokens": 10, "completion_tokens": 4, "prompt_tokens_details": { "cached_tokens": 8 } },
    });
    let expected = json!({
        "id": "msg_9", "type": "message", "role": "assistant", "model": "m", "content": [
            { "type": "thinking", "thinking": "Ask.", "signature": "unsigned" },
            { "type": "text", "text": "One moment." },
            { "type": "tool_use", "id": "t1", "name": "f", "input": { "a": 1 } },
            { "type": "tool_use", "id": "toolu_9_1", "name": "g", "input": {} },
            { "type": "tool_use", "id": "t3", "name": "h", "input": { "arguments": "oops" } },
        ],
        "stop_reason": "tool_use", "stop_sequence": null,
        "usage": {
            "input_tokens": 2, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 8, "output_tokens": 4,
        },
    });
    assert_eq!(converted(chat), expected);
    for none in ["", "[]", "{}", r#"{"choices":[]}"#, r#"{"choices":[{"message":7}]}"#] {
        assert_eq!(message(none.as_bytes(), "m"), None, "{none}");
    }
}

#[test]
fn stop_reasons_have_counterparts() {
    let cases = [
        (json!({ "finish_reason": "stop" }), "end_turn", Value::Null),
        (json!({ "finish_reason": "stop", "stop_reason": 151_645 }), "end_turn", Value::Null),
        (json!({ "finish_reason": "stop", "stop_reason": "END" }), "stop_sequence", json!("END")),
        (json!({ "finish_reason": "stop", "matched_stop": "END" }), "stop_sequence", json!("END")),
        (json!({ "finish_reason": "length" }), "max_tokens", Value::Null),
        (json!({ "finish_reason": "content_filter" }), "refusal", Value::Null),
        (json!({ "finish_reason": null }), "end_turn", Value::Null),
    ];
    for (mut choice, reason, sequence) in cases {
        choice["message"] = json!({ "content": "a" });
        let message = converted(json!({ "choices": [choice] }));
        assert_eq!((&message["stop_reason"], &message["stop_sequence"]), (&json!(reason), &sequence));
        let mut delta = choice.clone();
        delta["delta"] = json!({ "content": "a" });
        let events = events_of(&sse(&[json!({ "choices": [delta] })]));
        let delta = &events[events.len() - 2].1["delta"];
        assert_eq!((&delta["stop_reason"], &delta["stop_sequence"]), (&json!(reason), &sequence));
    }
}

#[test]
fn errors_are_converted() {
    let body: Value = serde_json::from_str(&error_body(529, "busy", Some("r"))).expect("JSON");
    let expected =
        json!({ "type": "error", "error": { "type": "overloaded_error", "message": "busy" }, "request_id": "r" });
    assert_eq!(body, expected);
    let cases = [
        (r#"{"error":{"message":"m","code":400}}"#, Some("m")),
        (r#"{"error":"m"}"#, Some("m")),
        (r#"{"object":"error","message":"m","code":400}"#, Some("m")),
        (r#"{"detail":"m"}"#, Some("m")),
        (r#"{"detail":[1]}"#, Some("[1]")),
        ("<html>", None),
        ("{}", None),
    ];
    for (body, message) in cases {
        assert_eq!(error_message(body.as_bytes()).as_deref(), message, "{body}");
    }
}

fn sse(chunks: &[Value]) -> Vec<u8> {
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

fn events_of(bytes: &[u8]) -> Vec<(String, Value)> {
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

#[test]
fn failures_end_with_one_error() {
    let start = "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n";
    let interleaved: String = [0, 1, 0]
        .map(|index| {
            let call =
                json!({ "index": index, "id": index.to_string(), "function": { "name": "f", "arguments": "{" } });
            format!("data: {}\n\n", json!({ "choices": [{ "delta": { "tool_calls": [call] } }] }))
        })
        .concat();
    let cases = [
        (format!("{start}data: {{\"error\":{{\"message\":\"m\",\"code\":429}}}}\n\n"), "rate_limit_error", "m"),
        (format!("{start}data: {{\"error\":\"m\"}}\n\ndata: [DONE]\n\n"), "api_error", "m"),
        ("data: {\"error\":{}}\n\n".to_owned(), "api_error", "the worker reported an error"),
        (start.to_owned(), "api_error", "the response of the worker ended early"),
        (String::new(), "api_error", "the response of the worker ended early"),
        (format!("data: {}", "a".repeat(5 << 20)), "api_error", "the worker sent an event that is too long"),
        (interleaved, "api_error", "the worker interleaved the arguments of several tool calls"),
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
    assert!(translator.is_over());
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
    #[test]
    fn any_split_gives_the_same_well_formed_events(pieces in pieces(), cuts in proptest::collection::vec(any::<u16>(), 0..12)) {
        let (chunks, texts) = chunks_of(&pieces);
        let bytes = sse(&chunks);
        let events = events_of(&bytes);
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

    #[test]
    fn any_text_is_converted_to_the_same_text(system in ".{0,20}", text in ".{0,20}", result in ".{0,20}") {
        let body = json!({ "max_tokens": 1, "system": [{ "type": "text", "text": system }], "messages": [
            { "role": "user", "content": [{ "type": "tool_result", "tool_use_id": "t", "content": result }] },
            { "role": "assistant", "content": text },
        ] });
        let chat = chat_body(body.to_string().as_bytes(), Purpose::Generate).expect("valid");
        let chat: Value = serde_json::from_slice(&chat).expect("JSON");
        let texts: Vec<&str> =
            chat["messages"].as_array().expect("a list").iter().map(|message| message["content"].as_str().expect("text")).collect();
        let expected: Vec<&str> = [system.as_str()].into_iter().filter(|text| !text.is_empty()).chain([&*result, &*text]).collect();
        prop_assert_eq!(texts, expected);
    }
}
