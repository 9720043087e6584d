//! Examples of the conversions.

use serde_json::{Value, json};

use super::{
    Conversion, Known, Purpose, chat_body, converted as converted_for, error_body, error_message, in_anthropic_words,
    message,
};
use crate::formats::openai::{ApiError, ChatStyle};
use streams::{events_of, sse};

mod streams;

fn chat(body: Value) -> Result<Value, ApiError> {
    let mut body = body;
    let fields = body.as_object_mut().expect("an object");
    fields.entry("max_tokens").or_insert(json!(5));
    let chat = chat_body(body.to_string().as_bytes(), Purpose::Generate)?;
    Ok(serde_json::from_slice(&chat).expect("JSON"))
}

/// Cases of `tests.json`: bodies with the chats that they become, rejected bodies, responses, and errors.
fn cases(kind: &str) -> Vec<Value> {
    let mut cases: Value = serde_json::from_str(include_str!("tests.json")).expect("valid cases");
    serde_json::from_value(cases[kind].take()).expect("a list")
}

#[test]
fn requests_become_chats() {
    for case in cases("requests") {
        let mut expected = case["chat"].clone();
        expected.as_object_mut().expect("an object").entry("max_tokens").or_insert(json!(5));
        assert_eq!(chat(case["body"].clone()).expect("valid"), expected, "{}", case["name"]);
        let counted = chat_body(case["body"].to_string().as_bytes(), Purpose::Count).expect("valid");
        let counted: Value = serde_json::from_slice(&counted).expect("JSON");
        let fields = ["max_tokens", "stream", "tools", "messages"].map(|field| &counted[field]);
        assert_eq!(fields, [&Value::Null, &Value::Null, &expected["tools"], &expected["messages"]], "{}", case["name"]);
    }
    let without_tools =
        json!({ "messages": [{ "role": "user", "content": "" }], "tools": [], "tool_choice": { "type": "auto" } });
    assert_eq!(
        chat(without_tools).expect("valid")["tool_choice"],
        Value::Null,
        "engines reject a choice without tools"
    );
    let of_tool = cases("requests").into_iter().find(|case| case["name"] == "a reference to a tool").expect("a case");
    let passed = Conversion { is_passed: true, ..Conversion::default() };
    let body = of_tool["body"].to_string();
    assert!(converted_for(body.as_bytes(), Purpose::Count, |_| passed).is_err(), "only the template expands them");
}

#[test]
fn content_without_a_counterpart_is_rejected_by_name() {
    for case in cases("rejected") {
        let error = chat(case[0].clone()).expect_err("rejected");
        let rule = case[1].as_str().expect("text");
        assert!(error.status.as_u16() == 400 && error.message.contains(rule), "{error} instead of {rule}");
    }
    for body in [&b"[]"[..], b"{", b"", b"\xff", b"{\"model\":1,\"model\":2}"] {
        assert!(chat_body(body, Purpose::Generate).is_err());
    }
}

#[test]
fn context_errors_use_anthropics_words() {
    let known = Known { prompt_tokens: 0, max_model_len: 32_768 };
    for case in cases("context_errors") {
        let message = case[0].as_str().expect("text");
        assert_eq!(in_anthropic_words(message, known).as_deref(), case[1].as_str(), "{message}");
    }
    let known = Known { prompt_tokens: 33_000, ..known };
    let at_least = "maximum context length is 32768 tokens. However, your prompt contains at least 32769 input tokens";
    for message in ["the request exceeds the available context size, try increasing it", at_least] {
        let expected = "prompt is too long: 33000 tokens > 32768 maximum";
        assert_eq!(in_anthropic_words(message, known).as_deref(), Some(expected), "numbers of the gateway");
    }
}

#[test]
fn responses_become_messages() {
    for case in cases("responses") {
        assert_eq!(converted(case["chat"].clone()), case["message"], "{}", case["name"]);
    }
    for none in ["", "[]", "{}", r#"{"choices":[]}"#, r#"{"choices":[{"message":7}]}"#] {
        assert_eq!(message(none.as_bytes(), "m"), None, "{none}");
    }
    for case in cases("stops") {
        let mut choice = case[0].clone();
        choice["message"] = json!({ "content": "a" });
        let message = converted(json!({ "choices": [choice] }));
        choice["delta"] = choice["message"].take();
        let events = events_of(&sse(&[json!({ "choices": [choice] })]));
        for stop in [&message, &events[events.len() - 2].1["delta"]] {
            assert_eq!((&stop["stop_reason"], &stop["stop_sequence"]), (&case[1], &case[2]), "{case}");
        }
    }
}

/// The chat for engines of this kind.
fn chat_for(conversion: Conversion, body: &Value) -> Value {
    let chat = converted_for(body.to_string().as_bytes(), Purpose::Count, |_| conversion).expect("valid");
    serde_json::from_slice(&chat.json).expect("JSON")
}

