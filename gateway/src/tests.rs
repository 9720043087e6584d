//! Checks of the gateway's parsers that hold for any bytes, run with seeded mutations of valid inputs.

use axum::body::Bytes;
use pointsman::test_support::hostile::HostileTarget;
use serde::de::IgnoredAny;

use crate::formats::anthropic::{Purpose, chat_body};
use crate::formats::openai::{Edits, Endpoint, RequestBody};
use crate::picker::tests::picker_messages;
use crate::settings::{ConfigFile, Sources};
use crate::tokens::tests::chat_templates;
use crate::{picker, tokens};

/// The first byte selects the endpoint, the rest is the body.
///
/// A parsed body parses again to the same fields after an edit, the edit sets model and salt, and the conversion of
/// Anthropic's format gives a body that the chat endpoint accepts.
fn http_bodies(bytes: &[u8]) {
    let Some((&selector, body)) = bytes.split_first() else { return };
    let endpoint = Endpoint::ALL[usize::from(selector) % Endpoint::ALL.len()];
    if endpoint.is_anthropic() {
        let purpose = if endpoint == Endpoint::Messages { Purpose::Generate } else { Purpose::Count };
        if let Ok(chat) = chat_body(body, purpose) {
            let is_json = serde_json::from_slice::<IgnoredAny>(&chat).is_ok();
            assert!(is_json, "the converted body is not JSON: {}", String::from_utf8_lossy(&chat));
            check_body(Endpoint::Chat, &chat);
        }
    }
    check_body(endpoint, body);
}

fn check_body(endpoint: Endpoint, body: &[u8]) {
    let Ok(parsed) = RequestBody::parse(endpoint, Bytes::copy_from_slice(body)) else { return };
    assert_eq!(parsed.body_bytes(), body.len());
    let unchanged = RequestBody::parse(endpoint, parsed.body(Edits::default())).expect("a forwarded body parses");
    assert_eq!(unchanged.body(Edits::default()), parsed.body(Edits::default()), "a second edit changes the body");
    let edits = Edits { model: Some("edited"), cache_salt: Some("salt \" \\"), ..Edits::default() };
    let edited = RequestBody::parse(endpoint, parsed.body(edits)).expect("an edited body parses");
    assert_eq!((edited.model.as_deref(), edited.cache_salt.as_deref()), (edits.model, edits.cache_salt));
    for other in [&unchanged, &edited] {
        assert_eq!(other.prompt, parsed.prompt, "the prompt changed");
        assert_eq!((other.stream, other.include_usage), (parsed.stream, parsed.include_usage));
        assert_eq!((&other.session_id, other.output_tokens_max), (&parsed.session_id, parsed.output_tokens_max));
    }
}

/// A configuration file. Printed settings load again to the same settings.
fn settings(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let load = |text: String| {
        let file = ConfigFile { text, directory: "/etc/pointsman".into() };
        Sources { file: Some(file), ..Sources::default() }.load()
    };
    match load(text.to_owned()) {
        Ok(loaded) => {
            let printed = loaded.to_string();
            let again = load(printed.clone()).unwrap_or_else(|errors| panic!("{errors}\n{printed}"));
            assert_eq!(format!("{:?}", again.settings), format!("{:?}", loaded.settings), "{printed}");
        }
        Err(errors) => assert!(!errors.to_string().is_empty(), "an error without a text"),
    }
}

fn body_seeds() -> Vec<Vec<u8>> {
    let bodies = [
        (
            0,
            r#"{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"x"}]}],"stream":true,"stream_options":{"include_usage":true}}"#,
        ),
        (1, r#"{"prompt":[1,2,3],"max_tokens":5,"cache_salt":"s","kv_transfer_params":{"a":1}}"#),
        (1, r#" { "prompt" : "x" , "model":"a","session_id":"t","routed_dp_rank":3 }"#),
        (3, r#"{"model":"m","input":[{"role":"user","content":"x"}],"max_output_tokens":7}"#),
        (
            4,
            r#"{"model":"m","system":[{"type":"text","text":"s"}],"messages":[{"role":"user","content":[{"type":"tool_result","tool_use_id":"i","content":"r"}]},{"role":"assistant","content":[{"type":"tool_use","id":"i","name":"n","input":{"a":[1]}}]}],"tools":[{"name":"n","input_schema":{}}],"tool_choice":{"type":"auto"},"max_tokens":5}"#,
        ),
        (5, r#"{"model":"m","messages":[{"role":"user","content":"x"}]}"#),
        (7, r#"{"model":"m","text_1":"a","text_2":["b"]}"#),
    ];
    bodies.map(|(endpoint, body)| [&[endpoint][..], body.as_bytes()].concat()).to_vec()
}

fn setting_seeds() -> Vec<Vec<u8>> {
    let texts = [
        "[gateway]\nlisten = \"127.0.0.1:0\"\n[router]\nblock_size = 16\n[[models]]\nname = \"m\"\nworker_urls = [\"http://10.0.0.1:1\"]\n",
        "[admin]\ntoken_file = \"/t\"\n[router]\nsession.weight = 1e-7\nqueue.threshold = 2\n[[router.queue.classes]]\nname = \"a\"\norder = \"wspt\"\n[[models]]\nname = \"m\"\naliases = [\"n \\\"o\\\"\"]\n[[models.workers]]\nurl = \"http://10.0.0.2:1\"\n",
    ];
    texts.map(|text| text.as_bytes().to_vec()).to_vec()
}

/// Inputs per target; more of them with the environment variable `HOSTILE_INPUTS`.
#[test]
#[expect(clippy::disallowed_methods, reason = "test effort is not configuration of the gateway")]
fn checks_hold_for_mutated_inputs() {
    let count = std::env::var("HOSTILE_INPUTS").ok().and_then(|count| count.parse().ok()).unwrap_or(500);
    let targets = [
        HostileTarget { name: "http_bodies", check: http_bodies, seeds: body_seeds },
        HostileTarget { name: "settings", check: settings, seeds: setting_seeds },
        HostileTarget { name: "chat_templates", check: chat_templates, seeds: tokens::tests::seeds },
        HostileTarget { name: "picker_messages", check: picker_messages, seeds: picker::tests::seeds },
    ];
    targets.iter().for_each(|target| target.run(1, count));
}
