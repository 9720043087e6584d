//! TLS on both sides: a gateway whose worker is another gateway with a TLS listener.

use std::path::{Path, PathBuf};

use serde_json::json;

use crate::common::proxy::{FINE, Scripted, answer, at_rest, gateway, post, settings, worker};

const CHAT: &str = "/v1/chat/completions";

fn tls(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tls").join(name)
}

#[tokio::test]
async fn worker_certificates_require_the_configured_authority() {
    let engine = Scripted::start(|_| answer("200 OK", FINE)).await;
    let mut behind = settings(vec![worker(1, &engine.url(), 1)]);
    behind.gateway.tls_certificate_file = Some(tls("test-only.crt"));
    behind.gateway.tls_key_file = Some(tls("test-only.key"));
    let behind = gateway(behind).await;
    let url = format!("https://localhost:{}", behind.address().port());
    let chat = json!({ "model": "mock", "stream": true, "messages": [{ "role": "user", "content": "Hello." }] });

    let mut before = settings(vec![worker(1, &url, 1)]);
    before.gateway.worker_ca_file = Some(tls("test-only.crt"));
    let before = gateway(before).await;
    let told = post(&before, CHAT, &chat).await;
    assert_eq!((told.status, told.text()), (200, FINE), "{told:?}");
    assert_eq!(engine.requests().len(), 1);
    at_rest(&before).await;
    at_rest(&behind).await;

    // The certificate is not signed by any CA that the system trusts.
    let strangers = gateway(settings(vec![worker(1, &url, 1)])).await;
    let told = post(&strangers, CHAT, &chat).await;
    assert_eq!((told.status, told.code().as_str()), (502, "worker_failed"), "{told:?}");
    assert_eq!(engine.requests().len(), 1, "the worker received no request");
    at_rest(&strangers).await;
}
