//! Properties of joined streams: any split of the bytes, any point of failure.

use axum::body::Bytes;
use pointsman::{AnswerKind, AnswerReader};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::{ResumableRequest, Resume, StreamJoiner, StreamState};
use crate::formats::openai::Endpoint;

fn chat(more: Value) -> Value {
    let mut body = json!({ "model": "m", "messages": [{ "role": "user", "content": "hi" }], "stream": true });
    body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    body
}

fn completion(more: Value) -> Value {
    let mut body = json!({ "model": "m", "prompt": "one", "stream": true });
    body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    body
}

fn parse(endpoint: Endpoint, body: &Value) -> Option<ResumableRequest> {
    ResumableRequest::parse(endpoint, &body.to_string().into())
}

fn sound(endpoint: Endpoint, body: &Value) -> ResumableRequest {
    parse(endpoint, body).unwrap_or_else(|| panic!("not resumable: {body}"))
}

/// One object per line.
fn objects(lines: &str) -> impl Iterator<Item = Value> {
    lines.trim().lines().map(|line| serde_json::from_str(line).expect("an object"))
}

#[test]
fn requests_with_state_outside_of_the_text_are_unsound() {
    let unsound = r#"
{ "n": 2 }
{ "best_of": 3 }
{ "seed": 1 }
{ "logprobs": true }
{ "logprobs": 0 }
{ "top_logprobs": 2 }
{ "prompt_logprobs": 0 }
{ "echo": true }
{ "suffix": "x" }
{ "tools": [{}] }
{ "tools": [{}], "tool_choice": "auto" }
{ "response_format": { "type": "json_object" } }
{ "guided_regex": "a*" }
{ "structured_outputs": {} }
{ "grammar": "root" }
{ "use_beam_search": true }
{ "frequency_penalty": 0.5 }
{ "presence_penalty": -1 }
{ "continue_final_message": true }
{ "add_generation_prompt": false }
{ "max_tokens": 1.5 }
{ "stream": false }
"#;
    for more in objects(unsound) {
        assert!(parse(Endpoint::Chat, &chat(more.clone())).is_none(), "{more}");
        assert!(parse(Endpoint::Completions, &completion(more.clone())).is_none(), "{more}");
    }
    let sounds = r#"
{}
{ "n": 1, "best_of": 1, "seed": null, "logprobs": false, "echo": false }
{ "tools": [] }
{ "tools": [{}], "tool_choice": "none" }
{ "frequency_penalty": 0.0, "presence_penalty": 0, "repetition_penalty": 1.1 }
{ "stop": ["x"], "temperature": 0.7, "min_tokens": 3 }
"#;
    for more in objects(sounds) {
        assert!(parse(Endpoint::Chat, &chat(more.clone())).is_some(), "{more}");
        assert!(parse(Endpoint::Completions, &completion(more.clone())).is_some(), "{more}");
    }
    let open = chat(json!({ "messages": [{ "role": "assistant", "content": "I" }] }));
    assert!(parse(Endpoint::Chat, &open).is_none());
    for prompt in [json!(["one"]), json!([[1, 2]]), json!([]), json!(7)] {
        assert!(parse(Endpoint::Completions, &completion(json!({ "prompt": prompt }))).is_none());
    }
    let ids = json!({ "prompt": [1, 2], "stop": "x", "return_token_ids": true });
    assert!(parse(Endpoint::Completions, &completion(ids)).is_none(), "text is withheld for stop strings");
    for endpoint in [Endpoint::Responses, Endpoint::Messages, Endpoint::Embeddings, Endpoint::CountTokens] {
        assert!(parse(endpoint, &chat(json!({}))).is_none());
    }
}

fn text_event(text: &str) -> String {
    format!("data: {}\n\n", json!({ "id": "a", "choices": [{ "index": 0, "text": text, "finish_reason": null }] }))
}

fn resumed_body(request: &ResumableRequest, events: &[String]) -> Option<Value> {
    let mut joiner = StreamJoiner::new(100);
    for event in events {
        joiner.push(event.clone().into());
    }
    match request.resume(joiner.output()) {
        Resume::Send(body) => Some(serde_json::from_slice(&body).expect("JSON")),
        Resume::Complete | Resume::Unknown => None,
    }
}

