//! Bodies pass unchanged in both directions, and frames pass without delay.

use std::sync::{Arc, Mutex};

use proptest::test_runner::{Config, TestRunner};

use crate::common::proxy::{self, Act, EVENT, Scripted, chunk, chunked_head, gateway, request, stream_end, write};
use crate::faults::{Client, DONE, PATH, expect_idle, settings};

/// Generates JSON from the choices on a tape. At the end of the tape all values are closed.
struct Writer<'a> {
    tape: std::slice::Iter<'a, u8>,
    json: String,
}

const SPACES: [&str; 6] = ["", "", " ", "\n\t", "\r\n  ", "     "];
const PIECES: [&str; 14] = [
    "a",
    "\u{e9}",
    "\u{1f600}",
    "\\n",
    "\\u00e9",
    "\\ud83d\\ude00",
    "\\\"",
    "\\\\",
    "\\/",
    "\\u0000",
    "</script>",
    "\u{2028}",
    "\u{7f}",
    "{[\\\"model\\\":",
];
const NUMBERS: [&str; 8] =
    ["0", "-0", "1.50", "1e3", "-12345678901234567890123456789", "0.1E-7", "1E+2", "18446744073709551616.000"];

impl Writer<'_> {
    fn choose<'b>(&mut self, among: &[&'b str]) -> &'b str {
        among[usize::from(self.tape.next().copied().unwrap_or(0)) % among.len()]
    }

    fn write(&mut self, among: &[&str]) {
        let said = self.choose(among);
        self.json.push_str(said);
    }

    fn continues(&mut self) -> bool {
        self.tape.next().is_some_and(|choice| choice % 4 != 0)
    }

    fn string(&mut self, start: &str) {
        self.json.push('"');
        self.json.push_str(start);
        while self.continues() {
            self.write(&PIECES);
        }
        self.json.push('"');
    }

    fn value(&mut self, depth: usize) {
        self.write(&SPACES);
        match self.tape.next().copied().unwrap_or(0) % 8 {
            0 | 1 => self.string(""),
            2 | 3 => self.write(&NUMBERS),
            4 | 5 if depth > 0 => {
                self.json.push('[');
                let mut comma = "";
                while self.continues() {
                    self.json.push_str(comma);
                    self.value(depth - 1);
                    comma = ",";
                }
                self.write(&SPACES);
                self.json.push(']');
            }
            6 if depth > 0 => {
                self.json.push('{');
                let mut comma = "";
                while self.continues() {
                    self.json.push_str(comma);
                    self.field(depth - 1);
                    comma = ",";
                }
                self.write(&SPACES);
                self.json.push('}');
            }
            _ => self.write(&["null", "true", "false"]),
        }
        self.write(&SPACES);
    }

    /// A field with a name that the gateway does not read.
    fn field(&mut self, depth: usize) {
        self.write(&SPACES);
        self.string("x");
        self.write(&SPACES);
        self.json.push(':');
        self.value(depth);
    }
}

/// Endpoints and the fields of their prompts.
const PROMPTS: [(&str, &str, [&str; 3]); 3] = [
    (PATH, "prompt", ["[1, 2 ,3]", "\"\\ud83d\\ude00 text\"", "[\n0\n]"]),
    (
        "/v1/chat/completions",
        "messages",
        [
            "[{\"role\" :\"user\",\"content\": \"\\u00e9\\n\"}]",
            "[ {\"content\":[{\"type\":\"text\", \"text\":\"a\",\"x\":1e2}],\"role\":\"user\",\"x\":1,\"x\":2}\n]",
            "[]",
        ],
    ),
    (
        "/v1/responses",
        "input",
        ["\"a\"", "[ {\"role\":\"user\",\"content\":\"a\", \"x\" : 1.0} ]", "[{\"type\":\"x\",\"x\":-0}]"],
    ),
];

