use proptest::prelude::*;

use super::*;

fn events(text: &str) -> AnswerReader {
    read(AnswerKind::Events, text)
}

fn read(kind: AnswerKind, text: &str) -> AnswerReader {
    let mut reader = AnswerReader::new(kind);
    reader.read(text.as_bytes());
    reader.end();
    reader
}

fn usage(prompt: u32, output: u32, cached: Option<u32>) -> Option<Usage> {
    Some(Usage { prompt_tokens: Some(prompt), output_tokens: Some(output), cached_tokens: cached })
}

#[test]
fn completions_and_responses_are_counted() {
    let completions =
        "data: {\"choices\":[{\"index\":0,\"text\":\" a\"}]}\n\ndata: {\"choices\": [ { \"text\" : \"b\" } ]}\n\n";
    assert_eq!(events(completions).output_tokens(), 2);
    let responses = concat!(
        "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"a\"}\n\n",
        "event: response.output_text.done\ndata: {\"type\":\"response.output_text.done\",\"text\":\"a\"}\n\n",
    );
    assert_eq!(events(responses).output_tokens(), 1);
    let completed = concat!(
        r#"data: {"type":"response.completed","response":{"output":[{"content":[{"text":"a"}]}],"usage":"#,
        r#"{"input_tokens":5,"input_tokens_details":{"cached_tokens":4},"output_tokens":2}}}"#,
        "\n\n",
    );
    let whole = events(&format!("{responses}{completed}"));
    assert_eq!((whole.output_tokens(), whole.usage()), (2, usage(5, 2, Some(4))));
}

#[test]
fn lines_of_data_are_joined() {
    let event = "data: {\"choices\":[{\"text\":\"a\",\ndata:\ndata: \"finish_reason\":\"stop\"}],\ndata: \"usage\":{\"prompt_tokens\":5,\ndata: \"completion_tokens\":2}}";
    for line_end in ["\n", "\r\n", "\r"] {
        let mut reader = AnswerReader::new(AnswerKind::Events);
        event.replace('\n', line_end).bytes().for_each(|byte| reader.read(&[byte]));
        assert!(!reader.has_opened());
        reader.read([line_end, line_end].concat().as_bytes());
        assert_eq!((reader.usage(), reader.events(), reader.is_complete()), (usage(5, 2, None), 1, true));
    }
    assert_eq!(events("\u{feff}data: {\"error\":\ndata: \"dead\"}\n\n").error_status(), Some(500));
    let long = format!("data: {{\"text\":\n{}data: \"a\"}}\n\n", format!("data: {}\n", " 1".repeat(900)).repeat(90));
    assert_eq!(events(&long).stage, AnswerStage::Begun);
}

#[test]
fn memory_and_token_counts_are_bounded() {
    for kind in [AnswerKind::Events, AnswerKind::Json] {
        let mut reader = AnswerReader::new(kind);
        for length in [1, 999, 70_000, 3, 16_384, 40_000].into_iter().cycle().take(400) {
            reader.read(&vec![b'{'; length]);
            assert!(reader.held.capacity() <= 4 * LINE_BYTES_MAX, "{} bytes", reader.held.capacity());
        }
        reader.end();
        reader.read(b"\n\n");
        assert!(reader.held.capacity() <= HELD_BYTES_KEPT || kind == AnswerKind::Json);
    }
    let boast = events("data: {\"usage\":{\"completion_tokens\":99999999999999999999}}\n");
    assert_eq!(boast.usage().and_then(|usage| usage.output_tokens), Some(u32::MAX));
    assert!(boast.output_tokens() < 100);
}

#[test]
fn invalid_counts_are_omitted() {
    let said = |value: &str| {
        events(&format!("data: {{\"usage\":{{\"prompt_tokens\":1,\"completion_tokens\":{value}}}}}\n")).usage()
    };
    assert_eq!(said("7").and_then(|usage| usage.output_tokens), Some(7));
    for none in ["null", "-1", "\"7\"", "{}", "[7]", "true"] {
        assert_eq!(said(none), Some(Usage { prompt_tokens: Some(1), ..Usage::default() }), "{none}");
    }
}