#[test]
fn resume_bodies_continue_the_output() {
    let events = [text_event(" \"two\"\n"), text_event(" three")];
    let request = sound(Endpoint::Completions, &completion(json!({ "max_tokens": 9, "min_tokens": 4 })));
    let body = resumed_body(&request, &events).expect("not complete");
    assert_eq!(body, completion(json!({ "prompt": "one \"two\"\n three", "max_tokens": 7, "min_tokens": 2 })));
    let unlimited = resumed_body(&sound(Endpoint::Completions, &completion(json!({}))), &events).expect("not complete");
    assert_eq!(unlimited["max_tokens"], 14, "16 is the default");
    let short = sound(Endpoint::Completions, &completion(json!({ "max_tokens": 2 })));
    assert_eq!(resumed_body(&short, &events), None);

    let request = sound(Endpoint::Chat, &chat(json!({ "max_completion_tokens": 5, "max_tokens": 2 })));
    let delta = |text: &str| format!("data: {}\n\n", json!({ "choices": [{ "delta": { "content": text } }] }));
    let body = resumed_body(&request, &[delta(" two"), delta(" three")]).expect("not complete");
    let messages = json!([{ "role": "user", "content": "hi" }, { "role": "assistant", "content": " two three" }]);
    let resume = json!({ "messages": messages, "continue_final_message": true, "add_generation_prompt": false,
        "max_completion_tokens": 3, "max_tokens": 1 });
    assert_eq!(body, chat(resume));
    let unlimited = resumed_body(&sound(Endpoint::Chat, &chat(json!({}))), &[delta("x")]).expect("not complete");
    assert_eq!(unlimited.get("max_tokens"), None);
}

fn ids_event(text: &str, ids: &[u32]) -> String {
    format!("data: {}\n\n", json!({ "choices": [{ "index": 0, "text": text, "token_ids": ids }] }))
}

#[test]
fn unread_events_keep_no_buffer_of_a_connection() {
    let event = text_event("x");
    let buffer = Bytes::from([event.as_bytes(), &[0; 8192]].concat());
    let mut joiner = StreamJoiner::new(100);
    assert_eq!(joiner.push(buffer.slice(..event.len())), event);
    assert!(buffer.is_unique());
    assert_eq!(joiner.output().tokens(), 1);
}

#[test]
fn prompts_of_token_ids_need_the_ids_of_the_output() {
    let more = |more: Value| {
        let mut body = completion(json!({ "prompt": [1, 2], "return_token_ids": true }));
        body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        body
    };
    assert!(parse(Endpoint::Completions, &more(json!({ "return_token_ids": false }))).is_none());
    let request = sound(Endpoint::Completions, &more(json!({})));
    let mut joiner = StreamJoiner::new(100);
    assert_eq!(joiner.push(ids_event(" a", &[7, 8]).into()), ids_event(" a", &[7, 8]));
    assert_eq!((joiner.state(), joiner.output().tokens()), (StreamState::Resumable, 2));
    let Resume::Send(body) = request.resume(joiner.output()) else { panic!("the ids are known") };
    let body: Value = serde_json::from_slice(&body).expect("JSON");
    assert_eq!(body, more(json!({ "prompt": [1, 2, 7, 8], "max_tokens": 14 })));
    let mut other = joiner.clone();
    joiner.push(text_event(" b").into());
    assert_eq!(request.resume(joiner.output()), Resume::Unknown, "an event without ids");
    other.push(ids_event("", &[9]).into());
    assert_eq!(request.resume(other.output()), Resume::Unknown, "the client has an id without its text");
}

#[test]
fn other_output_and_long_output_are_not_resumed() {
    let state = |events: &[Value]| {
        let mut joiner = StreamJoiner::new(3);
        for event in events {
            let sent = format!("data: {event}\n\n");
            assert_eq!(joiner.push(sent.clone().into()), sent, "the first attempt passes unchanged");
        }
        joiner.state()
    };
    let delta = |delta: Value| json!({ "choices": [{ "index": 0, "delta": delta, "finish_reason": null }] });
    let text = || delta(json!({ "content": "a" }));
    assert_eq!(state(&[delta(json!({ "role": "assistant", "content": "" })), text(), text()]), StreamState::Resumable);
    assert_eq!(state(&[text(), text(), text(), text()]), StreamState::TooLong);
    assert_eq!(state(&[delta(json!({ "content": "a".repeat(193) }))]), StreamState::TooLong);
    for other in ["reasoning", "reasoning_content", "refusal"] {
        assert_eq!(state(&[text(), delta(json!({ other: "x" }))]), StreamState::Unsound, "{other}");
        assert_eq!(state(&[delta(json!({ "content": "a", other: null }))]), StreamState::Resumable, "{other}");
    }
    assert_eq!(state(&[delta(json!({ "tool_calls": [{}] }))]), StreamState::Unsound);
    assert_eq!(state(&[delta(json!({ "content": "a", "tool_calls": [] }))]), StreamState::Resumable);
    assert_eq!(state(&[json!({ "choices": [{ "index": 1, "delta": {} }] })]), StreamState::Unsound);
    assert_eq!(state(&[json!("text")]), StreamState::Unsound);
    assert_eq!(state(&[json!({ "error": { "code": 400 } })]), StreamState::Finished);
    assert_eq!(state(&[json!({ "choices": [{ "delta": {}, "finish_reason": "stop" }] })]), StreamState::Finished);
}

