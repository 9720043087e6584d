//! Mutual TLS between replicas: both sides present a certificate of the configured authority.

use std::path::PathBuf;
use std::sync::Arc;

use rustls::crypto::ring;
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, ServerConfig};

use crate::net::tls::{TlsError, authorities, certificates, private_key};

/// TLS configurations of both sides of a connection.
#[derive(Clone)]
pub(super) struct MutualTls {
    pub(super) client: Arc<ClientConfig>,
    pub(super) server: Arc<ServerConfig>,
}

impl MutualTls {
    /// Reads the chain and key of this replica, and the authority of all. TLS 1.3 only.
    pub(super) fn read([certificate_file, key_file, ca_file]: [&PathBuf; 3]) -> Result<Self, TlsError> {
        let (chain, key) = (certificates(certificate_file)?, private_key(key_file)?);
        let pair = TlsError::pair(certificate_file, key_file);
        let (roots, provider) = (Arc::new(authorities(ca_file)?), Arc::new(ring::default_provider()));
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider));
        let verifier = verifier.build().map_err(|_| TlsError::no_authority(ca_file))?;
        let server = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .expect("ring supports TLS 1.3")
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain.clone(), key.clone_key())
            .map_err(&pair)?;
        let client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .expect("ring supports TLS 1.3")
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, key)
            .map_err(pair)?;
        Ok(Self { client: Arc::new(client), server: Arc::new(server) })
    }
}
