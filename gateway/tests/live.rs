//! The live page: its files, the stream of snapshots, and `pointsman top`. `live_page/` has the checks in a browser.

use std::path::PathBuf;
use std::time::Duration;

use pointsman::protocol::{WorkerConfig, WorkerId};
use pointsman::{Outcome, Prompt, RouteRequest};
use pointsman_gateway::app::top::{self, TopArgs};
use pointsman_gateway::formats::live::assess::Level;
use pointsman_gateway::formats::live::{LiveSnapshot, RANKS_MAX};
use pointsman_trial::mock::{MockConfig, MockEngine};
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::common::admin::{AdminClient, TOKEN};
use crate::common::proxy::{PATIENCE, receive};

const FILES: [(&str, &str); 4] = [
    ("/admin/page", "text/html"),
    ("/admin/page.css", "text/css"),
    ("/admin/page.js", "text/javascript"),
    ("/admin/page.svg", "image/svg+xml"),
];

/// A viewer of the stream.
struct Viewer {
    stream: TcpStream,
    bytes: Vec<u8>,
}

impl Viewer {
    async fn of(client: &AdminClient) -> Self {
        Self { stream: client.begin("GET", "/admin/live", "").await, bytes: Vec::new() }
    }

    /// Text of the next snapshot; none at the end of the stream.
    async fn text(&mut self) -> Option<String> {
        let find = |bytes: &[u8], from: usize, text: &[u8]| {
            bytes[from..].windows(text.len()).position(|window| window == text).map(|at| from + at)
        };
        loop {
            if let Some(begin) = find(&self.bytes, 0, b"data: ").map(|at| at + b"data: ".len())
                && let Some(end) = find(&self.bytes, begin, b"\n\n")
            {
                let text = String::from_utf8(self.bytes[begin..end].to_vec()).expect("JSON is text");
                self.bytes.drain(..end);
                return Some(text);
            }
            let read = timeout(PATIENCE, self.stream.read_buf(&mut self.bytes)).await.expect("a frame in time");
            if !read.is_ok_and(|read| read > 0) {
                return None;
            }
        }
    }

    async fn next(&mut self) -> LiveSnapshot {
        let text = self.text().await.expect("the stream continues");
        serde_json::from_str(&text).expect("a snapshot")
    }

    /// The first snapshot with a property.
    async fn until(&mut self, property: impl Fn(&LiveSnapshot) -> bool) -> LiveSnapshot {
        let find = async {
            loop {
                let snapshot = self.next().await;
                if property(&snapshot) {
                    return snapshot;
                }
            }
        };
        timeout(PATIENCE, find).await.expect("such a snapshot before the timeout")
    }
}

async fn with_workers(count: u64) -> AdminClient {
    let client = AdminClient::start().await;
    for id in 0..count {
        let worker = WorkerConfig::at(format!("http://127.0.0.1:{}", 1 + id));
        client.router().upsert_worker(WorkerId(id), worker).await.expect("a worker");
    }
    client
}

#[tokio::test]
async fn the_files_of_the_page_need_no_token_and_allow_no_other_origin() {
    let client = AdminClient::start().await;
    for (path, kind) in FILES {
        let answer = client.send_with_headers("GET", path, "", &[]).await;
        assert_eq!(answer.status, 200, "{path}");
        for header in [
            &format!("content-type: {kind}"),
            "content-security-policy: default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
            "x-content-type-options: nosniff",
            "referrer-policy: no-referrer",
            "cache-control: no-store",
        ] {
            assert!(answer.head.contains(header), "{path} without {header}: {}", answer.head);
        }
        let text = String::from_utf8(answer.body).expect("text");
        assert!(!text.contains(TOKEN), "{path}");
        // Names of SVG's XML format are no requests.
        let text = text.replace("http://www.w3.org/2000/svg", "");
        for outside in
            ["http:", "https:", "//cdn", "innerHTML", "insertAdjacentHTML", "document.write", "eval(", "style="]
        {
            assert!(!text.contains(outside), "{path} contains {outside}");
        }
        let written = client.send_with_headers("POST", path, "", &[]).await;
        assert_eq!(written.status, 401, "POST {path}");
    }
    let denied = client.send_with_headers("GET", "/admin/page/other", "", &[]).await;
    assert_eq!((denied.status, denied.code().as_str()), (401, "invalid_token"));
}

