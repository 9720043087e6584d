//! Health checks, and TLS.

use std::sync::Arc;

use pointsman::protocol::{WorkerConfig, WorkerId};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, Error, SignatureScheme};

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
async fn connections_are_encrypted_with_a_self_signed_certificate() {
    let pool = Pool::start_with("picker-self-signed", workers(1), |settings| {
        settings.picker.as_mut().expect("present").plaintext = false;
    });
    let pool = pool.await;
    let mut connection = Connection::open_tls(pool.address(), unverified()).await.expect("handshake");
    assert_eq!(connection.check(EXT_PROC).await, ServingStatus::Serving);
    let mut exchange = connection.process().await;
    exchange.post(COMPLETIONS, &pool.request(), None).await;
    assert_eq!(exchange.pick().await.endpoint(), "10.0.0.1:8000");
    exchange.leave();
    pool.at_rest().await;
    let error = Connection::open_tls(pool.address(), verified()).await.err().expect("unknown issuer");
    assert!(error.to_string().contains("certificate"), "{error}");
}

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

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// Trusts the certificate of the test data.
fn verified() -> ClientConfig {
    with_http2(client_trusting(&["test-only.crt"]))
}

/// Trusts any certificate, as proxies do by default for endpoint pickers.
fn unverified() -> ClientConfig {
    let builder = ClientConfig::builder_with_provider(provider()).with_safe_default_protocol_versions();
    let verifier = Arc::new(AnyCertificate(provider()));
    let builder = builder.expect("versions").dangerous().with_custom_certificate_verifier(verifier);
    with_http2(builder.with_no_client_auth())
}

fn with_http2(mut config: ClientConfig) -> ClientConfig {
    config.alpn_protocols = vec![b"h2".to_vec()];
    config
}

#[derive(Debug)]
struct AnyCertificate(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, certificate, signature, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signature, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
