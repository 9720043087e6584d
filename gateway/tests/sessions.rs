//! Sessions by the names of clients: requests of one session reach one worker, others alternate.

use std::net::SocketAddr;

use pointsman::config::SessionAffinity;
use pointsman_gateway::settings::Settings;

use crate::common::proxy::{Scripted, answer, gateway, request, settings, worker};

const CHAT: &str = r#"{"choices":[{"message":{"role":"assistant","content":"hi"},"finish_reason":"stop"}]}"#;
const MESSAGE: &str = r#""messages":[{"role":"user","content":"x"}]"#;

/// Three workers in round-robin order, which keep sessions.
async fn fleet() -> ([Scripted; 3], Settings) {
    let start = || Scripted::responding_with(answer("200 OK", CHAT));
    let workers = [start().await, start().await, start().await];
    let mut settings = settings((1..).zip(&workers).map(|(n, at)| worker(n, &at.url(), 1)).collect());
    settings.models[0].router.session.affinity = SessionAffinity::Hard;
    (workers, settings)
}

async fn chat(address: SocketAddr, headers: &str, field: &str) {
    let body = format!(r#"{{"model":"mock",{MESSAGE}{field}}}"#);
    let answer = request(address, "POST", "/v1/chat/completions", headers, body.as_bytes()).await;
    assert_eq!(answer.status, 200, "{headers} {field}: {answer:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sessions_of_known_clients_stay_on_a_worker() {
    let (workers, mut settings) = fleet().await;
    settings.gateway.session_headers = vec!["X-Mine".to_owned()];
    let gateway = gateway(settings).await;
    let counts = || workers.each_ref().map(Scripted::request_count);
    let sessions = [
        ("x-session-id: s0\r\nsession-id: other\r\n", ""),
        ("x-mine: s1\r\nsession-id: other\r\n", ""),
        ("X-Claude-Code-Session-Id: s2\r\n", ""),
        ("X-Claude-Code-Session-Id: s2\r\nX-Claude-Code-Agent-Id: a\r\n", ""),
        ("session-id: s3\r\nthread-id: s3\r\n", r#","prompt_cache_key":"other""#),
        ("", r#","session_id":"s4","prompt_cache_key":"other""#),
        ("", r#","user":"user_0_account__session_s5""#),
        // More turns than calls in flight that one agent may have.
        ("", r#","prompt_cache_key":"s6""#),
    ];
    for (n, (headers, field)) in sessions.into_iter().enumerate() {
        let before = counts();
        for turn in 0..6 {
            chat(gateway.address(), &format!("{headers}x-client-request-id: {n}-{turn}\r\n"), field).await;
        }
        let served = [0, 1, 2].map(|worker| counts()[worker] - before[worker]);
        assert_eq!(served.iter().max(), Some(&6), "{headers}{field}: {served:?}");
    }
    let before = counts();
    let long = "x".repeat(300);
    for turn in 0..6 {
        chat(gateway.address(), &format!("session-id: {long}\r\nx-client-request-id: {turn}\r\n"), "").await;
    }
    assert_eq!([0, 1, 2].map(|worker| counts()[worker] - before[worker]), [2; 3], "no session");
}