const SGLANG: ChatStyle = ChatStyle { is_sglang: true, takes_inline_system: None };

#[test]
fn thinking_is_mapped_as_by_the_engine() {
    let of = |conversion: Conversion, thinking: Value, effort: Option<&str>| {
        let mut body = json!({ "messages": [{ "role": "user", "content": "" }], "thinking": thinking });
        body["output_config"] = json!({ "effort": effort });
        let chat = chat_for(conversion, &body);
        json!([chat["reasoning_effort"], chat["thinking_token_budget"], chat["chat_template_kwargs"]])
    };
    let (other, vllm) = (Conversion::default(), Conversion { is_vllm: true, ..Conversion::default() });
    let sglang = Conversion { style: SGLANG, ..Conversion::default() };
    let budget = json!({ "type": "enabled", "budget_tokens": 2048 });
    let kwargs = |thinks: bool| json!({ "enable_thinking": thinks, "thinking": thinks });
    // Tokenizers of Mistral refuse variables of templates.
    for conversion in [other, vllm] {
        assert_eq!(of(conversion, json!({ "type": "adaptive" }), Some("xhigh")), json!(["high", null, null]));
        assert_eq!(of(conversion, json!({ "type": "disabled" }), Some("high")), json!(["none", null, null]));
    }
    assert_eq!(of(other, budget.clone(), None), json!([null, null, null]));
    assert_eq!(of(vllm, budget.clone(), None), json!([null, 2048, null]));
    assert_eq!(of(sglang, budget, None), json!([null, null, kwargs(true)]));
    assert_eq!(of(sglang, json!({ "type": "disabled" }), Some("low")), json!(["low", null, kwargs(false)]));
    let passed = Conversion { is_passed: true, ..vllm };
    assert_eq!(of(passed, json!({ "type": "adaptive" }), Some("xhigh")), json!(["xhigh", null, null]));
}

/// A request of Claude Code 2.1.197 as recorded, with shorter texts and without its tools.
fn captured(billing: &str) -> Value {
    let header = format!("x-anthropic-billing-header: cc_version=2.1.197.{billing}; cc_entrypoint=sdk-cli;");
    json!({
        "model": "m",
        "messages": [
            { "role": "user", "content": [
                { "type": "text", "text": "<system-reminder>\nAs you answer\n</system-reminder>" },
                { "type": "text", "text": "Run echo one.", "cache_control": { "type": "ephemeral" } },
            ] },
            { "role": "system", "content": "Available agent types for the Agent tool: none." },
        ],
        "system": [
            { "type": "text", "text": header },
            { "type": "text", "text": "You are a Claude agent.", "cache_control": { "type": "ephemeral" } },
            { "type": "text", "text": "\nBe brief.", "cache_control": { "type": "ephemeral" } },
        ],
        "metadata": { "user_id": "{\"device_id\":\"c9\",\"account_uuid\":\"\",\"session_id\":\"f0\"}" },
        "max_tokens": 32000, "thinking": { "type": "adaptive" }, "stream": true,
        "context_management": { "edits": [{ "type": "clear_thinking_20251015", "keep": "all" }] },
        "output_config": { "effort": "high" },
    })
}

#[test]
fn captured_requests_render_as_in_the_engine_that_they_reach() {
    let of = |conversion, billing: &str| chat_for(conversion, &captured(billing))["messages"].take();
    let passed = Conversion { is_passed: true, ..Conversion::default() };
    for conversion in [Conversion::default(), passed] {
        let messages = of(conversion, "cfd");
        assert_eq!(messages[0]["content"], "You are a Claude agent.\nBe brief.");
        assert_eq!(messages, of(conversion, "0a1"), "the line differs per request");
        assert_eq!(messages[2]["role"], "system");
    }
    // SGLang keeps the line, and joins by line feeds.
    let messages = of(Conversion { style: SGLANG, ..passed }, "cfd");
    let expected = "x-anthropic-billing-header: cc_version=2.1.197.cfd; cc_entrypoint=sdk-cli;\nYou are a Claude agent.\n\nBe brief.";
    assert_eq!(messages[0]["content"], expected);
    let merges = ChatStyle { takes_inline_system: Some(false), ..ChatStyle::default() };
    let messages = of(Conversion { style: merges, ..passed }, "cfd");
    let expected = "You are a Claude agent.\nBe brief.Available agent types for the Agent tool: none.";
    assert_eq!((&messages[0]["content"], messages.as_array().map(Vec::len)), (&json!(expected), Some(2)));
    let text =
        json!({ "system": "x-anthropic-billing-header: a;\nRules", "messages": [{ "role": "user", "content": "a" }] });
    assert_eq!(chat_for(Conversion::default(), &text)["messages"][0]["content"], "Rules");
}

