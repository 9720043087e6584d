use std::path::PathBuf;

use axum::body::Bytes;
use proptest::prelude::*;
use proptest::sample::select;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::*;

/// Contents of `tests/data/tokens/expected.json`: texts rendered by `apply_chat_template` of transformers 4.57.6 and
/// ids from `PreTrainedTokenizerFast` with the files beside it, with messages first converted to vLLM's shape.
/// Generated once with Python; the tokenizer was trained on a few invented lines.
#[derive(Deserialize)]
struct Expected {
    chats: Vec<ChatCase>,
    texts: Vec<TextCase>,
}

#[derive(Deserialize)]
struct ChatCase {
    name: String,
    template: Option<String>,
    messages: Box<RawValue>,
    tools: Option<Box<RawValue>>,
    kwargs: Box<RawValue>,
    add_generation_prompt: bool,
    continue_final_message: bool,
    rendered: String,
    ids: Vec<u32>,
}

#[derive(Deserialize)]
struct TextCase {
    text: String,
    ids: Vec<u32>,
}

fn data(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokens").join(name)
}

fn expected() -> Expected {
    serde_json::from_str(&std::fs::read_to_string(data("expected.json")).unwrap()).unwrap()
}

fn local(tokenizer: &str, template: Option<&str>, cache_bytes_max: u64) -> Local {
    let template = template.map(data);
    // 26 July 2024, 12:00.
    let clock = || 1_721_995_200;
    let meters = Arc::new(TokenMeters::new("m"));
    Local::load(&data(tokenizer), template.as_deref(), cache_bytes_max, clock, meters).unwrap()
}

fn bytes(raw: &RawValue) -> Bytes {
    Bytes::from(raw.get().to_owned())
}

fn chat(messages: &str) -> ChatParts {
    ChatParts { messages: Bytes::from(messages.to_owned()), ..ChatParts::default() }
}

impl ChatCase {
    fn parts(&self) -> ChatParts {
        ChatParts {
            messages: bytes(&self.messages),
            tools: self.tools.as_deref().map(bytes),
            documents: None,
            template_kwargs: Some(bytes(&self.kwargs)),
            add_generation_prompt: Some(self.add_generation_prompt),
            continue_final_message: Some(self.continue_final_message),
            ..ChatParts::default()
        }
    }
}

#[test]
fn chats_match_transformers() {
    for case in expected().chats {
        let local = local("tokenizer.json", case.template.as_deref(), 1 << 20);
        let parts = case.parts();
        assert_eq!(
            local.templates.render(&parts, MediaForm::Rejected).as_deref(),
            Ok(case.rendered.as_str()),
            "{}",
            case.name
        );
        assert_eq!(local.chat(&parts, None).as_deref(), Ok(&case.ids[..]), "{}", case.name);
        assert_eq!(local.chat(&parts, None).as_deref(), Ok(&case.ids[..]), "again: {}", case.name);
    }
}

#[test]
fn texts_include_surrounding_special_tokens() {
    for cache_bytes_max in [0, 1 << 20] {
        let local = local("tokenizer.json", None, cache_bytes_max);
        assert!(local.around.is_some());
        for case in expected().texts {
            assert_eq!(local.text(&case.text), Ok(case.ids), "{:?}", case.text);
        }
    }
}

