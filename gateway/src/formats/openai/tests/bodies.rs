//! Parsing of bodies, by example.

use crate::formats::openai::{ApiError, ChatParts, ClientPrompt, Endpoint, FurtherPrompts, FurtherWork, RequestBody};
use axum::body::Bytes;

const ALL: [Endpoint; 4] = [Endpoint::Chat, Endpoint::Completions, Endpoint::Embeddings, Endpoint::Responses];

fn parse(endpoint: Endpoint, body: &str) -> RequestBody {
    RequestBody::parse(endpoint, Bytes::copy_from_slice(body.as_bytes()))
        .unwrap_or_else(|error| panic!("{body}: {error}"))
}

fn refused(endpoint: Endpoint, body: impl AsRef<[u8]>) -> ApiError {
    let body = Bytes::copy_from_slice(body.as_ref());
    let error = RequestBody::parse(endpoint, body.clone()).err().expect("rejected");
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

/// Lines of `endpoint | columns | ...`, with the endpoint in front.
fn table(lines: &str) -> impl Iterator<Item = (Endpoint, Vec<&str>)> {
    lines.trim().lines().map(|line| {
        let mut columns: Vec<&str> = line.split(" | ").map(str::trim).collect();
        let name = columns.remove(0);
        (*ALL.iter().find(|endpoint| endpoint.name() == name).expect("an endpoint"), columns)
    })
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
    // Further outputs; tokens and bytes of further prompts, and bytes of the first one.
    let cases = r#"
completions | {"prompt":"a","n":8} | 7 0 0 0
completions | {"prompt":"a","n":2,"best_of":4} | 3 0 0 0
completions | {"prompt":["abcd"]} | 0 0 0 4
completions | {"prompt":["abcd", "ab", "abcdef"],"n":2} | 5 0 8 4
completions | {"prompt":["abcd", "ab", "abcd", "ab"]} | 3 0 2 4
completions | {"prompt":[[7,8],[9],[],[1,2,3]]} | 3 4 0 0
completions | {"prompt":[[],[1,2,3]]} | 1 3 0 0
completions | {"prompt":[1,2,3]} | 0 0 0 0
completions | {"prompt":["",""]} | 1 0 0 0
embeddings | {"input":["ab","cd"],"n":5} | 1 0 2 2
chat | {"messages":[],"n":3} | 2 0 0 0
chat | {"messages":[],"n":99999999999} | 4294967294 0 0 0
completions | {"prompt":["a","a"],"n":99999999999} | 4294967294 0 0 1
"#;
    for (endpoint, columns) in table(cases) {
        let FurtherWork { outputs, prompts: FurtherPrompts { tokens, bytes, first_bytes }, skips_cache } =
            parse(endpoint, columns[0]).further;
        assert_eq!(format!("{outputs} {tokens} {bytes} {first_bytes}"), columns[1], "{columns:?}");
        assert!(!skips_cache);
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
    let cases = r#"
completions | {"prompt":"a","prompt_logprobs":1} | true
completions | {"prompt":"a","prompt_logprobs":0} | true
completions | {"prompt":"a","prompt_logprobs":null,"logprobs":1} | false
completions | {"prompt":"a","echo":true,"logprobs":1} | true
completions | {"prompt":"a","echo":true} | false
completions | {"prompt":"a","echo":false,"logprobs":1} | false
chat | {"messages":[],"prompt_logprobs":5} | true
chat | {"messages":[],"echo":true} | true
chat | {"messages":[],"logprobs":true,"top_logprobs":5} | false
embeddings | {"input":"a","prompt_logprobs":1} | false
"#;
    for (endpoint, columns) in table(cases) {
        let skips_cache = parse(endpoint, columns[0]).further.skips_cache;
        assert_eq!(skips_cache.to_string(), columns[1], "{columns:?}");
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
fn prompts_without_tokens_have_a_reason() {
    let cases = r#"
completions | {"prompt_embeds":"AAAA"} | embeddings
completions | {"prompt":"x","prompt_embeds":"AAAA"} | embeddings
completions | {"prompt":"x","suffix":"y"} | suffix
completions | {"prompt":"x","truncate_prompt_tokens":5} | truncated
completions | {"prompt":"x","add_special_tokens":false} | special_tokens
completions | {"prompt":"x","lora_path":"y"} | adapter
completions | {"prompt":"x","extra_key":"y"} | extra_key
completions | {"prompt":"x","session_params":{}} | session
chat | {"messages":[],"add_special_tokens":true} | special_tokens
chat | {"messages":[],"multi_modal_data":{}} | multimodal
embeddings | {"input":[{"image":"x"}]} | multimodal
responses | {"input":"x","previous_response_id":"r"} | stored
responses | {"conversation":"c"} | stored
responses | {"prompt":{"id":"p"}} | stored
responses | {"input":"x","tools":[{"type":"function"}]} | tools
responses | {"input":[{"type":"function_call"}]} | items
responses | {"input":[{"role":"user"}]} | items
responses | {"input":[{"role":"user","content":[5]}]} | items
responses | {"input":[{"role":"user","content":[{"type":"input_text","text":5}]}]} | items
responses | {"input":[{"role":"\"","content":"x"}]} | items
responses | {"input":[{"role":"user","content":[{"type":"input_image"}]},5]} | multimodal
"#;
    for (endpoint, columns) in table(cases) {
        let ClientPrompt::Opaque(reason) = prompt(endpoint, columns[0]) else { panic!("{columns:?}") };
        assert_eq!(reason, columns[1], "{columns:?}");
    }
    let usual = r#"{"prompt":"x","add_special_tokens":true,"suffix":null,"extra_key":null}"#;
    assert_eq!(prompt(Endpoint::Completions, usual), ClientPrompt::Text("x".to_owned()));
}

#[test]
fn wrong_types_name_their_field() {
    let cases = r#"
chat | {"messages":{}} | invalid_type | messages
chat | {} | missing_field | messages
chat | {"messages":null} | missing_field | messages
completions | {} | missing_field | prompt
embeddings | {} | missing_field | input
responses | {} | missing_field | input
responses | {"input":5} | invalid_type | input
responses | {"input":[5]} | invalid_type | input
responses | {"input":[{"role":"user","role":"user"}]} | invalid_type | input
responses | {"input":"x","instructions":[]} | invalid_type | instructions
responses | {"input":"x","reasoning":5} | invalid_type | reasoning
chat | {"messages":[],"model":5} | invalid_type | model
chat | {"messages":[],"model":""} | invalid_value | model
chat | {"messages":[],"stream":"maybe"} | invalid_type | stream
chat | {"messages":[],"cache_salt":["a"]} | invalid_type | cache_salt
chat | {"messages":[],"session_id":""} | invalid_session_id | session_id
chat | {"messages":[],"max_tokens":-1} | invalid_type | max_tokens
chat | {"messages":[],"max_tokens":1.5} | invalid_type | max_tokens
chat | {"messages":[],"max_tokens":"nine"} | invalid_type | max_tokens
chat | {"messages":[],"tools":{}} | invalid_type | tools
chat | {"messages":[],"chat_template_kwargs":[]} | invalid_type | chat_template_kwargs
chat | {"messages":[],"model":"a","model":"a"} | duplicate_field | model
chat | {"messages":[],"m\u006fdel":"a","model":null} | duplicate_field | model
chat | {"messages":[],"routed_dp_rank":1,"routed_dp_rank":2} | duplicate_field | routed_dp_rank
"#;
    for (endpoint, columns) in table(cases) {
        let [body, code, param] = columns[..] else { panic!("{columns:?}") };
        let error = refused(endpoint, body);
        assert_eq!((error.code, error.param), (code, Some(param)), "{body}");
        assert!(error.message.contains(param) || code == "invalid_session_id", "{error}");
    }
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