#[tokio::test]
async fn the_stream_needs_the_token() {
    let client = AdminClient::start().await;
    for headers in [&[] as &[&str], &["authorization: Bearer wrong-0123456789"]] {
        let answer = client.send_with_headers("GET", "/admin/live", "", headers).await;
        assert_eq!((answer.status, answer.code().as_str()), (401, "invalid_token"));
    }
    let mut viewer = Viewer::of(&client).await;
    viewer.next().await;
    client.gateway.shutdown(Duration::ZERO).await;
    while viewer.text().await.is_some() {}
}

#[tokio::test]
async fn viewers_get_the_same_snapshots_as_server_sent_events() {
    let client = with_workers(2).await;
    let (mut one, mut two) = (Viewer::of(&client).await, Viewer::of(&client).await);
    let (mut earlier, mut later) = (one.text().await.expect("a snapshot"), two.text().await.expect("a snapshot"));
    let number = |text: &str| serde_json::from_str::<LiveSnapshot>(text).expect("a snapshot").number;
    while number(&earlier) < number(&later) {
        earlier = one.text().await.expect("a snapshot");
    }
    while number(&later) < number(&earlier) {
        later = two.text().await.expect("a snapshot");
    }
    assert_eq!(earlier, later);
    let next = one.next().await;
    assert_eq!(next.number, number(&earlier) + 1, "one number per frame, whatever the number of viewers");
    let head = client.begin("GET", "/admin/live", "").await;
    client.gateway.shutdown(Duration::ZERO).await;
    let answer = receive(head).await.expect("the stream ends with the gateway");
    assert_eq!(answer.header("content-type"), Some("text/event-stream"), "{}", answer.head);
}

#[tokio::test]
async fn a_snapshot_has_the_booked_load_of_each_rank() {
    let client = with_workers(2).await;
    let router = client.router();
    let placed = router.route(RouteRequest::new("held", Prompt::Tokens(&[1; 8]))).await.expect("a placement");
    let mut viewer = Viewer::of(&client).await;
    let snapshot = viewer.next().await;
    let model = &snapshot.models[0];
    assert_eq!((model.ranks_registered, model.ranks_eligible, model.leases), (2, 2, 1));
    assert_eq!((model.level, model.sentence.as_str()), (Level::Ok, "All 2 ranks serve, with 1 active request."));
    assert_eq!(snapshot.sentence, model.sentence);
    for rank in &model.ranks {
        let is_chosen = rank.worker == placed.rank().worker.to_string();
        let expected = if is_chosen { (1, 2, 1) } else { (0, 0, 0) };
        assert_eq!((rank.active_requests, rank.active_blocks, rank.hits.placements), expected, "{rank:?}");
        assert_eq!((rank.status.as_str(), rank.engine.is_none()), ("serving", true));
    }
    placed.delivered_cached_tokens(4);
    drop(placed);
    let after = viewer.until(|snapshot| snapshot.models[0].leases == 0).await;
    assert_eq!(after.models[0].hits.delivered_tokens, 4, "{:?}", after.models[0].hits);
}

#[tokio::test]
async fn decisions_and_rates_are_in_the_next_snapshot() {
    let client = AdminClient::start().await;
    let mut viewer = Viewer::of(&client).await;
    let chat = r#"{"model":"mock","messages":[{"role":"user","content":"hello"}],"max_tokens":5,"stream":true}"#;
    assert_eq!(client.send_as_client("/v1/chat/completions", chat).await.status, 503);
    let refused = viewer.until(|snapshot| !snapshot.models[0].decisions.is_empty()).await;
    let model = &refused.models[0];
    assert_eq!((model.decisions[0].chosen.as_ref(), model.decisions[0].number), (None, 1));
    assert!(model.decisions[0].rejection.is_some() && model.decisions[0].no_tokens.is_some(), "{model:?}");
    assert_eq!((model.rates.error_share, model.rates.ttft_seconds), (Some(1.0), None));

    let engine = MockEngine::start(MockConfig { time_scale: 50.0, block_size: 4, ..MockConfig::default() });
    let engine = engine.await.expect("an engine");
    client.router().upsert_worker(WorkerId(7), WorkerConfig::at(engine.url())).await.expect("a worker");
    let chatted = client.send_as_client("/v1/chat/completions", chat).await;
    assert_eq!(chatted.status, 200, "{}", String::from_utf8_lossy(&chatted.body));
    let served = viewer.until(|snapshot| snapshot.models[0].rates.itl_seconds.is_some()).await;
    let model = &served.models[0];
    let decision = &model.decisions[0];
    let name = format!("{}/0", engine.address());
    assert_eq!((decision.chosen.as_deref(), decision.chosen_id.as_deref()), (Some(name.as_str()), Some("7/0")));
    assert_eq!(model.course.requests.iter().sum::<u32>(), 2, "{model:?}");
    assert_eq!((model.rates.error_share, model.rates.ttft_seconds.is_some()), (Some(0.5), true));

    // The name of a worker that has left stays.
    client.router().remove_worker(WorkerId(7)).await.expect("removed");
    let id = &decision.request_id;
    let explained = client.send("GET", &format!("/admin/decisions/{id}"), "").await.json();
    assert_eq!(explained["decisions"][0]["chosen"]["name"], name, "{explained}");
    engine.shutdown().await;
}