#[test]
fn template_date_defaults_to_today() {
    let local = local("tokenizer.json", Some("llama3.jinja"), 0);
    let rendered = local.templates.render(&chat(r#"[{"role":"user","content":"Hi"}]"#), MediaForm::Rejected).unwrap();
    assert!(rendered.contains("Today: 26 Jul 2024\n"), "{rendered}");
}

#[test]
fn unrenderable_chats_have_no_tokens() {
    let local = local("tokenizer.json", None, 0);
    let user = |content: &str| format!(r#"[{{"role":"user","content":{content}}}]"#);
    let image = r#"[{"type":"text","text":"a"},{"type":"image_url","image_url":{"url":"http://x/y.png"}}]"#;
    let cases = [
        (chat(&user(image)), NoTokens::MULTIMODAL),
        (chat(&user(r#"[{"image_url":"http://x/y.png"}]"#)), NoTokens::MULTIMODAL),
        (ChatParts { has_own_template: true, ..chat(&user("\"a\"")) }, NoTokens::OWN_TEMPLATE),
        (chat(r#"[{"role":"nobody","content":"a"}]"#), NoTokens::TEMPLATE_ERROR),
        (chat(r#"{"role":"user"}"#), NoTokens::MALFORMED),
        (chat("[{\"role\":\"user\",\"content\":7}]"), NoTokens::MALFORMED),
        (chat("\u{fffd}"), NoTokens::MALFORMED),
        (chat(&"[".repeat(100_000)), NoTokens::MALFORMED),
        (chat(&user(&format!("\"{}\"", "x".repeat(PROMPT_BYTES_MAX)))), NoTokens::TOO_LONG),
        (ChatParts { tools: Some(Bytes::from_static(b"[7]")), ..chat(&user("\"a\"")) }, NoTokens::MALFORMED),
        (ChatParts { template_kwargs: Some(Bytes::from_static(b"[]")), ..chat(&user("\"a\"")) }, NoTokens::MALFORMED),
        (ChatParts { continue_final_message: Some(true), ..chat(&user("\"a\"")) }, NoTokens::TEMPLATE_ERROR),
    ];
    for (parts, reason) in cases {
        let shown = String::from_utf8_lossy(&parts.messages[..parts.messages.len().min(80)]).into_owned();
        assert_eq!(local.chat(&parts, None), Err(reason), "{shown}");
    }
    assert_eq!(local.text(&"x".repeat(PROMPT_BYTES_MAX + 1)), Err(NoTokens::TOO_LONG));
}

#[test]
fn template_work_is_bounded() {
    let endless = [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% for a in range(99999) %}{{ messages[0].content }}{% endfor %}",
    ];
    for source in endless {
        let sources =
            crate::tokens::template::TemplateSources { default: Some(source.to_owned()), ..Default::default() };
        let templates = Templates::compile(sources, || 0).unwrap();
        let rendered = templates
            .render(&chat(&format!(r#"[{{"role":"user","content":"{}"}}]"#, "x".repeat(1_000))), MediaForm::Rejected);
        assert!(matches!(rendered, Err(NoTokens::TEMPLATE_ERROR | NoTokens::TOO_LONG)), "{source}: {rendered:?}");
    }
}

/// Cause: steps are limited, but not the bytes that a step copies. A template that appends each system message to a text
/// copies 61 GB (computed) for a body of 4 MiB with 58,000 messages, within its steps.
#[test]
fn copied_text_of_a_template_is_bounded() {
    let source =
        "{% set ns = namespace(s='') %}{% for m in messages %}{% set ns.s = ns.s + m.content %}{% endfor %}{{ ns.s }}";
    let sources = crate::tokens::template::TemplateSources { default: Some(source.to_owned()), ..Default::default() };
    let templates = Templates::compile(sources, || 0).unwrap();
    let rendered = |count: usize| {
        let messages = vec![r#"{"role":"system","content":"xxxxxxxxxxxxxxxxxxxx"}"#; count].join(",");
        templates.render(&chat(&format!("[{messages}]")), MediaForm::Rejected).map(|text| text.len())
    };
    assert_eq!(rendered(1_000), Ok(20_000));
    assert_eq!(rendered(60_000), Err(NoTokens::TOO_LONG));
}

#[test]
fn next_turn_tokenizes_only_new_text() {
    let local = local("tokenizer.json", None, 1 << 20);
    let cached = |local: &Local| {
        let kept = local.kept.as_ref().unwrap();
        kept.cache.lock().bytes
    };
    let long = "once upon a time ".repeat(200);
    let first = format!(r#"{{"role":"user","content":"{long}"}}"#);
    local.chat(&chat(&format!("[{first}]")), None).unwrap();
    let after_first = cached(&local);
    assert!(after_first > 4 * 600, "{after_first}");
    let text = local.templates.render(&chat(&format!("[{first}]")), MediaForm::Rejected).unwrap();
    let mut ids = Vec::new();
    let from_cache = local.encode_kept(local.kept.as_ref().unwrap(), &text, &mut ids).unwrap();
    // All except the part after the last special token at sufficient distance.
    assert!(ids.len() - from_cache < 300, "{} of {}", from_cache, ids.len());
    let second =
        format!(r#"[{first},{{"role":"assistant","content":"Go on."}},{{"role":"user","content":"{long}!"}}]"#);
    let uncached = super::tests::local("tokenizer.json", None, 0);
    assert_eq!(local.chat(&chat(&second), None), uncached.chat(&chat(&second), None));
    assert!(cached(&local) > after_first);
}

#[test]
fn tokenizers_without_cut_points_are_uncached() {
    let text = std::fs::read_to_string(data("tokenizer.json")).unwrap();
    let changed = |from: &str, to: &str| {
        let changed = text.replace(from, to);
        assert_ne!(changed, text, "{from}");
        Tokenizer::from_bytes(changed).unwrap()
    };
    assert!(Cutter::of(&changed(r#""single_word":false"#, r#""single_word":true"#)).is_none());
    assert!(Cutter::of(&changed(r#""rstrip":false"#, r#""rstrip":true"#)).is_none());
    assert!(Cutter::of(&changed(r#""special":true"#, r#""special":false"#)).is_none());
    // Tokens found in normalized text depend on the text around them.
    assert!(Cutter::of(&changed(r#""normalized":false"#, r#""normalized":true"#)).is_none());
}

/// Pieces of conversations: all kinds of text, special tokens and parts of them.
fn piece() -> impl Strategy<Value = String> {
    let fixed = "<|im_start|>~<|im_end|>~<|eot_id|>~<|begin_of_text|>~<tool_call>~</tool_call>~<s>~</s>~<|im_~end|>~<~|>~ ~  ~\n~\r\n~\t~'s~user\n~Hello world~ 12345~é~e\u{301}~東京~🙂~▁~\u{0}~\u{2028}";
    let fixed: Vec<&str> = fixed.split('~').collect();
    prop_oneof![4 => select(fixed).prop_map(str::to_owned), 1 => any::<String>()]
}

fn conversations() -> impl Strategy<Value = Vec<String>> {
    // Each turn continues some prefix of the previous one.
    let turn = (0.0..=1.0_f64, prop::collection::vec(piece(), 0..20));
    prop::collection::vec(turn, 1..8).prop_map(|turns| {
        let mut texts: Vec<String> = vec![String::new()];
        for (share, pieces) in turns {
            let before = texts.last().expect("the list is not empty");
            let wanted = (before.len() as f64 * share) as usize;
            let cut = (0..=wanted).rev().find(|at| before.is_char_boundary(*at)).unwrap_or(0);
            texts.push(format!("{}{}", &before[..cut], pieces.concat()));
        }
        texts
    })
}

/// A tokenizer with modified settings, parts of any length, and a small cache.
fn variant(file: &str, changes: &[(&str, &str)], chunk_bytes_min: usize, cache_bytes: usize) -> Local {
    let mut local = local(file, Some("llama3.jinja"), 0);
    let mut text = std::fs::read_to_string(data(file)).unwrap();
    for (from, to) in changes {
        assert!(text.contains(from), "{from}");
        text = text.replace(from, to);
    }
    local.tokenizer = Tokenizer::from_bytes(text).unwrap();
    local.words = Words::of(&local.tokenizer);
    local.keep(cache_bytes, chunk_bytes_min);
    local
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn cached_and_uncached_tokens_are_equal(
        texts in conversations(),
        chunk_bytes_min in select(&[1_usize, 8, 40][..]),
        cache_bytes in select(&[600_usize, 1 << 20][..]),
    ) {
        thread_local! {
            // Loading them is slow.
            static VARIANTS: Vec<Local> = vec![
                variant("tokenizer.json", &[], 1, 1),
                variant("tokenizer.json", &[(r#""lstrip":false"#, r#""lstrip":true"#)], 1, 1),
                variant("tokenizer.json", &[(r#""add_prefix_space":false"#, r#""add_prefix_space":true"#)], 1, 1),
                variant("tokenizer.json", &[(r#""normalizer":null"#, r#""normalizer":{"type":"NFC"}"#)], 1, 1),
                variant("tokenizer.json", &[(r#""normalizer":null"#, r#""normalizer":{"type":"Prepend","prepend":"_"}"#)], 1, 1),
                variant("tokenizer.json", &[(r#""normalizer":null"#, r#""normalizer":{"type":"Lowercase"}"#)], 1, 1),
                variant("tokenizer.json", &[(r#""use_regex":false"#, r#""use_regex":true"#)], 1, 1),
                variant("tokenizer.json", &[(r#""pretokenizers":["#, r#""pretokenizers":[{"type":"Split","pattern":{"Regex":"[\\s\\p{N}]+"},"behavior":"Isolated","invert":true},"#)], 1, 1),
                variant("tokenizer.json", &[
                    (r#""normalizer":null"#, r#""normalizer":{"type":"NFC"}"#),
                    (r#"tool_call>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false"#, r#"tool_call>","single_word":false,"lstrip":false,"rstrip":false,"normalized":true"#),
                ], 1, 1),
                variant("metaspace.json", &[], 1, 1),
                variant("metaspace.json", &[("\"first\"", "\"always\"")], 1, 1),
                variant("metaspace.json", &[("\"first\"", "\"never\"")], 1, 1),
            ];
        }
        VARIANTS.with(|variants| {
            for (n, local) in variants.iter().enumerate() {
                let cutter = Cutter::of(&local.tokenizer).expect("the tokenizer has cut points");
                prop_assert!(local.is_cached(), "variant {}", n);
                prop_assert_eq!(local.words.is_some(), ![1, 2, 9, 10, 11].contains(&n), "variant {}", n);
                let cache = Mutex::new(Cache::new(cache_bytes));
                let kept = Kept { cutter, keys: Keys::new(), cache, chunk_bytes_min };
                for text in &texts {
                    let mut ids = Vec::new();
                    local.encode_kept(&kept, text, &mut ids).unwrap();
                    prop_assert_eq!(&ids, &whole(&local.tokenizer, text, false).unwrap(), "variant {}: {:?}", n, text);
                    prop_assert!(kept.cache.lock().bytes <= cache_bytes);
                }
            }
            Ok(())
        })?;
    }
}

/// A template that prints its input.
fn printed(parts: &ChatParts, source: &str) -> String {
    let sources = super::super::template::TemplateSources { default: Some(source.to_owned()), ..Default::default() };
    let templates = Templates::compile(sources, || 0).expect("a template");
    templates.render(parts, MediaForm::Rejected).expect("a prompt")
}

/// Reference: `_strip_claude_code_billing_header` and `_parse_chat_message_content` of vLLM 0.32, `Function` and
/// `process_content_for_template_format` of SGLang 0.5.23.
#[test]
fn chats_have_the_shape_of_the_engine() {
    const TEXT: &str = "{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}";
    const PARTS: &str = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}<{{ c.text }}>{% endfor %}{% endif %};{% endfor %}";
    let billing = r#"[{"role":"system","content":"x-anthropic-billing-header: cch=1;\nRules"},{"role":"user","content":"x-anthropic-billing-header"}]"#;
    let sglang = |messages| ChatParts { is_sglang: true, ..chat(messages) };
    assert_eq!(printed(&chat(billing), TEXT), "system=Rules;user=x-anthropic-billing-header;");
    assert!(printed(&sglang(billing), TEXT).contains("cch=1"));
    let only = r#"[{"role":"system","content":[{"type":"text","text":"x-anthropic-billing-header: a"},{"type":"text","text":"b"}]}]"#;
    assert_eq!(printed(&chat(only), PARTS), "<b>;");
    let texts = r#"[{"role":"tool","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}]"#;
    assert_eq!(printed(&chat(texts), PARTS), "a\nb;");
    assert_eq!(printed(&sglang(texts), TEXT), "tool=a b;");

    const TOOLS: &str = "{{ tools | tojson }}";
    let tools = r#"[{"type":"function","function":{"parameters":{},"strict":false,"name":"f","extra":1}}]"#;
    let with_tools = |parts: ChatParts| ChatParts { tools: Some(Bytes::from(tools)), ..parts };
    let function = |parts| printed(&with_tools(parts), TOOLS);
    let expected =
        r#"[{"type": "function", "function": {"name": "f", "description": null, "parameters": {}, "strict": false}}]"#;
    assert_eq!(function(chat("[]")), expected);
    let expected =
        r#"[{"type": "function", "function": {"parameters": {}, "strict": false, "name": "f", "description": null}}]"#;
    assert_eq!(function(sglang("[]")), expected);

    const EFFORT: &str = "{{ reasoning_effort }} {{ enable_thinking }}";
    let effort = |effort: &'static str, kwargs: &'static str, is_sglang| {
        let (reasoning_effort, template_kwargs) = (Some(Bytes::from(effort)), Some(Bytes::from(kwargs)));
        printed(&ChatParts { reasoning_effort, template_kwargs, is_sglang, ..chat("[]") }, EFFORT)
    };
    assert_eq!(effort("\"high\"", "{}", false).to_lowercase(), "high true");
    assert_eq!(effort("\"none\"", "{}", false).to_lowercase(), "none false");
    assert_eq!(effort("\"high\"", r#"{"enable_thinking":false}"#, false).to_lowercase(), "high false");
    assert_eq!(effort("\"high\"", "{}", true), "high ");
}

#[test]
fn templates_are_tried_with_a_system_message_between_turns() {
    let takes = |source: &str| {
        let sources =
            super::super::template::TemplateSources { default: Some(source.to_owned()), ..Default::default() };
        Templates::compile(sources, || 0).expect("a template").take_inline_system()
    };
    assert!(takes("{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"));
    assert!(!takes(
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}{{ m.content }}{% endfor %}"
    ));
    assert!(!takes("{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"), "dropped in silence");
}

#[test]
fn lengths_bound_the_number_of_tokens() {
    let local = local("tokenizer.json", None, 0);
    let bytes = local.token_bytes_max.expect("byte-level");
    assert_eq!(bytes, "<|start_header_id|>".len());
    let text = "<|start_header_id|>".repeat(10);
    assert_eq!(
        (local.text(&text).unwrap().len(), local.check_length(&text, Some(10))),
        (11, Ok(())),
        "one token begins each text"
    );
    assert_eq!(local.check_length(&(text.clone() + "a"), Some(10)), Err(NoTokens::over_context(11)));
    assert_eq!(local.check_length(&text, None), Ok(()));
    // Its normalizer or its model may map several bytes to fewer tokens.
    assert_eq!(self::local("metaspace.json", None, 0).token_bytes_max, None);
}
