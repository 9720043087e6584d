//! Parsing of bodies, by example.

use axum::body::Bytes;
use proptest::prelude::*;

use crate::formats::openai::{
    ApiError, ChatParts, ClientPrompt, Edits, Endpoint, FurtherPrompts, FurtherWork, RequestBody,
};

const ALL: [Endpoint; 4] = [Endpoint::Chat, Endpoint::Completions, Endpoint::Embeddings, Endpoint::Responses];

fn parse(endpoint: Endpoint, body: &str) -> RequestBody {
    RequestBody::parse(endpoint, Bytes::copy_from_slice(body.as_bytes()))
        .unwrap_or_else(|error| panic!("{body}: {error}"))
}

fn refused(endpoint: Endpoint, body: impl AsRef<[u8]>) -> ApiError {
    let body = Bytes::copy_from_slice(body.as_ref());
    let error = RequestBody::parse(endpoint, body.clone()).expect_err("rejected");
    assert_eq!(error.status.as_u16(), 400, "{body:?}");
    error
}

fn prompt(endpoint: Endpoint, body: &str) -> ClientPrompt {
    parse(endpoint, body).prompt
}

fn chat(messages: &str) -> ChatParts {
    ChatParts { messages: Bytes::copy_from_slice(messages.as_bytes()), ..ChatParts::default() }
}

fn part(json: &'static str) -> Option<Bytes> {
    Some(Bytes::from_static(json.as_bytes()))
}

#[test]
fn common_fields_are_read() {
    let parsed = parse(
        Endpoint::Chat,
        r#" {"messages":[], "mod\u0065l":"a/b", "stream":true, "cache_salt":"s\n", "session_id":"c7", "max_tokens":9,
             "max_completion_tokens":5, "temperature":1e-3, "logit_bias":{"5":[1,{}]}} "#,
    );
    assert_eq!(parsed.model.as_deref(), Some("a/b"));
    assert!(parsed.stream);
    assert_eq!(parsed.cache_salt.as_deref(), Some("s\n"));
    assert_eq!(parsed.session_id.as_deref(), Some("c7"));
    assert_eq!(parsed.output_tokens_max, Some(5));

    let nulls = parse(
        Endpoint::Chat,
        r#"{"messages":[],"model":null,"stream":null,"cache_salt":null,"session_id":null,"max_tokens":null,
            "tools":null,"documents":null,"chat_template":null,"chat_template_kwargs":null,"reasoning_effort":null,
            "add_generation_prompt":null,"continue_final_message":null,"kv_transfer_params":null}"#,
    );
    assert_eq!((nulls.model.as_deref(), nulls.stream, nulls.output_tokens_max), (None, false, None));
    assert_eq!(nulls.prompt, ClientPrompt::Chat(Box::new(chat("[]"))));
}