fn chunk(delta: &str) -> String {
    format!("data: {{\"choices\":[{{\"index\":0,\"delta\":{delta},\"logprobs\":null,\"finish_reason\":null}}]}}\n\n")
}

const ROLE: &str = r#"{"role":"assistant","content":""}"#;

/// A chunk with only a role starts a stream, but does not complete the prefill.
#[test]
fn prefill_completes_with_output_and_not_with_a_role() {
    let opening = [
        chunk(ROLE),
        chunk(r#"{"role":"assistant","content":null}"#),
        "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":0}}\n\n".to_owned(),
        "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"error\":null}}\n\n".to_owned(),
        "data: {\"response\":{\"output\":[]},\"type\":\"response.in_progress\"}\n\n".to_owned(),
    ];
    for text in opening {
        let reader = events(&text);
        assert_eq!((reader.stage, reader.is_generating()), (AnswerStage::Opened, false), "{text}");
        assert!(!reader.is_complete(), "{text}");
    }
    let empty = events(&chunk(r#"{"content":""}"#));
    assert_eq!((empty.stage, empty.is_generating()), (AnswerStage::Begun, false), "a delta without output");
    let tokens = [
        chunk(r#"{"content":"a"}"#),
        chunk(r#"{"role":"assistant","content":"a"}"#),
        chunk(r#"{"reasoning_content":"a"}"#),
        chunk(r#"{"reasoning":"a"}"#),
        chunk(r#"{"refusal":"no"}"#),
        chunk(r#"{"tool_calls":[{"index":0}]}"#),
        chunk(r#"{"function_call":{"name":"f"}}"#),
        chunk(r#"{"content":""}"#).replace("\"logprobs\":null", "\"logprobs\":{\"content\":[]}"),
        chunk(ROLE).replace("\"finish_reason\":null", "\"finish_reason\":\"stop\""),
        "data: {\"choices\":[{\"text\":\" a\"}]}\n\n".to_owned(),
        "data: {\"type\":\"response.reasoning_text.delta\",\"delta\":\"a\"}\n\n".to_owned(),
        "data: {\"type\":\"response.output_item.added\",\"item\":{}}\n\n".to_owned(),
        "data: {\"object\":\"of another API\"}\n\n".to_owned(),
    ];
    for text in tokens {
        let reader = events(&(chunk(ROLE) + &text));
        assert_eq!((reader.stage, reader.is_generating()), (AnswerStage::Begun, true), "{text}");
    }
}

#[test]
fn streams_stop_without_tool_calls() {
    let stop = chunk("{}").replace("\"finish_reason\":null", r#""finish_reason":"stop""#);
    let messages = |reason: &str| format!(r#"data: {{"type":"message_delta","delta":{{"stop_reason":"{reason}"}}}}"#);
    let call = chunk(r#"{"tool_calls":[{"index":0}]}"#) + &stop;
    for (stream, is_stop) in [(stop, true), (call, false), (messages("end_turn"), true), (messages("tool_use"), false)]
    {
        let mut reader = events(&stream);
        reader.end();
        assert_eq!(reader.is_stop(), is_stop, "{stream}");
    }
}

#[test]
fn a_stream_is_complete_with_its_end_mark_or_a_finish_reason() {
    let token = chunk(r#"{"content":"a"}"#);
    let completed = r#"{"response":{"status":"completed"},"type":"response.completed"}"#;
    let long =
        format!("{{\"response\":{{\"text\":\"{}\"}},\"type\":\"response.completed\"}}", "a".repeat(LINE_BYTES_MAX));
    let ends = [
        "data: [DONE]\n\n".to_owned(),
        "data:[DONE]\r\n".to_owned(),
        chunk("{}").replace("\"finish_reason\":null", "\"finish_reason\":\"length\""),
        format!("data: {completed}\n\n"),
        format!("event: response.completed\ndata: {long}\n\n"),
        "data: {\"type\":\"response.incomplete\"}\n\n".to_owned(),
        "data: {\"error\":{\"message\":\"dead\",\"code\":500}}\n\n".to_owned(),
    ];
    for end in ends {
        assert!(!events(&token).is_complete());
        assert!(events(&format!("{token}{end}")).is_complete(), "{end:.60}");
    }
    assert!(!events(&format!("{token}event: response.output_text.delta\ndata: {long}\n\n")).is_complete());
    assert!(!events(&format!("{token}data: [DONE")).is_complete());
}

#[test]
fn invalid_data_before_the_first_event_invalidates_the_stream() {
    for garbage in [
        "data: garbage\n\n",
        "data: <html>\n\n",
        "data: [DONE]\n\n",
        "data: {\"choices\":[\n\n",
        "data: {} {}\n\n",
        "data: 7\n\ndata: {\"choices\":[]}\n\n",
        &format!("data: {}", "x".repeat(LINE_BYTES_MAX + 1)),
    ] {
        assert_eq!(events(garbage).stage, AnswerStage::Invalid, "{garbage:.40}");
    }
    for nothing in ["", ": comment\n\n", "data:\n\n", "retry: 10\n\n", "<html></html>\n"] {
        assert_eq!(events(nothing).stage, AnswerStage::Empty, "{nothing}");
    }
    let later = events(&format!("{}data: garbage\n\ndata: [DONE]\n\n", chunk(ROLE)));
    assert_eq!((later.stage, later.is_complete()), (AnswerStage::Begun, true));
}

/// Any form of an error event ends the stream with a status; an unknown error is one of the server.
#[test]
fn an_error_event_has_a_status() {
    let failed =
        |error: &str| format!(r#"data: {{"type":"response.failed","response":{{"status":"failed","error":{error}}}}}"#);
    let cases = [
        (500, r#"data: {"error":{"message":"EngineCore died","type":"InternalServerError","code":500}}"#),
        (500, r#"data: {"error":{"message":"dead","type":"server_error","code":"internal_error"}}"#),
        (503, r#"data: {"error":{"message":"dead","code":"503"}}"#),
        (500, r#"data: {"error":{"message":"dead"}}"#),
        (500, r#"data: {"error":"dead"}"#),
        (500, r#"data: {"error":["dead"]}"#),
        (500, r#"data: {"object":"error","message":"dead","type":"InternalServerError","code":500}"#),
        (500, r#"data: {"object":"error","message":"dead"}"#),
        (502, r#"data: {"code":502,"message":"dead"}"#),
        (500, "event: error\ndata: dead"),
        (500, "event: error\n: dead"),
        (500, r#"data: {"type":"error","error":{"type":"api_error","message":"dead"}}"#),
        (503, r#"data: {"type":"error","error":{"type":"overloaded_error","message":"dead"}}"#),
        (429, r#"data: {"type":"error","code":"rate_limit_exceeded","message":"slow"}"#),
        (503, r#"data: {"text":"","meta_info":{"finish_reason":{"type":"abort","message":"full","status_code":503}}}"#),
        (500, &failed(r#"{"code":"server_error","message":"dead"}"#)),
        (500, &failed("null")),
        (
            500,
            r#"data: {"id":"x","error":{"code":"server_error"},"choices":[{"delta":{"content":""},"finish_reason":"error"}]}"#,
        ),
        (500, r#"data: {"choices":[{"index":0,"delta":{},"finish_reason":"error"}]}"#),
        (400, r#"data: {"error":{"message":"grammar","type":"BadRequestError","code":400}}"#),
        (400, r#"data: {"error":{"message":"long","type":"invalid_request_error","code":"context_length_exceeded"}}"#),
        (400, r#"data: {"error":"Input validation error: too many tokens","error_type":"validation"}"#),
        (400, r#"data: {"error":{"message":"This model's maximum context length is 4096 tokens"}}"#),
        (400, &failed(r#"{"code":"invalid_prompt","message":"no"}"#)),
        (404, r#"data: {"error":{"type":"NotFoundError","message":"no adapter"}}"#),
    ];
    for (status, text) in cases {
        for before in ["", &chunk(ROLE), &chunk(r#"{"content":"a"}"#)] {
            let reader = events(&format!("{before}{text}\n\ndata: [DONE]\n\n"));
            assert_eq!((reader.error_status(), reader.is_complete()), (Some(status), true), "{text}");
            assert_eq!((reader.is_decided(), reader.is_invalid()), (true, false), "{text}");
        }
        assert!(!events(&format!("{text}\n\n")).is_generating(), "{text}");
        if let Some(body) = text.strip_prefix("data: ") {
            let reader = read(AnswerKind::Json, &format!(" {body}\n"));
            assert_eq!((reader.error_status(), reader.is_complete()), (Some(status), true), "{body}");
        }
    }
    for none in [
        r#"data: {"error":null,"choices":[{"text":"a"}]}"#,
        r#"data: {"error":"","choices":[{"text":"a"}]}"#,
        r#"data: {"type":"response.created","response":{"status":"in_progress","error":null}}"#,
        r#"data: {"type":"response.mcp_call.failed","item_id":"i"}"#,
        "event: message\ndata: {\"choices\":[{\"text\":\"error\"}]}",
    ] {
        assert_eq!(events(&format!("{none}\n\n")).error_status(), None, "{none}");
        assert_eq!(read(AnswerKind::Json, none.trim_start_matches("data: ")).error_status(), None, "{none}");
    }
}

/// Bytes after whole events can be told apart from those of heartbeats, for every split of the bytes.
#[test]
fn heartbeats_are_no_events() {
    let beats = [": keep-alive\n\n", ":\n", ": a\r\n\r\n", "event: ping\ndata: {\"type\": \"ping\"}\n\n"];
    let others =
        ["data: {\"type\":\"ping\"}\r\n\r\n", "event: heartbeat\r\ndata: now\r\n\r\n", "retry: 9\n\n", "data:\n\n"];
    for text in beats.into_iter().chain(others) {
        for split in 0..=text.len() {
            let mut reader = AnswerReader::new(AnswerKind::Events);
            reader.read(&text.as_bytes()[..split]);
            assert!(split == text.len() || reader.events() == 0, "{text:?} at {split}");
            reader.read(&text.as_bytes()[split..]);
            let state = (reader.stage, reader.events(), reader.is_between_events(), reader.is_complete());
            assert_eq!(state, (AnswerStage::Empty, 0, true, false), "{text:?} at {split}");
        }
    }
    let mut reader = AnswerReader::new(AnswerKind::Events);
    for (bytes, events, is_between) in [
        (": a", 0, false),
        ("\n\n", 0, true),
        ("event: ping\r\n", 0, false),
        ("data: {}\r\n\r", 0, false),
        ("\n", 0, true),
        ("data: {\"choices\":[]}\n", 1, false),
        ("\n: b\n", 1, true),
        ("data: [DONE]\n\n", 2, true),
    ] {
        reader.read(bytes.as_bytes());
        assert_eq!((reader.events(), reader.is_between_events()), (events, is_between), "{bytes:?}");
    }
}

#[test]
fn json_is_complete_as_one_object() {
    let long = |end: &str| format!("{{\"text\":\"{}\"{end}", "a".repeat(3 * TAIL_BYTES));
    for text in ["{}", " {\"a\":[1,{\"b\":\"}\"}]}\n", &long("}")] {
        let reader = read(AnswerKind::Json, text);
        assert_eq!((reader.stage, reader.is_complete()), (AnswerStage::Begun, true), "{text:.40}");
    }
    for text in ["", "<html>", "[]", "\"text\"", "{", "{\"a\":\"}", "{}}", "{} <html>", "{\"a\":{}", &long("")] {
        let reader = read(AnswerKind::Json, text);
        assert_eq!((reader.stage, reader.is_complete()), (AnswerStage::Invalid, false), "{text:.40}");
    }
}

#[test]
fn streams_of_the_messages_api_are_read() {
    let event = |name: &str, fields: &str| format!("event: {name}\ndata: {{\"type\":\"{name}\"{fields}}}\n\n");
    let start =
        event("message_start", r#","message":{"role":"assistant","usage":{"input_tokens":2,"output_tokens":0}}"#)
            + &event("ping", "")
            + &event("content_block_start", r#","index":0,"content_block":{"type":"text","text":""}"#);
    let reader = events(&start);
    assert_eq!((reader.stage, reader.is_generating()), (AnswerStage::Opened, false));
    let delta = event("content_block_delta", r#","index":0,"delta":{"type":"text_delta","text":"a"}"#);
    let open = [start.as_str(), &delta, &delta, &event("content_block_stop", r#","index":0"#)].concat();
    let reader = events(&open);
    assert_eq!((reader.stage, reader.is_generating(), reader.is_complete()), (AnswerStage::Begun, true, false));
    assert_eq!(reader.output_tokens(), 2);
    let usage_fields =
        r#""usage":{"input_tokens":2,"cache_creation_input_tokens":1,"cache_read_input_tokens":8,"output_tokens":5}"#;
    let ended =
        open.clone() + &event("message_delta", &format!(r#","delta":{{"stop_reason":"end_turn"}},{usage_fields}"#));
    assert!(!events(&ended).is_complete(), "the stream ends with message_stop");
    let reader = events(&(ended + &event("message_stop", "")));
    assert_eq!((reader.is_complete(), reader.output_tokens()), (true, 5));
    assert_eq!(reader.usage(), usage(11, 5, Some(8)));
    let whole = read(AnswerKind::Json, &format!(r#"{{"type":"message","content":[],{usage_fields}}}"#));
    assert_eq!((whole.is_complete(), whole.usage()), (true, usage(11, 5, Some(8))));
    let failed = events(&(open + &event("error", r#","error":{"type":"api_error","message":"m"}"#)));
    assert!(failed.is_complete());
}

proptest! {
    /// A stream of single bytes has no whole event to compare.
    #[test]
    fn events_that_repeat_have_the_effects_of_single_bytes(
        parts in proptest::collection::vec((0..8_usize, "[a\"\\\\{}\n\r:]{0,3}|usage|error"), 1..20),
        cuts in proptest::collection::vec(1..200_usize, 1..9),
    ) {
        let stream: String = parts.iter().map(|(form, text)| match form {
            0..3 => chunk(&format!(r#"{{"content":"{text}"}}"#)),
            3 => chunk(&format!(r#"{{"role":null,"content":"{text}","reasoning":"{text}"}}"#)),
            4 => format!("data: {{\"choices\":[{{\"text\":\"{text}\"}}],\"usage\":{{\"completion_tokens\":7}}}}\n\n"),
            5 => format!("event: {text}\n"),
            6 => format!("data: {text}\r\n"),
            _ => format!(":{text}\n\n"),
        }).collect();
        let state = |reader: &AnswerReader| {
            let flags = (reader.is_generating(), reader.is_complete(), reader.is_between_events(), reader.stage);
            (flags, reader.output_tokens(), reader.usage(), reader.error_status(), reader.events())
        };
        let [mut parted, mut single] = [AnswerKind::Events; 2].map(AnswerReader::new);
        let (mut rest, mut cuts) = (stream.as_bytes(), cuts.into_iter().cycle());
        while !rest.is_empty() {
            let (part, after) = rest.split_at(cuts.next().map_or(1, |cut| cut.min(rest.len())));
            parted.read(part);
            part.iter().for_each(|byte| single.read(&[*byte]));
            prop_assert_eq!(state(&parted), state(&single), "{:?}", stream);
            rest = after;
        }
    }
}

#[test]
fn tokens_are_found_without_parsing() {
    let mut reader = events(&chunk(r#"{"content":"a"}"#));
    for (text, is_repeated) in [("b", true), (r#" \" \\"#, true), ("", false), (r#"c","content":"d"#, false)] {
        let event = chunk(&format!(r#"{{"content":"{text}"}}"#));
        assert_eq!(reader.token.repeated_by(event.as_bytes()).is_some(), is_repeated, "{text}");
        reader.read(event.as_bytes());
    }
    assert_eq!(reader.output_tokens(), 4);
}
