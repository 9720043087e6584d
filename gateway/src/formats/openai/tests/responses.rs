//! Conversion of `/v1/responses`, compared with the engines' own converters.
//!
//! `responses.json` has bodies and what vLLM 0.32 (`construct_input_messages`, `construct_tool_dicts`) and SGLang 0.5.23
//! (`_construct_input_messages`, `_response_tools_to_chat_tools`) make of them; null where an engine rejects the body.
//! `sglang_inline` is for templates that take system messages anywhere.

use axum::body::Bytes;
use serde_json::{Value as Json, json};

use crate::formats::openai::{ChatParts, ChatStyle, ClientPrompt, Endpoint, RequestBody};

fn prompt(body: &Json, style: ChatStyle) -> ClientPrompt {
    let body = Bytes::from(body.to_string());
    RequestBody::parse_for(Endpoint::Responses, body, |_| style).expect("a body").prompt
}

fn chat(body: &Json, style: ChatStyle) -> ChatParts {
    match prompt(body, style) {
        ClientPrompt::Chat(parts) => *parts,
        other => panic!("{body}: {other:?}"),
    }
}

/// Messages in the form that both sides share: parts of chats, one name of the reasoning, no details of images.
fn comparable(messages: &Json) -> Json {
    let mut messages = messages.clone();
    for message in messages.as_array_mut().expect("a list") {
        let message = message.as_object_mut().expect("an object");
        message.remove("type");
        let reasoning = [message.remove("reasoning"), message.remove("reasoning_content")];
        message.insert("reasoning".to_owned(), reasoning.into_iter().flatten().next().unwrap_or_default());
        for part in message.get_mut("content").and_then(Json::as_array_mut).into_iter().flatten() {
            let url = part["image_url"]["url"].as_str().or(part["image_url"].as_str()).map(str::to_owned);
            *part = url.map_or_else(|| json!({ "type": "text", "text": part["text"] }), |url| json!({ "url": url }));
        }
    }
    messages
}

#[test]
fn chats_are_those_of_the_engines() {
    let cases: Vec<Json> = serde_json::from_str(include_str!("responses.json")).expect("valid cases");
    let sglang = ChatStyle { is_sglang: true, ..ChatStyle::default() };
    let inline = ChatStyle { takes_inline_system: Some(true), ..sglang };
    let mut compared = 0;
    for case in &cases {
        for (engine, style) in [("vllm", ChatStyle::default()), ("sglang", sglang), ("sglang_inline", inline)] {
            let Some(expected) = case.get(engine).filter(|expected| expected.is_object()) else { continue };
            let name = format!("{} at {engine}", case["name"]);
            let parts = chat(&case["body"], style);
            let messages: Json = serde_json::from_slice(&parts.messages).expect("JSON");
            assert_eq!(comparable(&messages), comparable(&expected["messages"]), "{name}");
            let tools: Json = parts.tools.map_or(Json::Null, |tools| serde_json::from_slice(&tools).expect("JSON"));
            let mut wanted = expected["tools"].clone();
            for tool in wanted.as_array_mut().into_iter().flatten().filter(|_| !style.is_sglang) {
                // The template's input adds absent fields.
                let function = tool["function"].as_object_mut().expect("a function");
                function.retain(|_, value| !value.is_null());
            }
            assert_eq!(tools, wanted, "{name}");
            compared += 1;
        }
    }
    assert!(compared >= 30, "{compared}");
}

#[test]
fn what_only_the_engine_can_convert_is_opaque() {
    let vllm = ChatStyle::default();
    let cases = [
        (json!([{ "type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x" }]), "items"),
        (json!([{ "type": "web_search_call", "id": "w" }]), "items"),
        (json!([{ "type": "function_call", "name": "f", "arguments": "{}" }]), "items"),
        (json!([{ "role": "tool", "content": "x" }]), "items"),
        (json!([{ "role": "user", "content": [{ "type": "input_file", "file_id": "f" }] }]), "multimodal"),
        (json!([{ "role": "user", "content": [{ "type": "input_image", "file_id": "f" }] }]), "multimodal"),
    ];
    for (input, reason) in cases {
        assert_eq!(prompt(&json!({ "input": input }), vllm), ClientPrompt::Opaque(reason), "{input}");
    }
    for tools in [json!({}), json!([{ "type": "function" }]), json!([7])] {
        let body = json!({ "input": "x", "tools": tools });
        assert_eq!(prompt(&body, vllm), ClientPrompt::Opaque("tools"), "{tools}");
    }
    let own = format!("sglang-reasoning-v1.{}", "x".repeat(8));
    let own = json!([{ "type": "reasoning", "id": "r", "summary": [], "encrypted_content": own }]);
    let sglang = ChatStyle { is_sglang: true, ..vllm };
    assert_eq!(prompt(&json!({ "input": own }), sglang), ClientPrompt::Opaque("items"));
}

#[test]
fn unfinished_messages_are_continued_by_vllm() {
    let body = |status: &str| {
        json!({ "input": [
            { "role": "user", "content": "q" },
            { "type": "message", "role": "assistant", "status": status, "content": [{ "type": "output_text", "text": "It is" }] },
        ] })
    };
    let flags = |status: &str, is_sglang| {
        let parts = chat(&body(status), ChatStyle { is_sglang, ..ChatStyle::default() });
        (parts.add_generation_prompt, parts.continue_final_message)
    };
    assert_eq!(flags("incomplete", false), (Some(false), Some(true)));
    assert_eq!(flags("completed", false), (None, None));
    assert_eq!(flags("incomplete", true), (None, None));
}
