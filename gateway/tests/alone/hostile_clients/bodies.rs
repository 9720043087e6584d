//! Request bodies that are malformed, too long, or valid but large.

use super::scene::{BODY_BYTES_MAX, CASE_BYTES_MAX, Scene, head, repeated};
use crate::alone;
use crate::common::proxy::FINE_JSON;
use crate::faults::Client;

/// Malformed bodies with the status and error code of each.
fn bodies() -> Vec<(&'static str, Vec<u8>, u16, &'static str)> {
    let deep = |part: &str| repeated(r#"{"model":"mock","prompt":[1],"x":"#, part, 100_000, "");
    let of = |name: &'static str, body: &str, code: &'static str| (name, body.as_bytes().to_vec(), 400, code);
    let prompt = |prompt: &str| format!(r#"{{"model":"mock","prompt":{prompt}}}"#);
    let field = |field: &str| format!(r#"{{"model":"mock","prompt":[1],{field}}}"#);
    vec![
        of("empty", "", "invalid_json"),
        of("cut", r#"{"model":"mock","prompt":[1"#, "invalid_json"),
        of("bare word", "hello", "invalid_json"),
        of("two values", "{} {}", "invalid_json"),
        of("NaN", &field("\"temperature\":NaN"), "invalid_json"),
        of("single quotes", "{'model':'mock'}", "invalid_json"),
        of("byte order mark", &format!("\u{feff}{}", prompt("[1]")), "invalid_json"),
        of("raw control character", &field("\"x\":\"a\nb\""), "invalid_json"),
        of("form", "model=mock&prompt=1", "invalid_json"),
        of("null", "null", "not_an_object"),
        of("list", "[1,2]", "not_an_object"),
        of("string", "\"model\"", "not_an_object"),
        of("deep lists", &deep("["), "too_deep"),
        of("deep objects", &deep("{\"a\":"), "too_deep"),
        of("deep and closed", &repeated(&deep("["), "]", 100_000, "}"), "too_deep"),
        ("not UTF-8", [prompt("[1]").as_bytes(), b"\xff"].concat(), 400, "invalid_utf8"),
        (
            "not UTF-8 within",
            [br#"{"model":"mo"#.as_slice(), &[0xc3, 0x28], br#"","prompt":[1]}"#].concat(),
            400,
            "invalid_utf8",
        ),
        ("UTF-16", prompt("[1]").encode_utf16().flat_map(u16::to_le_bytes).collect(), 400, "invalid_json"),
        ("gzip", vec![0x1f, 0x8b, 8, 0, 0, 0, 0, 0], 400, "invalid_utf8"),
        of("model twice", &field("\"model\":\"mock\""), "duplicate_field"),
        of("model twice, once escaped", &field("\"mod\\u0065l\":\"other\""), "duplicate_field"),
        of("prompt twice", &field("\"prompt\":[1]"), "duplicate_field"),
        of("model twice, once null", &field("\"model\":null"), "duplicate_field"),
        of("no prompt", r#"{"model":"mock"}"#, "missing_field"),
        of("model a number", r#"{"model":5,"prompt":[1]}"#, "invalid_type"),
        of("model a list", r#"{"model":["mock"],"prompt":[1]}"#, "invalid_type"),
        of("model empty", r#"{"model":"","prompt":[1]}"#, "invalid_value"),
        of("model half a letter", r#"{"model":"\ud800","prompt":[1]}"#, "invalid_value"),
        (
            "model unknown",
            format!(r#"{{"model":"{}","prompt":[1]}}"#, "m".repeat(100_000)).into_bytes(),
            404,
            "model_not_found",
        ),
        of("stream a word", &field("\"stream\":\"maybe\""), "invalid_type"),
        of("max_tokens negative", &field("\"max_tokens\":-1"), "invalid_type"),
        of("max_tokens a word", &field("\"max_tokens\":\"five\""), "invalid_type"),
        of("salt a number", &field("\"cache_salt\":5"), "invalid_type"),
        of("session empty", &field("\"session_id\":\"\""), "invalid_session_id"),
        of("session long", &field(&format!("\"session_id\":\"{}\"", "s".repeat(257))), "invalid_session_id"),
        of("prompt a number", &prompt("5"), "invalid_type"),
        of("prompt an object", &prompt("{}"), "invalid_type"),
        of("token negative", &prompt("[1,-1]"), "invalid_token_id"),
        of("token too large", &prompt("[4294967296]"), "invalid_token_id"),
        of("token a fraction", &prompt("[1.5]"), "invalid_token_id"),
        of("token beyond all numbers", &prompt("[1e999]"), "invalid_token_id"),
        ("spaces only", vec![b' '; BODY_BYTES_MAX], 400, "invalid_json"),
        ("a string without end", vec![b'"'; 1], 400, "invalid_json"),
        ("brackets only", vec![b'['; BODY_BYTES_MAX], 400, "too_deep"),
        ("quotes only", vec![b'"'; BODY_BYTES_MAX], 400, "not_an_object"),
        ("backslashes only", [b"\"".as_slice(), &vec![b'\\'; BODY_BYTES_MAX - 1]].concat(), 400, "invalid_json"),
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_bodies_are_rejected_with_a_reason() {
    let _alone = alone().await;
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
    let _alone = alone().await;
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
    let _alone = alone().await;
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
