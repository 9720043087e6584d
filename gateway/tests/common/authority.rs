//! A certificate authority with certificates for one server and one client, and clients that trust the certificates of
//! the test data.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio_rustls::TlsAcceptor;

/// A file of the test data.
pub(crate) fn tls(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tls").join(name)
}

pub(crate) fn certificate(name: &str) -> CertificateDer<'static> {
    CertificateDer::from_pem_file(tls(name)).expect("a certificate")
}

/// A client that trusts these certificates of the test data.
pub(crate) fn client_trusting(names: &[&str]) -> ClientConfig {
    let mut roots = RootCertStore::empty();
    names.iter().for_each(|name| roots.add(certificate(name)).expect("a valid root"));
    let builder = ClientConfig::builder_with_provider(Arc::new(default_provider()));
    let builder = builder.with_safe_default_protocol_versions().expect("versions of the provider");
    builder.with_root_certificates(roots).with_no_client_auth()
}

/// An authority, and certificates of it for a server at 127.0.0.1 and for a client.
pub(crate) struct Authority {
    certificate: CertificateDer<'static>,
    server: (CertificateDer<'static>, KeyPair),
    client: (CertificateDer<'static>, KeyPair),
}

impl Authority {
    pub(crate) fn new() -> Self {
        let key = || KeyPair::generate().expect("a key");
        let mut params = CertificateParams::new(Vec::new()).expect("no names");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let (own, authority_key) = (params.clone(), key());
        let certificate = own.self_signed(&authority_key).expect("a certificate").der().clone();
        let issuer = Issuer::new(params, authority_key);
        let signed = |name: &str, usage| {
            let key = key();
            let mut params = CertificateParams::new(vec![name.to_owned()]).expect("a name");
            params.extended_key_usages = vec![usage];
            (params.signed_by(&key, &issuer).expect("a certificate").der().clone(), key)
        };
        let server = signed("127.0.0.1", ExtendedKeyUsagePurpose::ServerAuth);
        let client = signed("gateway", ExtendedKeyUsagePurpose::ClientAuth);
        Self { certificate, server, client }
    }

    /// TLS of the server, which requires a certificate of the client if `is_mutual`.
    pub(crate) fn acceptor(&self, is_mutual: bool) -> TlsAcceptor {
        let provider = Arc::new(default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider));
        let builder = builder.with_safe_default_protocol_versions().expect("versions of the provider");
        let builder = if is_mutual {
            let mut roots = RootCertStore::empty();
            roots.add(self.certificate.clone()).expect("an authority");
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build();
            builder.with_client_cert_verifier(verifier.expect("an authority"))
        } else {
            builder.with_no_client_auth()
        };
        let (certificate, key) = &self.server;
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let config = builder.with_single_cert(vec![certificate.clone()], key).expect("certificate and key match");
        TlsAcceptor::from(Arc::new(config))
    }

    /// The certificate of the authority.
    pub(crate) fn pem(&self) -> String {
        pem("CERTIFICATE", &self.certificate)
    }

    /// Certificate and key of the client.
    pub(crate) fn client_pem(&self) -> [String; 2] {
        let (certificate, key) = &self.client;
        [pem("CERTIFICATE", certificate), pem("PRIVATE KEY", &key.serialize_der())]
    }
}

/// Textual encoding of RFC 7468.
fn pem(label: &str, bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for part in bytes.chunks(3) {
        let bits = part.iter().enumerate().fold(0_u32, |bits, (n, byte)| bits | u32::from(*byte) << (16 - 8 * n));
        for n in 0..4_usize {
            let digit = DIGITS[(bits >> (18 - 6 * n)) as usize & 63];
            text.push(if n <= part.len() { digit.into() } else { '=' });
        }
    }
    let lines: Vec<&str> = (0..text.len()).step_by(64).map(|at| &text[at..text.len().min(at + 64)]).collect();
    format!("-----BEGIN {label}-----\n{}\n-----END {label}-----\n", lines.join("\n"))
}
