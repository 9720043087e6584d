//! Clients that mean harm, beside one that means well.
//!
//! Owns nothing. Each case sends its bytes and sees how it ends; all the while the good client is served, nothing reaches
//! the worker that should not, and memory stays within what the limits allow.

mod fault_support;
mod proxy_support;

use std::alloc::System;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use fault_support::{Client, Faulty, PATH, metric, quiet, settings, turn, whole};
use pointsman_gateway::serve::Gateway;
use proxy_support::{Answer, gateway, request, until, worker};
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use tokio::task::JoinHandle as Task;

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const MIB: usize = 1 << 20;

/// Longest body that is taken.
const BODY_BYTES_MAX: usize = 4 * MIB;

/// What one case may take: its body as the test holds it and as it is sent, as it comes and while it grows, its tokens,
/// what the worker of this process keeps of it, and what the good client is up to.
const CASE_BYTES_MAX: usize = 10 * BODY_BYTES_MAX;

fn live_bytes() -> usize {
    let stats = ALLOCATOR.stats();
    stats.bytes_allocated.saturating_sub(stats.bytes_deallocated)
}

/// Looks at the live bytes again and again, on a thread of its own.
struct Peak {
    is_over: Arc<AtomicBool>,
    most: Arc<AtomicUsize>,
    thread: Option<JoinHandle<()>>,
}

impl Peak {
    fn watch() -> Self {
        let (is_over, most) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let thread = std::thread::spawn({
            let (is_over, most) = (Arc::clone(&is_over), Arc::clone(&most));
            move || {
                while !is_over.load(Ordering::Relaxed) {
                    most.fetch_max(live_bytes(), Ordering::Relaxed);
                    std::thread::park_timeout(Duration::from_micros(200));
                }
            }
        });
        Self { is_over, most, thread: Some(thread) }
    }

    /// The most since it was asked last.
    fn most(&self) -> usize {
        self.most.swap(0, Ordering::Relaxed).max(live_bytes())
    }
}

impl Drop for Peak {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().expect("it only looks");
        }
    }
}

/// A gateway, its worker, and one client that means well, all the time.
struct Scene {
    gateway: Gateway,
    worker: Faulty,
    good: Task<usize>,
    is_over: Arc<AtomicBool>,
    peak: Peak,
}

const GOOD: &str = r#"{"model":"mock","prompt":[1,2,3],"user":"good"}"#;

impl Scene {
    async fn set() -> Self {
        let worker = Faulty::start(Vec::new(), |_, _| vec![whole("200 OK", "fine")]).await;
        let mut settings = settings(&[worker.url()]);
        settings.models[0].workers = vec![crate::worker(1, &worker.url(), 2)];
        settings.gateway.body_bytes_max = BODY_BYTES_MAX as u64;
        settings.gateway.head_timeout_ms = 2_000;
        settings.gateway.body_timeout_ms = 500;
        let gateway = gateway(settings).await;
        let (address, is_over) = (gateway.address(), Arc::new(AtomicBool::new(false)));
        let over = Arc::clone(&is_over);
        let good = tokio::spawn(async move {
            let mut served = 0;
            while !over.load(Ordering::Relaxed) {
                let answer = request(address, "POST", PATH, "", GOOD.as_bytes()).await;
                assert_eq!((answer.status, answer.text()), (200, "fine"), "the good client suffers");
                served += 1;
            }
            served
        });
        Self { gateway, worker, good, is_over, peak: Peak::watch() }
    }

    /// What reached the worker of others than the good client, and forgets all of it.
    fn reached(&self) -> Vec<proxy_support::Got> {
        let mut all = self.worker.see(|seen| std::mem::take(&mut seen.requests));
        all.retain(|got| got.body != GOOD.as_bytes());
        all
    }

    async fn over(self) {
        self.is_over.store(true, Ordering::Relaxed);
        assert!(self.good.await.expect("it is well") > 0);
        quiet(&self.gateway).await;
        assert_eq!(metric(&self.gateway, "pointsman_gateway_requests_total", &["status=\"500\""]).await, 0.0);
        let page = proxy_support::get(&self.gateway, "/live").await;
        assert_eq!(page.status, 200);
    }

    /// The answer to these bytes. The connection must end with it.
    async fn told(&self, bytes: impl AsRef<[u8]>) -> Option<Answer> {
        let mut client = Client::connect(self.gateway.address()).await;
        // Who is answered before all was said may find the connection ended.
        client.say(bytes).await;
        client.answer().await
    }