#[test]
fn inline_system_messages_are_folded_where_the_template_refuses_them() {
    let style = ChatStyle { takes_inline_system: Some(false), ..ChatStyle::default() };
    let folded = |messages: Value| {
        let body = json!({ "system": "S", "messages": messages });
        chat_for(Conversion { style, ..Conversion::default() }, &body)["messages"].take()
    };
    let system = |text: &str| json!({ "role": "system", "content": text });
    let user = |text: &str| json!({ "role": "user", "content": text });
    let image = json!({ "type": "image", "source": { "type": "url", "url": "u" } });
    let result = json!({ "role": "user", "content": [{ "type": "tool_result", "tool_use_id": "t", "content": "r" }] });
    let of_assistant = json!({ "role": "assistant", "content": "a" });
    assert_eq!(folded(json!([user("u"), system("x"), system("y")])), json!([system("S"), user("u\n\nx\n\ny")]));
    assert_eq!(
        folded(json!([{ "role": "user", "content": [image] }, system("x")]))[1]["content"],
        json!([{ "type": "image_url", "image_url": { "url": "u" } }, { "type": "text", "text": "x" }])
    );
    assert_eq!(folded(json!([user("u"), of_assistant, result, system("x")]))[3]["content"], "r\n\nx");
    // After an assistant the text begins the user's turn.
    assert_eq!(folded(json!([user("u"), of_assistant, system("x"), user("v")]))[3], user("x\n\nv"));
    assert_eq!(folded(json!([system("x"), user("u")])), json!([system("S\n\nx"), user("u")]));
    let roles = folded(json!([user("u"), of_assistant, system("x"), of_assistant]));
    assert_eq!(roles[3], user("x"));
    // A trial depends on this: a chat that was converted before its end is converted again.
    let body = json!({ "messages": [user("u"), system("x")] }).to_string();
    for takes_inline_system in [None, Some(true), Some(false)] {
        let conversion = Conversion { style: ChatStyle { takes_inline_system, ..style }, ..Conversion::default() };
        let chat = converted_for(body.as_bytes(), Purpose::Count, |_| conversion).expect("valid");
        assert_eq!(chat.has_inline_system, takes_inline_system != Some(false), "{takes_inline_system:?}");
    }
}

#[test]
fn passed_tool_results_of_sglang_keep_their_images() {
    let image = json!({ "type": "image", "source": { "type": "url", "url": "u" } });
    let text = |text: &str| json!({ "type": "text", "text": text });
    let of = |content: Value| {
        let result = json!({ "type": "tool_result", "tool_use_id": "t", "content": content });
        let body = json!({ "messages": [{ "role": "user", "content": [text("before"), result] }] });
        let passed = Conversion { style: SGLANG, is_passed: true, ..Conversion::default() };
        let messages = chat_for(passed, &body)["messages"].take();
        assert_eq!((messages.as_array().map(Vec::len), &messages[1]["tool_call_id"]), (Some(2), &json!("t")));
        messages[1]["content"].clone()
    };
    let shown = json!({ "type": "image_url", "image_url": { "url": "u" } });
    assert_eq!(of(json!([text("a"), image, text("b")])), json!([text("a"), shown, text("b")]));
    assert_eq!(of(json!([image])), json!([shown]));
    assert_eq!(of(json!([text("a"), text("b")])), json!([text("a"), text("b")]));
    assert_eq!((of(json!([text("a")])), of(json!("a")), of(json!([]))), (json!("a"), json!("a"), json!("")));
}

fn converted(chat: Value) -> Value {
    let message = message(chat.to_string().as_bytes(), "m").expect("a chat response");
    serde_json::from_slice(&message).expect("JSON")
}

#[test]
fn half_an_answer_is_an_error() {
    for reason in [json!("abort"), json!("error"), json!("cancelled"), json!("anything"), Value::Null] {
        let whole = json!({ "choices": [{ "message": { "content": "a" }, "finish_reason": reason }] });
        assert_eq!(message(whole.to_string().as_bytes(), "m"), None, "{reason}");
        let events =
            events_of(&sse(&[json!({ "choices": [{ "delta": { "content": "a" }, "finish_reason": reason }] })]));
        let (name, error) = events.last().expect("an event");
        assert_eq!(name, "error");
        let reason = reason.as_str().unwrap_or("no finish reason");
        assert!(error["error"]["message"].as_str().is_some_and(|message| message.contains(reason)), "{error}");
    }
    // A stop sequence inside a call: it must not run.
    let cut = json!([{ "id": "t", "function": { "name": "f", "arguments": "{\"a\":" } }]);
    let choice = |part: &str| json!({ part: { "tool_calls": cut }, "finish_reason": "stop", "stop_reason": "END" });
    assert_eq!(converted(json!({ "choices": [choice("message")] }))["stop_reason"], "stop_sequence");
    let events = events_of(&sse(&[json!({ "choices": [choice("delta")] })]));
    assert_eq!(events[events.len() - 2].1["delta"]["stop_reason"], "stop_sequence");
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
