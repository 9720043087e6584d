//! Request bodies that are malformed, too long, or valid but large.

use super::scene::{BODY_BYTES_MAX, CASE_BYTES_MAX, Scene, head, repeated};
use crate::common::proxy::FINE_JSON;
use crate::faults::Client;

/// Error code, name and body.
const MALFORMED: &str = r#"
invalid_json | empty | 
invalid_json | cut | {"model":"mock","prompt":[1
invalid_json | bare word | hello
invalid_json | two values | {} {}
invalid_json | NaN | {"model":"mock","prompt":[1],"temperature":NaN}
invalid_json | single quotes | {'model':'mock'}
invalid_json | form | model=mock&prompt=1
not_an_object | null | null
not_an_object | list | [1,2]
not_an_object | string | "model"
duplicate_field | model twice | {"model":"mock","prompt":[1],"model":"mock"}
duplicate_field | model twice, once escaped | {"model":"mock","prompt":[1],"mod\u0065l":"other"}
duplicate_field | prompt twice | {"model":"mock","prompt":[1],"prompt":[1]}
duplicate_field | model twice, once null | {"model":"mock","prompt":[1],"model":null}
missing_field | no prompt | {"model":"mock"}
invalid_type | model a number | {"model":5,"prompt":[1]}
invalid_type | model a list | {"model":["mock"],"prompt":[1]}
invalid_value | model empty | {"model":"","prompt":[1]}
invalid_value | model half a letter | {"model":"\ud800","prompt":[1]}
invalid_type | stream a word | {"model":"mock","prompt":[1],"stream":"maybe"}
invalid_type | max_tokens negative | {"model":"mock","prompt":[1],"max_tokens":-1}
invalid_type | max_tokens a word | {"model":"mock","prompt":[1],"max_tokens":"five"}
invalid_type | salt a number | {"model":"mock","prompt":[1],"cache_salt":5}
invalid_session_id | session empty | {"model":"mock","prompt":[1],"session_id":""}
invalid_type | prompt a number | {"model":"mock","prompt":5}
invalid_type | prompt an object | {"model":"mock","prompt":{}}
invalid_token_id | token negative | {"model":"mock","prompt":[1,-1]}
invalid_token_id | token too large | {"model":"mock","prompt":[4294967296]}
invalid_token_id | token a fraction | {"model":"mock","prompt":[1.5]}
invalid_token_id | token beyond all numbers | {"model":"mock","prompt":[1e999]}
"#;

/// Malformed bodies with the status and error code of each.
fn bodies() -> Vec<(&'static str, Vec<u8>, u16, &'static str)> {
    let deep = |part: &str| repeated(r#"{"model":"mock","prompt":[1],"x":"#, part, 100_000, "");
    let valid = r#"{"model":"mock","prompt":[1]}"#;
    let session = format!(r#"{{"model":"mock","prompt":[1],"session_id":"{}"}}"#, "s".repeat(257));
    let model = format!(r#"{{"model":"{}","prompt":[1]}}"#, "m".repeat(100_000));
    let half = [br#"{"model":"mo"#.as_slice(), &[0xc3, 0x28], br#"","prompt":[1]}"#].concat();
    let case = |line: &'static str| {
        let [code, name, body] = line.splitn(3, '|').map(str::trim).collect::<Vec<_>>()[..] else { panic!("{line}") };
        (name, body.as_bytes().to_vec(), 400, code)
    };
    let mut bodies: Vec<_> = MALFORMED.trim().lines().map(case).collect();
    let mut add = |name, body: Vec<u8>, code| bodies.push((name, body, 400, code));
    add("byte order mark", format!("\u{feff}{valid}").into(), "invalid_json");
    add("raw control character", b"{\"model\":\"mock\",\"prompt\":[1],\"x\":\"a\nb\"}".to_vec(), "invalid_json");
    add("deep lists", deep("[").into(), "too_deep");
    add("deep objects", deep("{\"a\":").into(), "too_deep");
    add("deep and closed", repeated(&deep("["), "]", 100_000, "}").into(), "too_deep");
    add("not UTF-8", [valid.as_bytes(), b"\xff"].concat(), "invalid_utf8");
    add("not UTF-8 within", half, "invalid_utf8");
    add("UTF-16", valid.encode_utf16().flat_map(u16::to_le_bytes).collect(), "invalid_json");
    add("gzip", vec![0x1f, 0x8b, 8, 0, 0, 0, 0, 0], "invalid_utf8");
    add("session long", session.into(), "invalid_session_id");
    add("spaces only", vec![b' '; BODY_BYTES_MAX], "invalid_json");
    add("brackets only", vec![b'['; BODY_BYTES_MAX], "too_deep");
    add("quotes only", vec![b'"'; BODY_BYTES_MAX], "not_an_object");
    add("backslashes only", [b"\"".as_slice(), &vec![b'\\'; BODY_BYTES_MAX - 1]].concat(), "invalid_json");
    bodies.push(("model unknown", model.into(), 404, "model_not_found"));
    bodies
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_bodies_are_rejected_with_a_reason() {
    alone!();
    let scene = Scene::set().await;
    for (name, body, status, code) in bodies() {
        scene.peak.reset();
        let answer = scene.posted(&body).await;
        assert_eq!((answer.status, answer.code().as_str()), (status, code), "{name}: {answer:?}");
        assert!(answer.body.len() < 1024, "{name}: the response is short");
        let most = scene.peak.most();
        assert!(most <= CASE_BYTES_MAX, "{name}: {most} bytes");
        assert!(scene.reached().is_empty(), "{name}");
    }
    scene.finish().await;
}

/// A client that sends its whole body before it reads still receives the 413 response. An endless body is cut off.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn long_bodies_are_rejected() {
    alone!();
    let scene = Scene::set().await;
    let long = " ".repeat(BODY_BYTES_MAX + BODY_BYTES_MAX / 2);
    let announced = head(&format!("content-length: {}\r\n", long.len())) + &long;
    let chunk = format!("10000\r\n{}\r\n", " ".repeat(0x10000));
    let chunks = head("transfer-encoding: chunked\r\n") + &chunk.repeat(BODY_BYTES_MAX / 0x10000 * 3 / 2) + "0\r\n\r\n";
    let asks_first = head("content-length: 1000000000000\r\nexpect: 100-continue\r\n");
    for bytes in [announced, chunks, asks_first] {
        let mut client = Client::connect(scene.gateway.address()).await;
        assert!(client.write(&bytes).await);
        let answer = client.answer().await.expect("response received");
        assert_eq!((answer.status, answer.code().as_str()), (413, "body_too_large"));
        assert_eq!(answer.header("connection"), Some("close"));
    }
    let mut client = Client::connect(scene.gateway.address()).await;
    client.write(head("transfer-encoding: chunked\r\n")).await;
    let mut sent = 0;
    while client.write(&chunk).await {
        sent += chunk.len();
        assert!(sent < 64 * BODY_BYTES_MAX, "the gateway reads without limit");
    }
    scene.finish().await;
}

/// Large and unusual but valid bodies pass.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_valid_bodies_use_bounded_memory() {
    alone!();
    let scene = Scene::set().await;
    let fields: String = (0..100_000).map(|n| format!("\"x{n}\":{n},")).collect();
    let cases = [
        ("a million tokens", repeated(r#"{"model":"mock","prompt":[0"#, ",1", 1_000_000, "]}")),
        ("many prompts", repeated(r#"{"model":"mock","prompt":[[0]"#, ",[1]", 500_000, "]}")),
        ("many fields", format!(r#"{{{fields}"model":"mock","prompt":[1]}}"#)),
        ("a long text", repeated(r#"{"model":"mock","prompt":""#, "\\u00e9", 500_000, "\"}")),
        ("a long number", repeated(r#"{"model":"mock","prompt":[1],"x":"#, "9", 1_000_000, "}")),
        ("128 levels", format!(r#"{{"model":"mock","prompt":[1],"x":{}{}}}"#, "[".repeat(127), "]".repeat(127))),
    ];
    for (name, body) in cases {
        scene.peak.reset();
        let answer = scene.posted(&body).await;
        assert_eq!((answer.status, answer.text()), (200, FINE_JSON), "{name}");
        let most = scene.peak.most();
        assert!(most <= CASE_BYTES_MAX, "{name}: {most} bytes");
        let reached = scene.reached();
        assert!(reached.len() == 1 && reached[0].body == body.as_bytes(), "{name}");
    }
    scene.finish().await;
}