    async fn posted(&self, body: impl AsRef<[u8]>) -> Answer {
        request(self.gateway.address(), "POST", PATH, "", body.as_ref()).await
    }
}

fn repeated(start: &str, part: &str, times: usize, end: &str) -> String {
    [start, &part.repeat(times), end].concat()
}

/// Bodies, and the codes of the errors they get.
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
        of("model twice, once in disguise", &field("\"mod\\u0065l\":\"other\""), "duplicate_field"),
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
        of("stream a string", &field("\"stream\":\"yes\""), "invalid_type"),
        of("max_tokens negative", &field("\"max_tokens\":-1"), "invalid_type"),
        of("max_tokens a string", &field("\"max_tokens\":\"5\""), "invalid_type"),
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
async fn bodies_that_make_no_sense_are_refused_with_the_reason() {
    let _turn = turn().await;
    let scene = Scene::set().await;
    for (name, body, status, code) in bodies() {
        let (before, _) = (live_bytes(), scene.peak.most());
        let answer = scene.posted(&body).await;
        assert_eq!((answer.status, answer.code().as_str()), (status, code), "{name}: {answer:?}");
        assert!(answer.body.len() < 1024, "{name}: little is said back");
        let most = scene.peak.most().saturating_sub(before);
        assert!(most <= CASE_BYTES_MAX, "{name}: {most} bytes");
        assert!(scene.reached().is_empty(), "{name}");
    }
    scene.over().await;
}

/// Clients that send all before they read any are told, too, unless they never come to an end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_that_are_too_long_are_told_so() {
    let _turn = turn().await;
    let scene = Scene::set().await;
    let long = " ".repeat(BODY_BYTES_MAX + BODY_BYTES_MAX / 2);
    let announced = head(&format!("content-length: {}\r\n", long.len())) + &long;
    let chunk = format!("10000\r\n{}\r\n", " ".repeat(0x10000));
    let chunks = head("transfer-encoding: chunked\r\n") + &chunk.repeat(BODY_BYTES_MAX / 0x10000 * 3 / 2) + "0\r\n\r\n";
    let asks_first = head("content-length: 1000000000000\r\nexpect: 100-continue\r\n");
    for bytes in [announced, chunks, asks_first] {
        let mut client = Client::connect(scene.gateway.address()).await;
        assert!(client.say(&bytes).await);
        let answer = client.answer().await.expect("it is told");
        assert_eq!((answer.status, answer.code().as_str()), (413, "body_too_large"));
        assert_eq!(answer.header("connection"), Some("close"));
    }
    let mut client = Client::connect(scene.gateway.address()).await;
    client.say(head("transfer-encoding: chunked\r\n")).await;
    let mut sent = 0;
    while client.say(&chunk).await {
        sent += chunk.len();
        assert!(sent < 64 * BODY_BYTES_MAX, "it is taken without end");
    }
    scene.over().await;
}

/// Large, odd, and sound: they pass.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_that_are_only_large_pass_within_bounds() {
    let _turn = turn().await;
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
        let (before, _) = (live_bytes(), scene.peak.most());
        let answer = scene.posted(&body).await;
        assert_eq!((answer.status, answer.text()), (200, "fine"), "{name}");
        let most = scene.peak.most().saturating_sub(before);
        assert!(most <= CASE_BYTES_MAX, "{name}: {most} bytes");
        let reached = scene.reached();
        assert!(reached.len() == 1 && reached[0].body == body.as_bytes(), "{name}");
    }
    scene.over().await;
}

/// A sound request with these headers, and whatever follows.
fn head(headers: &str) -> String {
    format!("POST {PATH} HTTP/1.1\r\nhost: g\r\n{headers}\r\n")
}

