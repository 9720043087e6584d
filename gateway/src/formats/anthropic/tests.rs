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
    let message = rejection(json!({ "messages": [{ "role": "user", "content": "" }], "thinking": { "type": "x" } }));
    assert!(message.contains("thinking"), "{message}");
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
}

#[test]
fn tool_references_are_text_for_engines_that_get_a_chat() {
    let result = json!([{ "type": "tool_reference", "tool_name": "f" }, { "type": "text", "text": "b" }]);
    let messages =
        json!([{ "role": "user", "content": [{ "type": "tool_result", "tool_use_id": "t", "content": result }] }]);
    assert_eq!(messages_of(messages.clone())[0]["content"], "Tool available: f\nb");
    let passed = Conversion { is_passed: true, ..Conversion::default() };
    let body = json!({ "messages": messages }).to_string();
    assert!(converted_for(body.as_bytes(), Purpose::Count, |_| passed).is_err(), "only the template expands them");
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

#[test]
fn context_errors_use_anthropics_words() {
    let known = Known { prompt_tokens: 0, max_tokens: 32_000, max_model_len: 32_768 };
    let too_long = |prompt: u32| Some(format!("prompt is too long: {prompt} tokens > 32768 maximum"));
    let sum = |prompt: u32, output: u32| {
        let rule = "decrease input length or `max_tokens` and try again";
        Some(format!("input length and `max_tokens` exceed context limit: {prompt} + {output} > 32768, {rule}"))
    };
    let cases = [
        (
            "This model's maximum context length is 32768 tokens. However, your prompt contains at least 32801 input tokens. Please reduce the length of the input prompt. (parameter=input_tokens, value=32801)",
            too_long(32_801),
        ),
        (
            "This model's maximum context length is 32768 tokens. However, you requested 8000 output tokens and your prompt contains at least 32001 input tokens, for a total of at least 40001 tokens.",
            sum(32_001, 8_000),
        ),
        (
            "This model's maximum context length is 32768 tokens. However, you requested 40000 tokens (30000 in the messages, 10000 in the completion).",
            sum(30_000, 10_000),
        ),
        (
            "'max_tokens' is too large: 32000. This model's maximum context length is 32768 tokens and your request has 2000 input tokens (32000 > 32768 - 2000).",
            sum(2_000, 32_000),
        ),
        ("The engine prompt length 40000 exceeds the max_model_len 32768. Please reduce prompt.", too_long(40_000)),
        (
            "Requested token count exceeds the model's maximum context length of 32768 tokens. You requested a total of 52000 tokens: 20000 tokens from the input messages and 32000 tokens for the completion. Please reduce",
            sum(20_000, 32_000),
        ),
        ("The input (40000 tokens) is longer than the model's context length (32768 tokens).", too_long(40_000)),
        ("the prompt has 40000 tokens, but the model's maximum context length is 32768 tokens", too_long(40_000)),
        ("prompt is too long: 40000 tokens > 32768 maximum", None),
        ("the context length is a secret", None),
        (
            "maximum context length is 1 of é99999999999999999999 input tokens and ü18446744073709551615 output tokens",
            None,
        ),
        ("temperature must be positive", None),
    ];
    for (message, expected) in cases {
        assert_eq!(in_anthropic_words(message, known), expected, "{message}");
    }
    let known = Known { prompt_tokens: 33_000, ..known };
    let message = "the request exceeds the available context size, try increasing it";
    assert_eq!(in_anthropic_words(message, known), too_long(33_000), "numbers of the gateway");
    let at_least = "maximum context length is 32768 tokens. However, your prompt contains at least 32769 input tokens";
    assert_eq!(in_anthropic_words(at_least, known), too_long(33_000));
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
        (json!({ "finish_reason": "repetition" }), "max_tokens", Value::Null),
        (json!({ "finish_reason": "eos_token" }), "end_turn", Value::Null),
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
fn half_an_answer_is_an_error() {
    for reason in ["abort", "error", "cancelled", "anything"] {
        let whole = json!({ "choices": [{ "message": { "content": "a" }, "finish_reason": reason }] });
        assert_eq!(message(whole.to_string().as_bytes(), "m"), None, "{reason}");
        let events =
            events_of(&sse(&[json!({ "choices": [{ "delta": { "content": "a" }, "finish_reason": reason }] })]));
        let (name, error) = events.last().expect("an event");
        assert_eq!(name, "error");
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