#[test]
fn a_server_error_is_withheld_while_the_stream_can_be_resumed() {
    let error = "data: {\"error\":{\"message\":\"died\",\"code\":500}}\n\ndata: [DONE]\n\n";
    let mut joiner = StreamJoiner::new(100);
    let text = text_event(" a");
    assert_eq!(joiner.push((text.clone() + error).into()), text);
    assert!(joiner.has_failed() && joiner.state() == StreamState::Resumable);
    let mut resumed = joiner.clone();
    assert_eq!(joiner.error(), error, "a stream that is not resumed");
    resumed.resume();
    assert_eq!((resumed.has_failed(), resumed.push(text.clone().into())), (false, text.into()));
}

#[test]
fn unknown_framing_passes_at_once() {
    let mut joiner = StreamJoiner::new(100);
    assert_eq!(joiner.push("data: {}\r\rdata".into()), "data: {}\r\rdata");
    assert_eq!((joiner.push("x".into()), joiner.state()), ("x".into(), StreamState::Unsound));
    let mut joiner = StreamJoiner::new(100);
    assert_eq!(joiner.push("data: {}\r\n\r\nda".into()), "data: {}\r\n\r\n");
    assert_eq!(joiner.push("ta: []\n".into()), "");
    assert_eq!(joiner.finish(), "data: []\n", "a stream without a last blank line");
}