/// An unusually formatted request generated from the tape, with all fields that routing needs.
fn odd_body(tape: &[u8], (field, prompts): (&str, &[&str])) -> String {
    let mut writer = Writer { tape: tape.iter(), json: String::new() };
    writer.write(&SPACES);
    writer.json.push('{');
    writer.field(3);
    writer.json.push_str(",\"model\"");
    writer.write(&SPACES);
    writer.json.push(':');
    writer.write(&["\"mock\"", " \"mo\\u0063k\"\n", "\t\"mock\""]);
    writer.json.push(',');
    writer.field(4);
    for part in [", \"", field, "\" :"] {
        writer.json.push_str(part);
    }
    writer.write(prompts);
    while writer.continues() {
        writer.json.push(',');
        writer.field(3);
    }
    writer.json.push('}');
    writer.write(&SPACES);
    writer.json
}

/// The worker echoes the request body as its response, so the received bytes have passed in both directions.
#[test]
fn unusual_bodies_are_forwarded_unchanged_in_both_directions() {
    alone!();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime");
    let (worker, gateway) = runtime.block_on(async {
        let echo = |_: usize, got: &proxy::Got| {
            vec![
                write(format!(
                    "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
                    got.body.len()
                )),
                Act::Send(got.body.clone()),
            ]
        };
        let worker = Scripted::with(Vec::new(), echo).await;
        let gateway = gateway(settings(&[worker.url()])).await;
        (worker, gateway)
    });
    let tapes = proptest::collection::vec(proptest::num::u8::ANY, 0..600);
    let config = Config { cases: 128, failure_persistence: None, ..Config::default() };
    let passed = TestRunner::new(config).run(&(0..PROMPTS.len(), tapes), |(endpoint, tape)| {
        let (path, field, prompts) = PROMPTS[endpoint];
        let body = odd_body(&tape, (field, &prompts));
        assert!(serde_json::from_str::<&serde_json::value::RawValue>(&body).is_ok(), "no JSON: {body}");
        let answer = runtime.block_on(request(gateway.address(), "POST", path, "", body.as_bytes()));
        proptest::prop_assert_eq!((answer.status, answer.text()), (200, body.as_str()));
        proptest::prop_assert_eq!(
            worker.seen(|seen| seen.requests.pop().expect("request received").body),
            body.as_bytes()
        );
        Ok(())
    });
    passed.expect("every body passes");
    runtime.block_on(expect_idle(&gateway));
}

/// Events, comments and blank lines of streams, with either end of line.
const EVENTS: [&str; 12] = [
    EVENT,
    "data:{\"choices\": [ {\"text\":\"\\u00e9\u{e9}\", \"x\":1,\"x\":1.0e2}]}\r\n\r\n",
    "data: {\"choices\":[]}\n\n",
    "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":1}}\r\n\r\n",
    ": comment\n\n",
    ":\r\n",
    "event: x\r\nid: 7\r\ndata: {\"x\": [1.50, -0]}\r\n\r\n",
    "retry: 30\n\n",
    "unknown: field\n\n",
    "event: y\n\n",
    "\n",
    "\r\n",
];

