//! Invalid HTTP, ambiguous requests (request smuggling), and headers that request internal functions.

use super::scene::{BODY_BYTES_MAX, CASE_BYTES_MAX, MIB, Scene, head, repeated};
use crate::common::proxy::{FINE_JSON, request};
use crate::faults::PATH;

/// The request that the cases try to smuggle in.
fn smuggled() -> String {
    let body = r#"{"model":"mock","prompt":[9]}"#;
    format!("POST {PATH} HTTP/1.1\r\nhost: g\r\ncontent-length: {}\r\nx-smuggled: 1\r\n\r\n{body}", body.len())
}

/// Statuses, name, headers after those of [`head`] or `-`, and further bytes.
const INVALID: &str = r#"
400 | garbage | - | garbage\r\n\r\n
400 | no version | - | POST $PATH\r\n\r\n
400 505 | unknown version | - | POST $PATH HTTP/9.9\r\n\r\n
400 | a space in the path | - | POST /v1/ completions HTTP/1.1\r\n\r\n
400 | an invalid method | - | P(ST / HTTP/1.1\r\n\r\n
400 | a space before the colon | x : y\r\n |
400 | no colon | x\r\n |
400 | an empty name | : y\r\n |
400 | a folded header | x: y\r\n folded: z\r\ncontent-length: 2\r\n |
400 | a null in a value | - | GET / HTTP/1.1\r\nx: a\0b\r\n\r\n
400 | a bare CR in a value | x: a\rtransfer-encoding: chunked\r\n |
400 | no host | - | POST $PATH HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}
400 | two hosts | host: h\r\ncontent-length: 2\r\n | {}
501 | a coding of its own | transfer-encoding: gzip, chunked\r\n | 0\r\n\r\n
400 | two lengths | content-length: 0\r\ncontent-length: 40\r\n | $SMUGGLED
400 | a list of lengths | content-length: 0, 40\r\n | $SMUGGLED
400 | a signed length | content-length: +2\r\n | {}
400 | a negative length | content-length: -1\r\n | $SMUGGLED
400 | a hexadecimal length | content-length: 0x2\r\n | {}
400 | a length beyond all numbers | content-length: 18446744073709551616\r\n |
400 | length and chunks | content-length: 4\r\ntransfer-encoding: chunked\r\n | 0\r\n\r\n$SMUGGLED
400 | chunks and length | transfer-encoding: chunked\r\ncontent-length: 4\r\n | 0\r\n\r\n$SMUGGLED
400 | chunked, then not | transfer-encoding: chunked, identity\r\n | 0\r\n\r\n$SMUGGLED
400 | nearly chunked | transfer-encoding: xchunked\r\n | 0\r\n\r\n$SMUGGLED
400 | chunked in HTTP/1.0 | - | POST $PATH HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n$SMUGGLED
400 | an invalid length | transfer-encoding: chunked\r\n | zz\r\n\r\n$SMUGGLED
400 | a chunk beyond all numbers | transfer-encoding: chunked\r\n | ffffffffffffffffff\r\n$SMUGGLED
400 | a chunk without its end | transfer-encoding: chunked\r\n | 2\r\n{}0\r\n\r\n$SMUGGLED
413 | too much announced | content-length: 1000000000000\r\nexpect: 100-continue\r\n |
408 | a body that stops | content-length: 100\r\n | {"model"
408 | chunks that stop | transfer-encoding: chunked\r\n | 5\r\n{"mod
404 405 | CONNECT | - | CONNECT 127.0.0.1:22 HTTP/1.1$END
405 | TRACE | - | TRACE $PATH HTTP/1.1$END
404 405 | OPTIONS * | - | OPTIONS * HTTP/1.1$END
404 | elsewhere | - | GET http://127.0.0.1:9/secret HTTP/1.1$END
404 | two slashes | - | POST //v1/completions HTTP/1.1$END
404 | path traversal | - | POST /v1/completions/../../tokenize HTTP/1.1$END
404 | encoded path traversal | - | POST /v1/%2e%2e/tokenize HTTP/1.1$END
404 | the worker's own paths | - | POST /reset_prefix_cache HTTP/1.1$END
"#;

/// The cases of [`INVALID`]: name, bytes and statuses.
fn invalid() -> Vec<(&'static str, Vec<u8>, Vec<u16>)> {
    let case = |line: &'static str| {
        let [statuses, name, headers, bytes] = line.splitn(4, '|').map(str::trim).collect::<Vec<_>>()[..] else {
            panic!("{line}")
        };
        let control = |text: &str| text.replace("\\r", "\r").replace("\\n", "\n").replace("\\0", "\0");
        let bytes = bytes.replace("$END", "\\r\\nhost: g\\r\\nconnection: close\\r\\n\\r\\n").replace("$PATH", PATH);
        let begin = if headers == "-" { String::new() } else { head(&control(headers)) };
        let bytes = begin + &control(&bytes).replace("$SMUGGLED", &smuggled());
        (name, bytes.into(), statuses.split(' ').map(|status| status.parse().expect("a status")).collect())
    };
    INVALID.trim().lines().map(case).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_http_is_rejected_without_smuggling() {
    alone!();
    let scene = Scene::set().await;
    let many: String = (0..1_001).map(|n| format!("x-{n}: 1\r\n")).collect();
    let chunked = head("transfer-encoding: chunked\r\n");
    let chunk = format!("10000\r\n{}\r\n", "x".repeat(0x10000));
    let mut cases = invalid();
    let mut add = |name, bytes: Vec<u8>, statuses: &[u16]| cases.push((name, bytes, statuses.to_vec()));
    add("TLS", vec![0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3], &[400]);
    add("zeros", vec![0; 10_000], &[400]);
    add("control characters in the path", b"GET /\x01\x7f HTTP/1.1\r\n\r\n".to_vec(), &[400]);
    add("a long header", head(&repeated("x: ", "x", 80_000, "\r\n")).into(), &[431]);
    add("a long path", repeated("GET /", "a", 80_000, " HTTP/1.1\r\n\r\n").into(), &[414, 431]);
    add("many headers", head(&many).into(), &[431]);
    add("endless headers", repeated(&format!("POST {PATH} HTTP/1.1\r\n"), "a: b\r\n", 200_000, "").into(), &[431]);
    add("an endless method", vec![b'A'; MIB], &[400, 431]);
    add("an endless extension", repeated(&format!("{chunked}2;"), "x", MIB, "").into(), &[400]);
    add("endless trailers", repeated(&format!("{chunked}0\r\n"), "a: b\r\n", 100_000, "").into(), &[400]);
    add("too much in chunks", repeated(&chunked, &chunk, BODY_BYTES_MAX / 0x10000 + 1, "0\r\n\r\n").into(), &[413]);
    for (name, bytes, statuses) in cases {
        scene.peak.reset();
        let answer = scene.exchange(&bytes).await;
        // After a protocol error the connection may end without a response: a reset can discard the response before it
        // is read.
        match &answer {
            Some(answer) => assert!(statuses.contains(&answer.status), "{name}: {answer:?}"),
            None => assert!(bytes.len() > 64 << 10, "{name}: no answer"),
        }
        if let Some(answer) = answer.filter(|answer| matches!(answer.status, 404 | 405 | 408 | 413)) {
            assert!(answer.json()["error"]["code"].is_string(), "{name}: {answer:?}");
        }
        let most = scene.peak.most();
        assert!(most <= CASE_BYTES_MAX, "{name}: {most} bytes");
        assert!(scene.reached().is_empty(), "{name}");
    }
    scene.finish().await;
}

/// A frame of HTTP/2.
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = &(payload.len() as u32).to_be_bytes()[1..];
    [length, &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_http2_ends_its_connection() {
    alone!();
    let scene = Scene::set().await;
    let (data, headers, settings, push, continuation) = (0, 1, 4, 5, 9);
    let good = frame(settings, 0, 0, &[]);
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("a request of HTTP/1.1", smuggled().into()),
        ("settings of five bytes", frame(settings, 0, 0, &[0; 5])),
        ("settings of a stream", frame(settings, 0, 1, &[])),
        ("a frame above the limit", [good.clone(), vec![0xff, 0xff, 0xff, data, 0, 0, 0, 0, 1]].concat()),
        ("headers without a stream", [good.clone(), frame(headers, 4, 0, &[0x82])].concat()),
        ("headers of an even stream", [good.clone(), frame(headers, 4, 2, &[0x82])].concat()),
        ("an invalid header index", [good.clone(), frame(headers, 5, 1, &[0xff, 0xff, 0xff, 0xff])].concat()),
        ("data without a stream", [good.clone(), frame(data, 0, 0, b"x")].concat()),
        ("a push by the client", [good.clone(), frame(push, 4, 1, &[0, 0, 0, 2, 0x82])].concat()),
        ("a continuation alone", [good.clone(), frame(continuation, 4, 1, &[0x82])].concat()),
        ("endless headers", {
            let mut bytes = [good.clone(), frame(headers, 0, 1, &[0x82])].concat();
            (0..1_000).for_each(|_| bytes.extend(frame(continuation, 0, 1, &[0x82; 16_000])));
            bytes
        }),
        ("endless resets", {
            let mut bytes = good.clone();
            for stream in (1..100_000).step_by(2) {
                bytes.extend(frame(headers, 5, stream, &[0x82, 0x86, 0x84, 0x41, 1, b'g']));
                bytes.extend(frame(3, 0, stream, &[0, 0, 0, 8]));
            }
            bytes
        }),
    ];
    for (name, bytes) in cases {
        scene.peak.reset();
        let answer = scene.exchange(&[b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".as_slice(), &bytes].concat()).await;
        assert_eq!(answer.map(|answer| answer.status), None, "{name}");
        let most = scene.peak.most();
        assert!(most <= CASE_BYTES_MAX, "{name}: {most} bytes");
        assert!(scene.reached().is_empty(), "{name}");
    }
    scene.finish().await;
}

/// HTTP that the standard allows to accept: exactly one request passes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unusual_valid_http_is_one_request() {
    alone!();
    let scene = Scene::set().await;
    let body = r#"{"model":"mock","prompt":[7]}"#;
    let length = body.len();
    let chunks = format!("1;x=\"y\"\r\n{{\r\n{:x}\r\n{}\r\n0\r\nx-trailer: 1\r\n\r\n", length - 1, &body[1..]);
    let cases = [
        (
            "line feeds only",
            format!("POST {PATH} HTTP/1.1\nhost: g\nconnection: close\ncontent-length: {length}\n\n{body}"),
        ),
        (
            "the same length twice",
            head(&format!("connection: close\r\ncontent-length: {length}\r\ncontent-length: {length}\r\n")) + body,
        ),
        ("chunks, extensions and trailers", head("connection: close\r\ntransfer-encoding: chunked\r\n") + &chunks),
        (
            "an absolute address",
            format!(
                "POST http://127.0.0.1:9{PATH} HTTP/1.1\r\nhost: evil\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
            ),
        ),
        (
            "a query",
            format!(
                "POST {PATH}?to=http://127.0.0.1:9 HTTP/1.1\r\nhost: g\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
            ),
        ),
        ("HTTP/1.0", format!("POST {PATH} HTTP/1.0\r\ncontent-length: {length}\r\n\r\n{body}")),
        (
            "an upgrade",
            head(&format!(
                "connection: upgrade, http2-settings, close\r\nupgrade: h2c\r\nhttp2-settings: AAAA\r\ncontent-length: {length}\r\n"
            )) + body,
        ),
        (
            "more than it announced",
            head(&format!("connection: close\r\ncontent-length: {length}\r\n")) + body + &smuggled(),
        ),
    ];
    for (name, bytes) in cases {
        let answer = scene.exchange(&bytes).await.unwrap_or_else(|| panic!("{name}: no answer"));
        assert!((answer.status, answer.text()) == (200, FINE_JSON), "{name}: {answer:?}");
        let reached = scene.reached();
        assert_eq!(reached.len(), 1, "{name}");
        let got = &reached[0];
        assert_eq!(got.text(), body, "{name}");
        assert!(got.head.starts_with(&format!("POST {PATH} HTTP/1.1\r\n")), "{name}: {}", got.head);
        assert_eq!(got.header("host"), Some(scene.worker.url()["http://".len()..].as_ref()), "{name}");
        assert_eq!(got.header("content-length"), Some(length.to_string().as_str()), "{name}");
        for gone in ["transfer-encoding", "upgrade", "http2-settings", "x-trailer", "trailer", "connection"] {
            assert!(got.header(gone).is_none(), "{name}: {}", got.head);
        }
    }
    scene.finish().await;
}

/// Headers that select a worker or belong to one connection.
const CHOOSING: &str = "
X-Data-Parallel-Rank
x_data_parallel_rank
X-Data-Parallel-Host-Port
X-DP-Rank
X-Worker-Id
X-Worker-Instance-Id
X-Prefiller-Host-Port
X-Prefill-Instance-Id
X-Decode-Instance-Id
X-Encoder-Hosts-Ports
X-Dynamo-Worker
X-Gateway-Destination-Endpoint
X-Override-Worker
X-SMG-Target-Worker
X-Pointsman-Anything
Proxy-Authorization
Proxy-Connection
Cookie
Upgrade
TE
Keep-Alive
Accept-Encoding
";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn headers_select_neither_worker_nor_log_name() {
    alone!();
    let scene = Scene::set().await;
    let address = scene.gateway.address();
    let choosing: Vec<&str> = CHOOSING.split_whitespace().collect();
    let headers: String = choosing.iter().map(|name| format!("{name}: 1\r\n")).collect();
    let body = r#"{"model":"mock","prompt":[7],"data_parallel_rank":1,"kv_transfer_params":{"remote_host":"evil"}}"#;
    let answer = request(address, "POST", PATH, &headers, body.as_bytes()).await;
    assert_eq!((answer.status, answer.text()), (200, FINE_JSON));
    let reached = scene.reached();
    let got = &reached[0];
    let ranks: Vec<_> = got.head.lines().filter(|line| line.to_ascii_lowercase().contains("rank")).collect();
    assert!(ranks == ["x-data-parallel-rank: 0"] || ranks == ["x-data-parallel-rank: 1"], "{}", got.head);
    for name in choosing.iter().skip(1) {
        assert!(got.header(&name.to_ascii_lowercase()).is_none(), "{name}: {}", got.head);
    }
    assert_eq!(got.text(), r#"{"model":"mock","prompt":[7],"data_parallel_rank":null,"kv_transfer_params":null}"#);
    // Request ids that are unsuitable for logs are replaced.
    let unfit = [
        format!("x-request-id: {}\r\n", "a".repeat(129)),
        "x-request-id: \r\n".to_owned(),
        "x-request-id: a b\r\n".to_owned(),
        "x-request-id: \u{e9}\r\n".to_owned(),
        "x-request-id: a\tb\r\n".to_owned(),
        "x-request-id: a\r\nx-request-id: b\r\n".to_owned(),
    ];
    for headers in unfit {
        let answer = request(address, "POST", PATH, &headers, br#"{"model":"mock","prompt":[7]}"#).await;
        let id = answer.header("x-request-id").expect("a request id is generated");
        assert!(id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_hexdigit()), "{headers}: {id}");
        let reached = scene.reached();
        assert_eq!(reached[0].header("x-request-id"), Some(id));
        assert_eq!(reached[0].head.to_ascii_lowercase().matches("x-request-id").count(), 1);
    }
    let wrong =
        "priority: -1|priority: 4294967296|priority-jump: NaN|priority-jump: inf|deadline-ms: 0|class: |no-queue: 1";
    for wrong in wrong.split('|') {
        let headers = format!("x-pointsman-{wrong}\r\n");
        let answer = request(address, "POST", PATH, &headers, br#"{"model":"mock","prompt":[7]}"#).await;
        assert_eq!((answer.status, answer.code().as_str()), (400, "invalid_header"), "{wrong}");
    }
    assert!(scene.reached().is_empty());
    scene.finish().await;
}
