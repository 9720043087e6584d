//! Responses of the prefill leg, and responses of completed requests.

use axum::body::Bytes;

use super::{Protocol, response, text};
use crate::formats::handover::PrefillResponse;
use crate::formats::openai::Endpoint;

fn parse(protocol: Protocol, body: &str) -> Result<PrefillResponse, String> {
    PrefillResponse::parse(protocol, Bytes::copy_from_slice(body.as_bytes()))
}

#[test]
fn invalid_responses_are_rejected_with_rule_and_value() {
    let error =
        |protocol, body: &[u8]| PrefillResponse::parse(protocol, Bytes::copy_from_slice(body)).err().expect("invalid");
    let nixl = Protocol::VllmNixl;
    let cases: [(Protocol, &[u8], &str); 6] = [
        (nixl, b"", "the prefill response must be a JSON object: EOF while parsing a value at line 1 column 0"),
        (
            nixl,
            b"[1]",
            "the prefill response must be a JSON object: invalid type: sequence, expected an object at line 1 column 0",
        ),
        (nixl, b"{\"a\xff\":1}", "the prefill response must be UTF-8, but is not from byte 3 on"),
        (
            nixl,
            br#"{"kv_transfer_params":[1,2]}"#,
            "field kv_transfer_params of the prefill response must be an object or null, but is [1,2]",
        ),
        (
            Protocol::TensorrtLlm,
            br#"{"choices":[{"disaggregated_params":"x"}]}"#,
            "field disaggregated_params of the prefill response must be an object or null, but is \"x\"",
        ),
        (
            nixl,
            br#"{"kv_transfer_params":{},"kv_transfer_params":{}}"#,
            "the prefill response must have field kv_transfer_params at most once",
        ),
    ];
    for (protocol, body, expected) in cases {
        assert_eq!(error(protocol, body), expected);
    }
}

#[test]
fn cached_tokens_are_read_from_both_spellings() {
    let cases = [
        (r#"{"usage":{"prompt_tokens_details":{"cached_tokens":7}}}"#, Some(7)),
        (r#"{"usage":{"input_tokens_details":{"cached_tokens":7}}}"#, Some(7)),
        (r#"{"usage":{"prompt_tokens_details":{"cached_tokens":9999999999}}}"#, Some(u32::MAX)),
        (r#"{"usage":{"prompt_tokens_details":{"cached_tokens":-1}}}"#, None),
        (r#"{"usage":{"prompt_tokens_details":{"cached_tokens":null}}}"#, None),
        (r#"{"usage":{"prompt_tokens_details":null}}"#, None),
        (r#"{"usage":{"prompt_tokens":7}}"#, None),
        (r#"{"usage":null}"#, None),
        (r#"{}"#, None),
    ];
    for (body, expected) in cases {
        for protocol in Protocol::ALL {
            assert_eq!(response(protocol, body).cached_tokens, expected, "{body}");
        }
    }
}

#[test]
fn only_a_context_leg_completes_a_request() {
    let cases = [
        ("\"stop\"", true),
        ("\"stop_words\"", true),
        ("\"length\"", false),
        ("\"not_finished\"", false),
        ("null", false),
    ];
    for (reason, expected) in cases {
        let body = format!(r#"{{"choices":[{{"finish_reason":{reason}}}]}}"#);
        for protocol in Protocol::ALL {
            let is_complete = parse(protocol, &body).unwrap().is_complete();
            assert_eq!(is_complete, expected && protocol == Protocol::TensorrtLlm, "{protocol} {reason}");
        }
    }
}

const COMPLETE_CHAT: &str = r#"{"id":"c","object":"chat.completion","prompt_token_ids":[1,2],"choices":[{"index":0,"message":{"role":"assistant","content":"a\u00e9","tool_calls":[{"id":"t"},{"id":"u"}]},"finish_reason":"stop","disaggregated_params":{"request_type":"context_only"}}],"usage":{"prompt_tokens":2}}"#;
const COMPLETE_COMPLETION: &str = r#"{"id":"c","object":"text_completion","choices":[{"disaggregated_params":null,"index":0,"text":"a","finish_reason":"stop"}],"usage":{"prompt_tokens":2} , "prompt_token_ids":[1,2]}"#;

#[test]
fn complete_responses_lack_the_state_of_the_engine() {
    let complete =
        |endpoint, body| text(&response(Protocol::TensorrtLlm, body).complete_response(endpoint, false, true));
    assert_eq!(
        complete(Endpoint::Chat, COMPLETE_CHAT),
        r#"{"id":"c","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"a\u00e9","tool_calls":[{"id":"t"},{"id":"u"}]},"finish_reason":"stop"}],"usage":{"prompt_tokens":2}}"#
    );
    assert_eq!(
        complete(Endpoint::Completions, COMPLETE_COMPLETION),
        r#"{"id":"c","object":"text_completion","choices":[{"index":0,"text":"a","finish_reason":"stop"}],"usage":{"prompt_tokens":2}}"#
    );
    for odd in ["{}", r#"{"choices":null}"#, r#"{"choices":[1,"x"]}"#] {
        assert_eq!(complete(Endpoint::Chat, odd), odd);
    }
}

#[test]
fn complete_responses_become_event_streams() {
    let chat = response(Protocol::TensorrtLlm, COMPLETE_CHAT);
    let chunk = r#"data: {"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"finish_reason":"stop","delta":{"role":"assistant","content":"a\u00e9","tool_calls":[{"id":"t","index":0},{"id":"u","index":1}]}}]"#;
    assert_eq!(text(&chat.complete_response(Endpoint::Chat, true, false)), format!("{chunk}}}\n\ndata: [DONE]\n\n"));
    let usage = r#"data: {"id":"c","object":"chat.completion.chunk","choices":[],"usage":{"prompt_tokens":2}}"#;
    assert_eq!(
        text(&chat.complete_response(Endpoint::Chat, true, true)),
        format!("{chunk},\"usage\":null}}\n\n{usage}\n\ndata: [DONE]\n\n")
    );
    let completion = response(Protocol::TensorrtLlm, &COMPLETE_COMPLETION.replace(" , ", "\r\n,\n"));
    assert_eq!(
        text(&completion.complete_response(Endpoint::Completions, true, false)),
        "data: {\"id\":\"c\",\"object\":\"text_completion\",\"choices\":[{\"index\":0,\"text\":\"a\",\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n"
    );
    let empty = response(Protocol::TensorrtLlm, "{}");
    assert_eq!(
        text(&empty.complete_response(Endpoint::Completions, true, true)),
        "data: {\"choices\":[]}\n\ndata: [DONE]\n\n"
    );
}

#[test]
fn streamed_prefill_legs_of_sglang_end_with_their_mark() {
    let parse = |body: &'static str| PrefillResponse::parse(Protocol::Sglang, body.into());
    let usage = r#"{"choices":[],"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":4}}}"#;
    let body = format!("data: {{\"choices\":[{{\"text\":\"a\"}}]}}\n\ndata: {usage}\n\ndata: [DONE]\n\n");
    let response = PrefillResponse::parse(Protocol::Sglang, body.into()).expect("a complete stream");
    assert_eq!((response.cached_tokens, response.parameters), (Some(4), None));
    let early = parse("data: {\"choices\":[{\"text\":\"a\"}]}\n\n").err().expect("cut off");
    assert_eq!(early, "the stream of the prefill leg must end with [DONE], but ended early");
    assert!(parse("data: {\"error\":{\"code\":500}}\n\ndata: [DONE]\n\n").is_err());
}