#[test]
fn a_stream_at_its_maximum_length_is_completed() {
    let more = json!({ "max_tokens": 1, "stream_options": { "include_usage": true } });
    let request = sound(Endpoint::Chat, &chat(more));
    let mut joiner = StreamJoiner::new(100);
    joiner.push(
        "data: {\"id\":\"a\",\"created\":5,\"model\":\"m\",\"choices\":[{\"delta\":{\"content\":\"x\"}}]}\n\n".into(),
    );
    assert_eq!(request.resume(joiner.output()), Resume::Complete);
    let end = joiner.complete(&request, Some(9));
    let events = events(&end);
    assert_eq!(events[0]["choices"][0]["finish_reason"], "length");
    assert_eq!(
        (&events[0]["id"], &events[0]["created"], &events[0]["object"]),
        (&json!("a"), &json!(5), &json!("chat.completion.chunk"))
    );
    let usage = json!({ "prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10 });
    assert_eq!(events[1]["usage"], usage);
    assert!(end.ends_with(b"data: [DONE]\n\n"));
}

/// Data of the events, except for the end mark.
fn events(bytes: &[u8]) -> Vec<Value> {
    let text = str::from_utf8(bytes).expect("text");
    let whole = text.split_inclusive("\n\n").map(|event| event.strip_suffix("\n\n").expect("a whole event"));
    let data = whole.map(|event| event.strip_prefix("data: ").expect("a data line").replace("\ndata: ", "\n"));
    data.filter(|data| data != "[DONE]").map(|data| serde_json::from_str(&data).expect("JSON")).collect()
}

/// Stream of one attempt with these texts. With two data lines in each event, or one.
fn attempt(nth: usize, (is_chat, is_split): (bool, bool), texts: &[String], prompt_tokens: usize) -> String {
    let chunk = |choices: Value, usage: Value| {
        let mut chunk =
            json!({ "id": format!("id-{nth}"), "created": nth, "model": format!("m-{nth}"), "choices": choices });
        if !usage.is_null() {
            chunk["usage"] = usage;
        }
        let lines = if is_split { chunk.to_string().replacen(",\"", ",\ndata: \"", 1) } else { chunk.to_string() };
        format!("data: {lines}\n\n")
    };
    let choice = |text: &str, finish: Option<&str>| match is_chat {
        true => json!([{ "index": 0, "delta": { "content": text }, "finish_reason": finish }]),
        false => json!([{ "index": 0, "text": text, "finish_reason": finish }]),
    };
    let mut stream = String::new();
    if is_chat {
        stream += &chunk(json!([{ "index": 0, "delta": { "role": "assistant", "content": "" } }]), Value::Null);
    }
    for text in texts {
        stream += &chunk(choice(text, None), Value::Null);
    }
    stream += &chunk(choice("", Some("stop")), Value::Null);
    let usage = json!({ "prompt_tokens": prompt_tokens, "completion_tokens": texts.len(),
        "total_tokens": prompt_tokens + texts.len() });
    stream += &chunk(json!([]), usage);
    stream + "data: [DONE]\n\n"
}

/// Pushes the bytes of an attempt in frames that end at these positions, or one frame per event. Returns the bytes for the
/// client.
fn push(joiner: &mut StreamJoiner, bytes: &[u8], cuts: Option<&[prop::sample::Index]>) -> Vec<u8> {
    let events = || (1..bytes.len()).filter(|at| bytes[..*at].ends_with(b"\n\n")).collect();
    let mut ends: Vec<usize> =
        cuts.map_or_else(events, |cuts| cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect());
    ends.push(bytes.len());
    ends.sort_unstable();
    let (mut sent, mut at, mut reader) = (Vec::new(), 0, AnswerReader::new(AnswerKind::Events));
    for end in ends {
        let frame = &bytes[at..end];
        reader.read(frame);
        let passes = reader.repeated_text().is_some_and(|text| joiner.push_text(frame, text));
        let frame = Bytes::copy_from_slice(frame);
        sent.extend_from_slice(&if passes { frame } else { joiner.push(frame) });
        at = end;
    }
    sent
}

fn texts() -> impl Strategy<Value = Vec<String>> {
    let text = prop_oneof![
        Just(" word".to_owned()),
        Just("\n\n".to_owned()),
        Just("data: {\"x\":1}\n\n".to_owned()),
        Just("日本\u{1F600}\"\\".to_owned()),
        "[a-z ]{1,5}",
    ];
    prop::collection::vec(text, 1..8)
}

proptest! {
    #[test]
    fn the_client_receives_each_event_once_for_any_split_and_failure(
        (is_chat, is_split) in any::<(bool, bool)>(),
        texts in texts(),
        cuts in prop::option::of(prop::collection::vec(any::<prop::sample::Index>(), 0..12)),
        breaks in prop::collection::vec(any::<prop::sample::Index>(), 0..4),
    ) {
        let more = json!({ "stream_options": { "include_usage": true }, "max_tokens": 1_000 });
        let (endpoint, body) =
            if is_chat { (Endpoint::Chat, chat(more)) } else { (Endpoint::Completions, completion(more)) };
        let request = sound(endpoint, &body);
        let mut joiner = StreamJoiner::new(1_000);
        let (mut sent, mut nth) = (Vec::new(), 0);
        for at in breaks {
            let done = joiner.output().tokens() as usize;
            let stream = attempt(nth, (is_chat, is_split), &texts[done..], 10 + done);
            let part = &stream.as_bytes()[..at.index(stream.len())];
            sent.extend(push(&mut joiner, part, cuts.as_deref()));
            if joiner.state() != StreamState::Resumable {
                prop_assert_eq!(joiner.state(), StreamState::Finished);
                return Ok(());
            }
            prop_assert!(events(&sent).len() <= texts.len() + 1, "only whole events are sent");
            let Resume::Send(resume) = request.resume(joiner.output()) else { panic!("the limit is far") };
            let resume: Value = serde_json::from_slice(&resume).expect("JSON");
            let output = texts[..joiner.output().tokens() as usize].concat();
            let continued = if is_chat {
                resume["messages"][1]["content"].as_str().unwrap_or_default().to_owned()
            } else {
                resume["prompt"].as_str().expect("text").strip_prefix("one").expect("the prompt").to_owned()
            };
            prop_assert_eq!(&continued, &output);
            prop_assert_eq!(&joiner.output().text, &output);
            joiner.resume();
            nth += 1;
        }
        let done = joiner.output().tokens() as usize;
        let stream = attempt(nth, (is_chat, is_split), &texts[done..], 10 + done);
        sent.extend(push(&mut joiner, stream.as_bytes(), cuts.as_deref()));
        sent.extend_from_slice(&joiner.finish());
        if nth == 0 {
            prop_assert_eq!(&sent[..], stream.as_bytes());
        }
        let all = events(&sent);
        let first = &all[0];
        let text = |event: &Value| {
            let choice = &event["choices"][0];
            let text = if is_chat { &choice["delta"]["content"] } else { &choice["text"] };
            text.as_str().unwrap_or_default().to_owned()
        };
        prop_assert_eq!(all.iter().map(text).collect::<String>(), texts.concat());
        for event in &all {
            for name in ["id", "created", "model"] {
                prop_assert_eq!(&event[name], &first[name]);
            }
        }
        let finishes = all.iter().filter(|event| event["choices"][0]["finish_reason"].is_string()).count();
        let roles = all.iter().filter(|event| event["choices"][0]["delta"]["role"].is_string()).count();
        let dones = String::from_utf8_lossy(&sent).matches("data: [DONE]\n\n").count();
        prop_assert_eq!((finishes, dones, roles), (1, 1, usize::from(is_chat)));
        let usage = json!({ "prompt_tokens": 10, "completion_tokens": texts.len(), "total_tokens": 10 + texts.len() });
        prop_assert_eq!(&all.last().expect("an event")["usage"], &usage);
    }
}