#[test]
fn numbers_and_flags_are_read_as_engines_read_them() {
    for (stream, expected) in [("\"false\"", false), ("0", false), ("1.0", true), ("\"Yes\"", true), ("\"on\"", true)] {
        let parsed = parse(Endpoint::Completions, &format!(r#"{{"prompt":"a","stream":{stream}}}"#));
        assert_eq!(parsed.stream, expected, "{stream}");
    }
    for (count, expected) in [("\"100\"", 100), ("100.0", 100), ("\" 7 \"", 7), ("true", 1), ("1e3", 1000)] {
        let body = format!(r#"{{"prompt":"a","max_tokens":{count},"n":{count}}}"#);
        let parsed = parse(Endpoint::Completions, &body);
        assert_eq!((parsed.output_tokens_max, parsed.further.outputs), (Some(expected), expected - 1), "{count}");
    }
    for ids in ["[1.0,2]", "[[1.0,2.0],[3]]"] {
        let body = format!(r#"{{"prompt":{ids}}}"#);
        assert_eq!(prompt(Endpoint::Completions, &body), ClientPrompt::Tokens(vec![1, 2]), "{ids}");
    }
    for (field, value) in
        [("stream", "\"maybe\""), ("stream", "2"), ("max_tokens", "\"\""), ("max_tokens", "1.5"), ("n", "[1]")]
    {
        let body = format!(r#"{{"prompt":"a","{field}":{value}}}"#);
        assert_eq!(refused(Endpoint::Completions, body).code, "invalid_type", "{field} {value}");
    }
    assert_eq!(refused(Endpoint::Completions, r#"{"prompt":[1.5]}"#).code, "invalid_token_id");
}

#[test]
fn prompts_of_generate_are_ids_or_text() {
    for (body, expected) in [
        (r#"{"input_ids":[1,2]}"#, ClientPrompt::Tokens(vec![1, 2])),
        (r#"{"token_ids":[1,2],"sampling_params":{"max_tokens":7}}"#, ClientPrompt::Tokens(vec![1, 2])),
        (r#"{"input_ids":[[3],[4,5]],"text":null}"#, ClientPrompt::Tokens(vec![3])),
        (r#"{"text":"one"}"#, ClientPrompt::Text("one".to_owned())),
        (r#"{"text":"one","image_data":"x"}"#, ClientPrompt::Opaque("multimodal")),
        (r#"{"token_ids":[1],"features":{"mm_hashes":{}}}"#, ClientPrompt::Opaque("multimodal")),
        (r#"{"input_embeds":[[0.5]]}"#, ClientPrompt::Opaque("embeddings")),
    ] {
        assert_eq!(prompt(Endpoint::Generate, body), expected, "{body}");
    }
    assert_eq!(refused(Endpoint::Generate, "{}").code, "missing_field");
    let several = parse(Endpoint::Generate, r#"{"input_ids":[[3],[4,5]],"sampling_params":{"max_new_tokens":9}}"#);
    assert_eq!((several.output_tokens_max, several.further.outputs, several.further.prompts.tokens), (Some(9), 1, 2));
}

#[test]
fn output_limit_field_depends_on_the_endpoint() {
    let limits = r#""max_tokens":1,"max_completion_tokens":2,"max_output_tokens":3"#;
    let of = |endpoint, rest: &str| parse(endpoint, &format!("{{{limits},{rest}}}")).output_tokens_max;
    assert_eq!(of(Endpoint::Chat, r#""messages":[]"#), Some(2));
    assert_eq!(of(Endpoint::Completions, r#""prompt":"x""#), Some(1));
    assert_eq!(of(Endpoint::Embeddings, r#""input":"x""#), None);
    assert_eq!(of(Endpoint::Responses, r#""input":"x""#), Some(3));
    let numbers = [("0", 0), ("5.0", 5), ("1e3", 1000), ("4294967295", u32::MAX), ("99999999999999999999", u32::MAX)];
    for (number, count) in numbers {
        let body = format!(r#"{{"prompt":"x","max_tokens":{number}}}"#);
        assert_eq!(parse(Endpoint::Completions, &body).output_tokens_max, Some(count), "{number}");
    }
}

#[test]
fn prompt_lists_use_their_first_element() {
    let text = |text: &str| ClientPrompt::Text(text.to_owned());
    let cases = [
        (r#""a\u00e9\n""#, text("aé\n")),
        (r#"["a", "b"]"#, text("a")),
        ("[1, 2 ,4294967295]", ClientPrompt::Tokens(vec![1, 2, u32::MAX])),
        (" [ [7,8] , [9] ] ", ClientPrompt::Tokens(vec![7, 8])),
        ("[[]]", ClientPrompt::Tokens(Vec::new())),
        (r#""""#, text("")),
    ];
    for (json, expected) in cases {
        assert_eq!(prompt(Endpoint::Completions, &format!("{{\"prompt\":{json}}}")), expected, "{json}");
        assert_eq!(prompt(Endpoint::Embeddings, &format!("{{\"input\":{json}}}")), expected, "{json}");
    }
    let shapes = ["5", "true", "{}", "[true]", "[null]"];
    for json in shapes {
        let error = refused(Endpoint::Completions, format!("{{\"prompt\":{json}}}"));
        assert_eq!((error.code, error.param), ("invalid_type", Some("prompt")), "{json}");
    }
    for json in ["[-1]", "[1.5]", "[4294967296]", "[1,\"a\"]", "[[1,-1]]", "[1,[2]]", "[-0.5]", "[[1],[2]"] {
        let error = refused(Endpoint::Embeddings, format!("{{\"input\":{json}}}"));
        let expected = if json == "[[1],[2]" { ("invalid_json", None) } else { ("invalid_token_id", Some("input")) };
        assert_eq!((error.code, error.param), expected, "{json}");
    }
    assert_eq!(refused(Endpoint::Completions, r#"{"prompt":[]}"#).code, "invalid_value");
    assert_eq!(refused(Endpoint::Completions, r#"{"prompt":"\ud800"}"#).code, "invalid_value");
}

#[test]
fn further_prompts_and_outputs_are_counted() {
    let further = |endpoint, body: &str| parse(endpoint, body).further;
    let of = |outputs, (tokens, bytes, first_bytes)| {
        let prompts = FurtherPrompts { tokens, bytes, first_bytes };
        FurtherWork { outputs, prompts, skips_cache: false }
    };
    let none = (0, 0, 0);
    let cases = [
        (Endpoint::Completions, r#"{"prompt":"a","n":8}"#, of(7, none)),
        (Endpoint::Completions, r#"{"prompt":"a","n":2,"best_of":4}"#, of(3, none)),
        (Endpoint::Completions, r#"{"prompt":["abcd"]}"#, of(0, (0, 0, 4))),
        (Endpoint::Completions, r#"{"prompt":["abcd", "ab", "abcdef"],"n":2}"#, of(5, (0, 8, 4))),
        (Endpoint::Completions, r#"{"prompt":["abcd", "ab", "abcd", "ab"]}"#, of(3, (0, 2, 4))),
        (Endpoint::Completions, r#"{"prompt":[[7,8],[9],[],[1,2,3]]}"#, of(3, (4, 0, 0))),
        (Endpoint::Completions, r#"{"prompt":[[],[1,2,3]]}"#, of(1, (3, 0, 0))),
        (Endpoint::Completions, r#"{"prompt":[1,2,3]}"#, of(0, none)),
        (Endpoint::Completions, r#"{"prompt":["",""]}"#, of(1, none)),
        (Endpoint::Embeddings, r#"{"input":["ab","cd"],"n":5}"#, of(1, (0, 2, 2))),
        (Endpoint::Chat, r#"{"messages":[],"n":3}"#, of(2, none)),
        (Endpoint::Chat, r#"{"messages":[],"n":99999999999}"#, of(u32::MAX - 1, none)),
        (Endpoint::Completions, r#"{"prompt":["a","a"],"n":99999999999}"#, of(u32::MAX - 1, (0, 0, 1))),
    ];
    for (endpoint, body, expected) in cases {
        assert_eq!(further(endpoint, body), expected, "{body}");
    }
    let estimate = |tokens, bytes, first_bytes, first| FurtherPrompts { tokens, bytes, first_bytes }.estimate(first);
    assert_eq!(estimate(0, 40_000, 200, 50), 10_000, "at the rate of the first text");
    assert_eq!(estimate(0, 40_000, 2, 3), 10_000, "not at the rate of special tokens");
    assert_eq!((estimate(0, 100, 64, 640), estimate(7, 0, 0, 0)), (100, 7));
    assert_eq!(refused(Endpoint::Chat, r#"{"messages":[],"n":"x"}"#).param, Some("n"));
}

/// As vLLM 0.33 and SGLang 0.5: the probabilities of prompt tokens need their computation.
#[test]
fn prompt_logprobs_skip_the_cache() {
    let cases = [
        (Endpoint::Completions, r#"{"prompt":"a","prompt_logprobs":1}"#, true),
        (Endpoint::Completions, r#"{"prompt":"a","prompt_logprobs":0}"#, true),
        (Endpoint::Completions, r#"{"prompt":"a","prompt_logprobs":null,"logprobs":1}"#, false),
        (Endpoint::Completions, r#"{"prompt":"a","echo":true,"logprobs":1}"#, true),
        (Endpoint::Completions, r#"{"prompt":"a","echo":true}"#, false),
        (Endpoint::Completions, r#"{"prompt":"a","echo":false,"logprobs":1}"#, false),
        (Endpoint::Chat, r#"{"messages":[],"prompt_logprobs":5}"#, true),
        (Endpoint::Chat, r#"{"messages":[],"echo":true}"#, true),
        (Endpoint::Chat, r#"{"messages":[],"logprobs":true,"top_logprobs":5}"#, false),
        (Endpoint::Embeddings, r#"{"input":"a","prompt_logprobs":1}"#, false),
    ];
    for (endpoint, body, expected) in cases {
        assert_eq!(parse(endpoint, body).further.skips_cache, expected, "{body}");
    }
}

#[test]
fn chat_fields_are_forwarded_unchanged() {
    let body = r#"{"messages": [ {"role":"user","content":"\ud800 hi"} ], "tools":[{"a":1}], "documents":[{}],
        "chat_template_kwargs":{"enable_thinking":false}, "reasoning_effort":"low", "chat_template":"{{x}}",
        "add_generation_prompt":false, "continue_final_message":true}"#;
    let expected = ChatParts {
        tools: part(r#"[{"a":1}]"#),
        documents: part("[{}]"),
        template_kwargs: part(r#"{"enable_thinking":false}"#),
        reasoning_effort: part("\"low\""),
        add_generation_prompt: Some(false),
        continue_final_message: Some(true),
        has_own_template: true,
        ..chat(r#"[ {"role":"user","content":"\ud800 hi"} ]"#)
    };
    assert_eq!(prompt(Endpoint::Chat, body), ClientPrompt::Chat(Box::new(expected)));
    let embedded = ChatParts { add_generation_prompt: Some(false), ..chat("[1]") };
    assert_eq!(prompt(Endpoint::Embeddings, r#"{"messages":[1]}"#), ClientPrompt::Chat(Box::new(embedded)));
}

#[test]
fn responses_become_chats() {
    let cases = [
        (r#""input":"hi \"x\"""#, r#"[{"role":"user","content":"hi \"x\""}]"#),
        (
            r#""instructions":"be brief","input":"hi""#,
            r#"[{"role":"system","content":"be brief"},{"role":"user","content":"hi"}]"#,
        ),
        (r#""input":[],"tools":[ ]"#, "[]"),
        (
            r#""input":[{"role":"user","content":"a"},{"type":"message","id":"m","role":"assistant","status":"completed",
                "content":[{"type":"output_text","text":"b","annotations":[]},{"text":"c","type":"input_text"}]}]"#,
            r#"[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]"#,
        ),
    ];
    for (fields, messages) in cases {
        let expected = ClientPrompt::Chat(Box::new(chat(messages)));
        assert_eq!(prompt(Endpoint::Responses, &format!("{{{fields}}}")), expected, "{fields}");
    }
    let effort = prompt(Endpoint::Responses, r#"{"input":[],"reasoning":{"effort":"high","summary":null}}"#);
    let expected = ChatParts { reasoning_effort: part("\"high\""), ..chat("[]") };
    assert_eq!(effort, ClientPrompt::Chat(Box::new(expected)));
}

#[test]
fn prompts_without_tokens_have_a_reason() {
    let cases = [
        (Endpoint::Completions, r#"{"prompt_embeds":"AAAA"}"#, "embeddings"),
        (Endpoint::Completions, r#"{"prompt":"x","prompt_embeds":"AAAA"}"#, "embeddings"),
        (Endpoint::Completions, r#"{"prompt":"x","suffix":"y"}"#, "suffix"),
        (Endpoint::Completions, r#"{"prompt":"x","truncate_prompt_tokens":5}"#, "truncated"),
        (Endpoint::Completions, r#"{"prompt":"x","add_special_tokens":false}"#, "special_tokens"),
        (Endpoint::Completions, r#"{"prompt":"x","lora_path":"y"}"#, "adapter"),
        (Endpoint::Completions, r#"{"prompt":"x","extra_key":"y"}"#, "extra_key"),
        (Endpoint::Completions, r#"{"prompt":"x","session_params":{}}"#, "session"),
        (Endpoint::Chat, r#"{"messages":[],"add_special_tokens":true}"#, "special_tokens"),
        (Endpoint::Chat, r#"{"messages":[],"multi_modal_data":{}}"#, "multimodal"),
        (Endpoint::Embeddings, r#"{"input":[{"image":"x"}]}"#, "multimodal"),
        (Endpoint::Responses, r#"{"input":"x","previous_response_id":"r"}"#, "stored"),
        (Endpoint::Responses, r#"{"conversation":"c"}"#, "stored"),
        (Endpoint::Responses, r#"{"prompt":{"id":"p"}}"#, "stored"),
        (Endpoint::Responses, r#"{"input":"x","tools":[{"type":"function"}]}"#, "tools"),
        (Endpoint::Responses, r#"{"input":[{"type":"function_call"}]}"#, "items"),
        (Endpoint::Responses, r#"{"input":[{"role":"user"}]}"#, "items"),
        (Endpoint::Responses, r#"{"input":[{"role":"user","content":[5]}]}"#, "items"),
        (Endpoint::Responses, r#"{"input":[{"role":"user","content":[{"type":"input_text","text":5}]}]}"#, "items"),
        (Endpoint::Responses, r#"{"input":[{"role":"\"","content":"x"}]}"#, "items"),
        (Endpoint::Responses, r#"{"input":[{"role":"user","content":[{"type":"input_image"}]},5]}"#, "multimodal"),
    ];
    for (endpoint, body, reason) in cases {
        assert_eq!(prompt(endpoint, body), ClientPrompt::Opaque(reason), "{body}");
    }
    let usual = r#"{"prompt":"x","add_special_tokens":true,"suffix":null,"extra_key":null}"#;
    assert_eq!(prompt(Endpoint::Completions, usual), ClientPrompt::Text("x".to_owned()));
}

#[test]
fn wrong_types_name_their_field() {
    let cases = [
        (Endpoint::Chat, r#"{"messages":{}}"#, "invalid_type", "messages"),
        (Endpoint::Chat, r#"{}"#, "missing_field", "messages"),
        (Endpoint::Chat, r#"{"messages":null}"#, "missing_field", "messages"),
        (Endpoint::Completions, r#"{}"#, "missing_field", "prompt"),
        (Endpoint::Embeddings, r#"{}"#, "missing_field", "input"),
        (Endpoint::Responses, r#"{}"#, "missing_field", "input"),
        (Endpoint::Responses, r#"{"input":5}"#, "invalid_type", "input"),
        (Endpoint::Responses, r#"{"input":[5]}"#, "invalid_type", "input"),
        (Endpoint::Responses, r#"{"input":[{"role":"user","role":"user"}]}"#, "invalid_type", "input"),
        (Endpoint::Responses, r#"{"input":"x","instructions":[]}"#, "invalid_type", "instructions"),
        (Endpoint::Responses, r#"{"input":"x","reasoning":5}"#, "invalid_type", "reasoning"),
        (Endpoint::Chat, r#"{"messages":[],"model":5}"#, "invalid_type", "model"),
        (Endpoint::Chat, r#"{"messages":[],"model":""}"#, "invalid_value", "model"),
        (Endpoint::Chat, r#"{"messages":[],"stream":"maybe"}"#, "invalid_type", "stream"),
        (Endpoint::Chat, r#"{"messages":[],"cache_salt":["a"]}"#, "invalid_type", "cache_salt"),
        (Endpoint::Chat, r#"{"messages":[],"session_id":""}"#, "invalid_session_id", "session_id"),
        (Endpoint::Chat, r#"{"messages":[],"max_tokens":-1}"#, "invalid_type", "max_tokens"),
        (Endpoint::Chat, r#"{"messages":[],"max_tokens":1.5}"#, "invalid_type", "max_tokens"),
        (Endpoint::Chat, r#"{"messages":[],"max_tokens":"nine"}"#, "invalid_type", "max_tokens"),
        (Endpoint::Chat, r#"{"messages":[],"tools":{}}"#, "invalid_type", "tools"),
        (Endpoint::Chat, r#"{"messages":[],"chat_template_kwargs":[]}"#, "invalid_type", "chat_template_kwargs"),
        (Endpoint::Chat, r#"{"messages":[],"model":"a","model":"a"}"#, "duplicate_field", "model"),
        (Endpoint::Chat, r#"{"messages":[],"m\u006fdel":"a","model":null}"#, "duplicate_field", "model"),
        (
            Endpoint::Chat,
            r#"{"messages":[],"routed_dp_rank":1,"routed_dp_rank":2}"#,
            "duplicate_field",
            "routed_dp_rank",
        ),
    ];
    for (endpoint, body, code, param) in cases {
        let error = refused(endpoint, body);
        assert_eq!((error.code, error.param), (code, Some(param)), "{body}");
        assert!(error.message.contains(param) || code == "invalid_session_id", "{error}");
    }
}

#[test]
fn bodies_other_than_json_objects_are_rejected() {
    let cases: [(&[u8], &str); 14] = [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"{\"a\":1", "invalid_json"),
        (b"{\"a\":1,}", "invalid_json"),
        (b"{}{}", "invalid_json"),
        (b"{\"a\":NaN}", "invalid_json"),
        (b"{\"a\":\"\n\"}", "invalid_json"),
        (b"\xef\xbb\xbf{}", "invalid_json"),
        (b"[]", "not_an_object"),
        (b"\"x\"", "not_an_object"),
        (b"5", "not_an_object"),
        (b"null", "not_an_object"),
        (b"{\"a\":\"\xff\"}", "invalid_utf8"),
        (b"{\0\"\0", "invalid_json"),
    ];
    for endpoint in ALL {
        for (body, code) in cases {
            assert_eq!(refused(endpoint, body).code, code, "{body:?}");
        }
    }
    let secret = refused(Endpoint::Chat, r#"{"messages":[],"cache_salt":"hush" 5}"#);
    assert!(!secret.message.contains("hush"), "{secret}");
}

#[test]
fn nesting_is_limited_in_forwarded_fields() {
    let nested = |depth: usize| format!("{{\"messages\":{}\"]\\\"[\"{}}}", "[".repeat(depth), "]".repeat(depth));
    assert!(RequestBody::parse(Endpoint::Chat, nested(127).into()).is_ok());
    assert_eq!(refused(Endpoint::Chat, nested(128)).code, "too_deep");
    assert_eq!(refused(Endpoint::Chat, nested(1_000_000)).code, "too_deep");
    let in_text = format!("{{\"messages\":[\"{}\"]}}", "[".repeat(1000));
    assert!(RequestBody::parse(Endpoint::Chat, in_text.into()).is_ok());
}

#[test]
fn debug_output_hides_content() {
    let parsed = parse(Endpoint::Completions, r#"{"prompt":"hush","cache_salt":"hush"}"#);
    let shown = format!("{parsed:?} {:?}", Edits { cache_salt: Some("hush"), ..Edits::default() });
    assert!(!shown.contains("hush"), "{shown}");
}

/// Bodies of every shape, mutated by the properties.
const BODIES: [(Endpoint, &str); 4] = [
    (
        Endpoint::Chat,
        r#"{"model":"a","messages":[{"role":"user","content":"\u00e9"}],"stream":true,"tools":[],"max_tokens":5}"#,
    ),
    (Endpoint::Completions, r#"{"model":"a","prompt":[[1,2],[3]],"cache_salt":"s","routed_dp_rank":1,"suffix":null}"#),
    (Endpoint::Embeddings, r#"{"model":"a","input":["x","y"],"session_id":"c","add_special_tokens":true}"#),
    (
        Endpoint::Responses,
        r#"{"model":"a","input":[{"role":"user","content":[{"type":"input_text","text":"x"}]}],"reasoning":{"effort":"low"}}"#,
    ),
];

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(body in proptest::collection::vec(any::<u8>(), 0..64)) {
        for endpoint in ALL {
            if let Ok(parsed) = RequestBody::parse(endpoint, Bytes::from(body.clone())) {
                drop(parsed.body(Edits { model: Some("m"), cache_salt: Some("s"), ..Edits::default() }));
            }
        }
    }

    #[test]
    fn mutated_bodies_are_parsed_or_rejected(
        which in 0..BODIES.len(),
        spoils in proptest::collection::vec((any::<prop::sample::Index>(), 0..3_u8, any::<prop::sample::Index>()), 1..4),
    ) {
        let (endpoint, body) = BODIES[which];
        let mut body = body.as_bytes().to_vec();
        for (at, how, byte) in spoils {
            let at = at.index(body.len());
            let byte = *byte.get(b"\"\\{}[]:,0-9.eEnutfalse \xff\x00\xe9ud8".as_slice());
            match how {
                0 => body[at] = byte,
                1 => body.insert(at, byte),
                _ => drop(body.remove(at)),
            }
        }
        match RequestBody::parse(endpoint, Bytes::from(body)) {
            Ok(parsed) => {
                let edited = parsed.body(Edits { model: Some("m"), cache_salt: Some("s"), ..Edits::default() });
                let again = RequestBody::parse(endpoint, edited).expect("edited bodies parse");
                prop_assert_eq!(again.model.as_deref(), Some("m"));
                prop_assert_eq!(again.prompt, parsed.prompt);
            }
            Err(error) => prop_assert_eq!(error.status.as_u16(), 400),
        }
    }
}
