//! Audit log of the admin API.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};

use crate::common::admin::{AdminClient, MODEL, TOKEN};

#[tokio::test]
async fn every_change_is_logged_without_the_token() {
    alone!();
    let log = Log::default();
    let subscriber = tracing_subscriber::fmt().with_writer(log.clone()).json().finish();
    // The test has one thread, and all tasks of the gateway run on it.
    let _guard = tracing::subscriber::set_default(subscriber);
    let client = AdminClient::start().await;
    client.send("PUT", "/admin/models/mock/workers/7", r#"{"endpoint":"http://127.0.0.1:1"}"#).await;
    client.send("PATCH", "/admin/models/mock/workers/7", r#"{"no\nsuch":1}"#).await;
    client.send("POST", "/admin/models/mock/workers/7/drain", r#"{"timeout_ms":0}"#).await;
    client.send("DELETE", "/admin/models/mock/workers/7", "").await;
    client.send("PUT", "/admin/models/mock/workers/7", r#"{"endpoint":"http://me:hunter22@127.0.0.1:1"}"#).await;
    let load = r#"{"endpoint":"http://127.0.0.1:1","load":{"metrics":"http://me:hunter22@127.0.0.1:1/m"}}"#;
    client.send("PUT", "/admin/models/mock/workers/7", load).await;
    client.send("GET", "/admin/models", "").await;
    for _ in 0..50 {
        client.send_with_headers("GET", "/admin/models", "", &["authorization: Bearer not-the-token-itself"]).await;
    }
    let lines = log.lines();
    let audit: Vec<&Value> = lines.iter().filter(|line| line["target"] == "pointsman_gateway::audit").collect();
    let said = |line: &&Value| {
        let fields = &line["fields"];
        assert_eq!(
            (&line["level"], &fields["model"], &fields["worker_id"]),
            (&json!("INFO"), &json!(MODEL), &json!("7"))
        );
        assert!(fields["peer"].as_str().is_some_and(|peer| peer.parse::<SocketAddr>().is_ok()), "{line}");
        format!("{} {}", fields["what"].as_str().expect("what"), fields["outcome"].as_str().expect("outcome"))
    };
    let said: Vec<String> = audit.iter().map(said).collect();
    assert_eq!(
        said,
        ["put done", "patch failed", "drain started", "drain done", "remove failed", "put failed", "put failed"]
    );
    let of = |message: &str| {
        let expect_body = |line: &&Value| line["fields"]["message"].as_str().is_some_and(|said| said.contains(message));
        lines.iter().filter(expect_body).collect::<Vec<_>>()
    };
    let denials = of("without a valid token");
    assert!((1..=2).contains(&denials.len()), "{denials:?}");
    #[cfg(unix)]
    assert_eq!(of("can read the admin token_file")[0]["fields"]["mode"], json!("644"));
    let text = log.text();
    for secret in [TOKEN, "not-the-token-itself", "hunter22"] {
        assert!(!text.contains(secret), "{secret}: {text}");
    }
}

/// Captured log output.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    fn text(&self) -> String {
        String::from_utf8(self.0.lock().expect("lock not poisoned").clone()).expect("logs are text")
    }

    fn lines(&self) -> Vec<Value> {
        self.text().lines().map(|line| serde_json::from_str(line).expect("one JSON object a line")).collect()
    }
}

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("lock not poisoned").extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl tracing_subscriber::fmt::MakeWriter<'_> for Log {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        self.clone()
    }
}