#[tokio::test]
async fn ranks_with_trouble_come_first() {
    let count = RANKS_MAX as u64 + 6;
    let client = with_workers(count).await;
    let mut viewer = Viewer::of(&client).await;
    let healthy = viewer.next().await;
    assert_eq!(healthy.models[0].ranks.len(), RANKS_MAX);
    let last = client.router().workers().last().expect("workers").ranks[0];
    for _ in 0..5 {
        client.router().report_outcome(last, Outcome::ConnectFailed);
    }
    client.router().cordon_worker(WorkerId(9)).await.expect("a cordon");
    let troubled = viewer
        .until(|snapshot| snapshot.level == Level::Critical && snapshot.models[0].ranks[1].level == Level::Notice);
    let snapshot = troubled.await;
    let model = &snapshot.models[0];
    assert_eq!((model.ranks.len(), model.ranks_registered), (RANKS_MAX, count));
    assert_eq!((&model.ranks[0].worker, model.ranks[0].status.as_str()), (&last.worker.to_string(), "ejected"));
    assert_eq!((model.ranks[1].worker.as_str(), model.ranks[1].status.as_str()), ("9", "cordoned"));
    assert_eq!(model.ranks[0].name, format!("127.0.0.1:{count}/0"));
    let expected = format!(
        "1 of {count} engines, 127.0.0.1:{count}, does not answer (could not connect); 1 of {count} engines, 127.0.0.1:10, \
         is cordoned; {} of {count} ranks serve.",
        count - 2
    );
    assert_eq!(model.sentence, expected);
}

#[tokio::test]
async fn the_number_of_viewers_is_limited() {
    let client = AdminClient::start().await;
    let mut viewers = Vec::new();
    for _ in 0..16 {
        let mut viewer = Viewer::of(&client).await;
        viewer.next().await;
        viewers.push(viewer);
    }
    let refused = client.send("GET", "/admin/live", "").await;
    assert_eq!((refused.status, refused.code().as_str()), (429, "viewers_max"));
    assert_eq!(client.send("GET", "/admin/models", "").await.status, 200, "other requests are served");
}

#[tokio::test]
async fn top_prints_the_state() {
    let client = with_workers(2).await;
    let url = format!("http://{}", client.gateway.admin_address().expect("an admin listener"));
    let args = TopArgs { admin: url, token_file: PathBuf::new(), model: None, ranks: 1 };
    let page = timeout(PATIENCE, top::page(&args, TOKEN, 80)).await.expect("a page in time").expect("a page");
    assert!(page.starts_with("● All 2 ranks serve, with 0 active requests.\n"), "{page}");
    assert!(page.contains("127.0.0.1:1/0") && page.contains("1 further rank, with less trouble"), "{page}");
    let clients = format!("http://{}", client.gateway.address());
    let at = |url: &str| TopArgs { admin: url.to_owned(), ..args.clone() };
    for (args, token, expected) in [
        (args.clone(), "wrong-0123456789", "--token-file must hold the token"),
        (at(&clients), TOKEN, "status 404 Not Found: this is not the administration listener"),
        (
            TopArgs { model: Some("other".to_owned()), ..args.clone() },
            TOKEN,
            "no model \"other\"; its models are org/mock",
        ),
        (at("https://127.0.0.1:1"), TOKEN, "must be http://HOST:PORT"),
        (at("http://127.0.0.1:1/x"), TOKEN, "must be http://HOST:PORT"),
        (args.clone(), "a b\n", "one line of visible characters"),
    ] {
        let error = top::page(&args, token, 80).await.expect_err("no page");
        assert!(error.contains(expected), "{error}");
    }
    let page = at(&format!("{}/admin/page", &args.admin["http://".len()..]));
    top::page(&page, TOKEN, 80).await.expect("the address of the page, without a scheme");
}