/// The worker sends each stream in pieces of 1 to 64 bytes.
#[test]
fn unusual_streams_are_forwarded_unchanged() {
    alone!();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime");
    let steps = Arc::new(Mutex::new(Vec::new()));
    let (_worker, gateway) = runtime.block_on(async {
        let script = Arc::clone(&steps);
        let worker = Scripted::start(move |_| script.lock().expect("lock not poisoned").clone()).await;
        let gateway = gateway(settings(&[worker.url()])).await;
        (worker, gateway)
    });
    let (events, cuts) =
        (proptest::collection::vec(0..EVENTS.len(), 0..20), proptest::collection::vec(1..=64_usize, 1..40));
    let config = Config { cases: 96, failure_persistence: None, ..Config::default() };
    let passed = TestRunner::new(config).run(&(events, cuts), |(events, cuts)| {
        let bytes = events.iter().map(|event| EVENTS[*event]).chain([EVENT, DONE]).collect::<String>().into_bytes();
        let (mut acts, mut rest, mut cuts) = (vec![chunked_head()], &bytes[..], cuts.iter().cycle());
        while !rest.is_empty() {
            let (piece, after) = rest.split_at((*cuts.next().expect("endless")).min(rest.len()));
            acts.push(chunk(piece));
            rest = after;
        }
        acts.push(stream_end());
        *steps.lock().expect("lock not poisoned") = acts;
        let body = br#"{"model":"mock","prompt":[1],"stream":true}"#;
        let answer = runtime.block_on(request(gateway.address(), "POST", PATH, "", body));
        let (received, sent) = (String::from_utf8_lossy(&answer.body), String::from_utf8_lossy(&bytes));
        proptest::prop_assert_eq!((answer.status, answer.is_whole, received), (200, true, sent));
        Ok(())
    });
    passed.expect("every stream passes");
    runtime.block_on(expect_idle(&gateway));
}

/// Parts of a response that look like framing, split a character, or are large.
fn pieces() -> Vec<Vec<u8>> {
    let mut pieces: Vec<Vec<u8>> =
        [EVENT, ":\n\n", "\r\n", "0\r\n\r\n", "HTTP/1.1 200 OK\r\n\r\n", "\0", "data: [DO", "NE]\n\n"]
            .map(|piece| piece.as_bytes().to_vec())
            .to_vec();
    pieces.extend(["\u{1f600}".as_bytes()[..2].to_vec(), "\u{1f600}".as_bytes()[2..].to_vec(), vec![0xff, 0xfe]]);
    pieces.push((0..200_000_u32).map(|n| (n % 251) as u8).collect());
    pieces.push(b"end".to_vec());
    pieces.push(format!("\n{DONE}").into_bytes());
    pieces
}

/// The worker sends a part only after the client has received all earlier ones.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_piece_is_forwarded_before_the_next_arrives() {
    alone!();
    let pieces = pieces();
    let length = pieces.iter().map(Vec::len).sum::<usize>();
    let chunks = pieces.iter().map(chunk).collect::<Vec<_>>();
    let bare = pieces.iter().map(write).collect::<Vec<_>>();
    let known =
        write(format!("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: {length}\r\n\r\n"));
    let unknown = write("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n");
    for (head, steps, end) in [
        (chunked_head(), chunks, vec![stream_end()]),
        (known, bare.clone(), Vec::new()),
        (unknown, bare, vec![Act::Close]),
    ] {
        let steps = steps.into_iter().flat_map(|step| [Act::Wait, step]);
        let worker = Scripted::responding_with(std::iter::once(head).chain(steps).chain(end).collect()).await;
        let gateway = gateway(settings(&[worker.url()])).await;
        let mut client = Client::ask(&gateway).await;
        let mut so_far = Vec::new();
        for piece in &pieces {
            so_far.extend_from_slice(piece);
            worker.release(1);
            client.expect_body(&so_far).await;
        }
        let answer = client.answer().await.expect("response received");
        assert!(answer.is_whole && answer.body == so_far);
        expect_idle(&gateway).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_compressed_body_passes_unread() {
    alone!();
    let head =
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-encoding: gzip\r\ncontent-length: 4\r\n\r\n";
    let body = [0x1f, 0x8b, 0x08, 0x00];
    let worker = Scripted::responding_with(vec![write(head), Act::Send(body.to_vec())]).await;
    let gateway = gateway(settings(&[worker.url()])).await;
    let answer = request(gateway.address(), "POST", PATH, "", br#"{"model":"mock","prompt":[1]}"#).await;
    assert_eq!((answer.status, answer.body.as_slice()), (200, &body[..]));
    assert_eq!(answer.header("content-encoding"), Some("gzip"));
    expect_idle(&gateway).await;
}