/// A request that somebody tries to slip by.
fn smuggled() -> String {
    let body = r#"{"model":"mock","prompt":[9]}"#;
    format!("POST {PATH} HTTP/1.1\r\nhost: g\r\ncontent-length: {}\r\nx-smuggled: 1\r\n\r\n{body}", body.len())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn broken_http_is_refused_and_smuggles_nothing() {
    let _turn = turn().await;
    let scene = Scene::set().await;
    let smuggled = smuggled();
    let sound = "content-length: 2\r\n";
    let many: String = (0..101).map(|n| format!("x-{n}: 1\r\n")).collect();
    let cases: Vec<(&str, Vec<u8>, &[u16])> = vec![
        // Requests that are none.
        ("garbage", b"garbage\r\n\r\n".to_vec(), &[400]),
        ("no version", format!("POST {PATH}\r\n\r\n").into(), &[400]),
        ("version of tomorrow", format!("POST {PATH} HTTP/9.9\r\n\r\n").into(), &[400, 505]),
        ("TLS", vec![0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3], &[400]),
        ("HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(), &[400, 505]),
        ("zeros", vec![0; 10_000], &[400]),
        ("a space in the path", b"POST /v1/ completions HTTP/1.1\r\n\r\n".to_vec(), &[400]),
        ("control characters in the path", b"GET /\x01\x7f HTTP/1.1\r\n\r\n".to_vec(), &[400]),
        ("a method that is none", b"P(ST / HTTP/1.1\r\n\r\n".to_vec(), &[400]),
        // Heads beyond all bounds.
        ("a long header", head(&repeated("x: ", "x", 80_000, "\r\n")).into(), &[431]),
        ("a long path", repeated("GET /", "a", 80_000, " HTTP/1.1\r\n\r\n").into(), &[414, 431]),
        ("many headers", head(&many).into(), &[431]),
        ("endless headers", repeated(&format!("POST {PATH} HTTP/1.1\r\n"), "a: b\r\n", 200_000, "").into(), &[431]),
        ("an endless method", vec![b'A'; MIB], &[400, 431]),
        // Headers that are none.
        ("a space before the colon", head("x : y\r\n").into(), &[400]),
        ("no colon", head("x\r\n").into(), &[400]),
        ("an empty name", head(": y\r\n").into(), &[400]),
        ("a folded header", head(&format!("x: y\r\n folded: z\r\n{sound}")).into(), &[400]),
        ("a null in a value", [b"GET / HTTP/1.1\r\nx: a".as_slice(), b"\0b\r\n\r\n"].concat(), &[400]),
        ("a bare CR in a value", head("x: a\rtransfer-encoding: chunked\r\n").into(), &[400]),
        // Bodies of which two readers might see different ends.
        ("two lengths", (head("content-length: 0\r\ncontent-length: 40\r\n") + &smuggled).into(), &[400]),
        ("a list of lengths", (head("content-length: 0, 40\r\n") + &smuggled).into(), &[400]),
        ("a signed length", (head("content-length: +2\r\n") + "{}").into(), &[400]),
        ("a negative length", (head("content-length: -1\r\n") + &smuggled).into(), &[400]),
        ("a hexadecimal length", (head("content-length: 0x2\r\n") + "{}").into(), &[400]),
        ("a length beyond all numbers", head("content-length: 18446744073709551616\r\n").into(), &[400]),
        (
            "length and chunks",
            (head("content-length: 4\r\ntransfer-encoding: chunked\r\n") + "0\r\n\r\n" + &smuggled).into(),
            &[400],
        ),
        (
            "chunks and length",
            (head("transfer-encoding: chunked\r\ncontent-length: 4\r\n") + "0\r\n\r\n" + &smuggled).into(),
            &[400],
        ),
        (
            "chunked, then not",
            (head("transfer-encoding: chunked, identity\r\n") + "0\r\n\r\n" + &smuggled).into(),
            &[400],
        ),
        ("nearly chunked", (head("transfer-encoding: xchunked\r\n") + "0\r\n\r\n" + &smuggled).into(), &[400]),
        (
            "chunked in HTTP/1.0",
            format!("POST {PATH} HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n{smuggled}").into(),
            &[400],
        ),
        // Chunks that are none. Whatever is left after them is nobody's request.
        ("a length that is none", (head("transfer-encoding: chunked\r\n") + "zz\r\n\r\n" + &smuggled).into(), &[400]),
        (
            "a chunk beyond all numbers",
            (head("transfer-encoding: chunked\r\n") + "ffffffffffffffffff\r\n" + &smuggled).into(),
            &[400],
        ),
        (
            "a chunk without its end",
            (head("transfer-encoding: chunked\r\n") + "2\r\n{}0\r\n\r\n" + &smuggled).into(),
            &[400],
        ),
        (
            "an endless extension",
            repeated(&(head("transfer-encoding: chunked\r\n") + "2;"), "x", MIB, "").into(),
            &[400],
        ),
        (
            "endless trailers",
            repeated(&(head("transfer-encoding: chunked\r\n") + "0\r\n"), "a: b\r\n", 100_000, "").into(),
            &[400],
        ),
        (
            "too much in chunks",
            repeated(
                &head("transfer-encoding: chunked\r\n"),
                &format!("10000\r\n{}\r\n", "x".repeat(0x10000)),
                BODY_BYTES_MAX / 0x10000 + 1,
                "0\r\n\r\n",
            )
            .into(),
            &[413],
        ),
        ("too much announced", head("content-length: 1000000000000\r\nexpect: 100-continue\r\n").into(), &[413]),
        // Bodies that stop.
        ("a body that stops", (head("content-length: 100\r\n") + "{\"model\"").into(), &[408]),
        ("chunks that stop", (head("transfer-encoding: chunked\r\n") + "5\r\n{\"mod").into(), &[408]),
        // Where it is no question of this server's.
        ("CONNECT", b"CONNECT 127.0.0.1:22 HTTP/1.1\r\nhost: g\r\nconnection: close\r\n\r\n".to_vec(), &[404, 405]),
        ("TRACE", format!("TRACE {PATH} HTTP/1.1\r\nhost: g\r\nconnection: close\r\n\r\n").into(), &[405]),
        ("OPTIONS *", b"OPTIONS * HTTP/1.1\r\nhost: g\r\nconnection: close\r\n\r\n".to_vec(), &[404, 405]),
        (
            "elsewhere",
            b"GET http://127.0.0.1:9/secret HTTP/1.1\r\nhost: g\r\nconnection: close\r\n\r\n".to_vec(),
            &[404],
        ),
        ("two slashes", b"POST //v1/completions HTTP/1.1\r\nhost: g\r\nconnection: close\r\n\r\n".to_vec(), &[404]),
        (
            "a way out",
            b"POST /v1/completions/../../tokenize HTTP/1.1\r\nhost: g\r\nconnection: close\r\n\r\n".to_vec(),
            &[404],
        ),
        (
            "a way out in disguise",
            b"POST /v1/%2e%2e/tokenize HTTP/1.1\r\nhost: g\r\nconnection: close\r\n\r\n".to_vec(),
            &[404],
        ),
        (
            "the worker's own paths",
            b"POST /reset_prefix_cache HTTP/1.1\r\nhost: g\r\nconnection: close\r\n\r\n".to_vec(),
            &[404],
        ),
    ];
    for (name, bytes, statuses) in cases {
        let (before, _) = (live_bytes(), scene.peak.most());
        let answer = scene.told(&bytes).await;
        // Where HTTP itself is broken, the connection may end without an answer: it may be reset before it was read.
        match &answer {
            Some(answer) => assert!(statuses.contains(&answer.status), "{name}: {answer:?}"),
            None => assert!(bytes.len() > 64 << 10 || name == "HTTP/2", "{name}: no answer"),
        }
        if let Some(answer) = answer.filter(|answer| matches!(answer.status, 404 | 405 | 408 | 413)) {
            assert!(answer.json()["error"]["code"].is_string(), "{name}: {answer:?}");
        }
        let most = scene.peak.most().saturating_sub(before);
        assert!(most <= CASE_BYTES_MAX, "{name}: {most} bytes");
        assert!(scene.reached().is_empty(), "{name}");
    }
    scene.over().await;
}

/// Lenient where the standard allows it: nothing but the one request passes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn odd_http_that_is_read_passes_as_one_request() {
    let _turn = turn().await;
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
        let answer = scene.told(&bytes).await.unwrap_or_else(|| panic!("{name}: no answer"));
        assert!((answer.status, answer.text()) == (200, "fine"), "{name}: {answer:?}");
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
    scene.over().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_header_chooses_a_worker_or_a_name_in_logs() {
    let _turn = turn().await;
    let scene = Scene::set().await;
    let address = scene.gateway.address();
    let choosing = [
        "X-Data-Parallel-Rank",
        "x_data_parallel_rank",
        "X-Data-Parallel-Host-Port",
        "X-DP-Rank",
        "X-Worker-Id",
        "X-Worker-Instance-Id",
        "X-Prefiller-Host-Port",
        "X-Prefill-Instance-Id",
        "X-Decode-Instance-Id",
        "X-Encoder-Hosts-Ports",
        "X-Dynamo-Worker",
        "X-Gateway-Destination-Endpoint",
        "X-Override-Worker",
        "X-SMG-Target-Worker",
        "X-Pointsman-Anything",
        "Proxy-Authorization",
        "Proxy-Connection",
        "Cookie",
        "Upgrade",
        "TE",
        "Keep-Alive",
        "Accept-Encoding",
        "Content-Encoding",
    ];
    let headers: String = choosing.iter().map(|name| format!("{name}: 1\r\n")).collect();
    let body = r#"{"model":"mock","prompt":[7],"data_parallel_rank":1,"kv_transfer_params":{"remote_host":"evil"}}"#;
    let answer = request(address, "POST", PATH, &headers, body.as_bytes()).await;
    assert_eq!((answer.status, answer.text()), (200, "fine"));
    let reached = scene.reached();
    let got = &reached[0];
    let ranks: Vec<_> = got.head.lines().filter(|line| line.to_ascii_lowercase().contains("rank")).collect();
    assert!(ranks == ["x-data-parallel-rank: 0"] || ranks == ["x-data-parallel-rank: 1"], "{}", got.head);
    for name in choosing.iter().skip(1) {
        assert!(got.header(&name.to_ascii_lowercase()).is_none(), "{name}: {}", got.head);
    }
    assert_eq!(got.text(), r#"{"model":"mock","prompt":[7],"data_parallel_rank":null,"kv_transfer_params":null}"#);
    // Names of requests that are unfit for logs are replaced.
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
        let id = answer.header("x-request-id").expect("one is made");
        assert!(id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_hexdigit()), "{headers}: {id}");
        let reached = scene.reached();
        assert_eq!(reached[0].header("x-request-id"), Some(id));
        assert_eq!(reached[0].head.to_ascii_lowercase().matches("x-request-id").count(), 1);
    }
    for wrong in [
        "priority: -1",
        "priority: 4294967296",
        "priority-jump: NaN",
        "priority-jump: inf",
        "deadline-ms: 0",
        "class: ",
        "no-queue: 1",
    ] {
        let headers = format!("x-pointsman-{wrong}\r\n");
        let answer = request(address, "POST", PATH, &headers, br#"{"model":"mock","prompt":[7]}"#).await;
        assert_eq!((answer.status, answer.code().as_str()), (400, "invalid_header"), "{wrong}");
    }
    assert!(scene.reached().is_empty());
    scene.over().await;
}

/// Hundreds that say as much as they may and then nothing: they cost little, and end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn crowds_of_slow_clients_cost_little_and_end() {
    const CROWD: usize = 300;
    let _turn = turn().await;
    let scene = Scene::set().await;
    let (before, _) = (live_bytes(), scene.peak.most());
    let announced = head(&format!("content-length: {BODY_BYTES_MAX}\r\n")) + "{\"model\"";
    let half = &announced[..announced.len() / 2];
    let mut crowd = Vec::new();
    for n in 0..CROWD {
        let mut client = Client::connect(scene.gateway.address()).await;
        assert!(client.say(if n % 2 == 0 { announced.as_str() } else { half }).await);
        crowd.push(client);
    }
    for (n, client) in crowd.into_iter().enumerate() {
        match client.answer().await {
            Some(answer) => assert!(answer.status == 408, "{n}: {answer:?}"),
            None => assert!(n % 2 == 1, "{n}"),
        }
    }
    let most = scene.peak.most().saturating_sub(before);
    // Far from what they announced, 600 MiB.
    assert!(most < CROWD * (64 << 10) + 16 * MIB, "{most} bytes");
    assert!(scene.reached().is_empty());
    scene.over().await;
}

/// One byte after the other, for as long as it takes: the head's time is its own, however often something comes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_head_that_trickles_is_cut() {
    let _turn = turn().await;
    let scene = Scene::set().await;
    let client = Client::connect(scene.gateway.address()).await;
    let (mut reads, mut writes) = client.stream.into_split();
    let is_cut = Arc::new(AtomicBool::new(false));
    let over = Arc::clone(&is_cut);
    let trickle = tokio::spawn(async move {
        let bytes = head(&repeated("x: ", "x", 50_000, "\r\n"));
        for byte in bytes.as_bytes().chunks(1) {
            if over.load(Ordering::Relaxed) || tokio::io::AsyncWriteExt::write_all(&mut writes, byte).await.is_err() {
                return true;
            }
            tokio::time::sleep(Duration::from_millis(5)).await; // more than four minutes for all of it
        }
        false
    });
    let mut rest = Vec::new();
    let ended = tokio::io::AsyncReadExt::read_to_end(&mut reads, &mut rest);
    let _ = tokio::time::timeout(proxy_support::PATIENCE, ended).await.expect("it is cut");
    is_cut.store(true, Ordering::Relaxed);
    assert!(trickle.await.expect("it ends"), "all of it was taken");
    until("only the good client is left", || scene.reached().is_empty()).await;
    scene.over().await;
}
