//! Health checks, and TLS.

use pointsman::protocol::{WorkerConfig, WorkerId};
use rustls::ClientConfig;

use super::client::Connection;
use super::messages::{HealthCheckResponse, ServingStatus};
use super::{COMPLETIONS, Pool, workers};
use crate::common::authority::{client_trusting, tls};
use crate::common::proxy::PATIENCE;

const EXT_PROC: &str = "envoy.service.ext_proc.v3.ExternalProcessor";

#[tokio::test]
async fn health_is_readiness_of_the_gateway() {
    let pool = Pool::start("picker-health", Vec::new()).await;
    let mut connection = pool.connect().await;
    let mut watch = connection.watch(EXT_PROC).await;
    let mut next = async || watch.next::<HealthCheckResponse>().await.expect("a reply").status();
    assert_eq!(next().await, ServingStatus::NotServing);
    for service in ["", EXT_PROC, "readiness"] {
        assert_eq!(connection.check(service).await, ServingStatus::NotServing, "{service:?}");
    }
    assert_eq!(connection.check("liveness").await, ServingStatus::Serving);

    pool.router.upsert_worker(WorkerId(1), WorkerConfig::at("http://10.0.0.1:8000")).await.expect("registered");
    assert_eq!(next().await, ServingStatus::Serving);
    for service in ["", EXT_PROC, "readiness", "liveness"] {
        assert_eq!(connection.check(service).await, ServingStatus::Serving, "{service:?}");
    }

    pool.router.remove_worker(WorkerId(1)).await.expect("removed");
    assert_eq!(next().await, ServingStatus::NotServing);
    assert_eq!(connection.check("").await, ServingStatus::NotServing);
}

/// A watch does not keep the gateway from ending, but a response does.
#[tokio::test]
async fn shutdown_ends_watches_and_waits_for_responses() {
    let pool = Pool::start("picker-drain", workers(1)).await;
    let (mut watching, mut busy) = (pool.connect().await, pool.connect().await);
    let mut watch = watching.watch("").await;
    assert_eq!(watch.next::<HealthCheckResponse>().await.expect("a reply").status(), ServingStatus::Serving);
    let mut exchange = busy.process().await;
    exchange.post(COMPLETIONS, &pool.request(), None).await;
    exchange.pick().await;
    let shutdown = pool.gateway.shutdown(PATIENCE);
    let rest = async {
        assert_eq!(watch.next::<HealthCheckResponse>().await.expect("a reply").status(), ServingStatus::NotServing);
        assert_eq!(watch.status().await, (0, String::new()));
        exchange.respond("200", "application/json", false, None).await;
        exchange.response_headers().await;
        exchange.response_body(b"{}", true).await;
        assert!(exchange.response_piece().await.end_of_stream);
        assert_eq!(exchange.finish().await, (0, String::new()));
    };
    let (drained, ()) = tokio::join!(shutdown, rest);
    assert_eq!(drained.broken, 0);
}

/// Without files the picker generates a certificate.
#[tokio::test]
async fn certificates_of_files_can_be_verified() {
    let pool = Pool::start_with("picker-certificate", workers(1), |settings| {
        let picker = settings.picker.as_mut().expect("present");
        picker.plaintext = false;
        picker.tls_certificate_file = Some(tls("test-only.crt"));
        picker.tls_key_file = Some(tls("test-only.key"));
    });
    let pool = pool.await;
    let mut connection = Connection::open_tls(pool.address(), verified()).await.expect("handshake");
    assert_eq!(connection.check("").await, ServingStatus::Serving);
}

/// Trusts the certificate of the test data.
fn verified() -> ClientConfig {
    let mut config = client_trusting(&["test-only.crt"]);
    config.alpn_protocols = vec![b"h2".to_vec()];
    config
}
