//! TLS of requests to workers: trusted authorities, and the certificate of the gateway.

use std::path::PathBuf;
use std::sync::Arc;

use hyper_rustls::ConfigBuilderExt as _;
use rustls::{ClientConfig, RootCertStore};

use crate::net::tls::{TlsError, authorities, certificates, private_key};
use crate::settings::GatewaySettings;

/// An unusable file of the TLS settings of workers.
#[derive(Debug, thiserror::Error)]
#[error("gateway.{setting} is unusable: {error}")]
pub struct WorkerTlsError {
    /// Name of the setting.
    pub setting: &'static str,
    /// Defect of the file.
    pub error: Box<TlsError>,
}

/// TLS configuration that trusts `worker_ca_file`, or the system bundle, and presents `worker_certificate_file` to
/// workers that require a certificate.
///
/// # Errors
/// A file that cannot be read or has other content. A system without a bundle is no error; then no certificate is
/// trusted.
pub fn worker_tls(settings: &GatewaySettings) -> Result<ClientConfig, WorkerTlsError> {
    let builder = || {
        ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .expect("ring supports TLS 1.2 and 1.3")
    };
    let with_roots = match &settings.worker_ca_file {
        Some(file) => builder().with_root_certificates(authorities(file).map_err(of("worker_ca_file"))?),
        None => builder().with_native_roots().unwrap_or_else(|error| {
            tracing::warn!("no worker certificate will be trusted: {error}");
            builder().with_root_certificates(RootCertStore::empty())
        }),
    };
    match (&settings.worker_certificate_file, &settings.worker_key_file) {
        (None, None) => Ok(with_roots.with_no_client_auth()),
        (Some(certificate_file), Some(key_file)) => {
            let chain = certificates(certificate_file).map_err(of("worker_certificate_file"))?;
            let key = private_key(key_file).map_err(of("worker_key_file"))?;
            let pair = TlsError::pair(certificate_file, key_file);
            with_roots.with_client_auth_cert(chain, key).map_err(pair).map_err(of("worker_certificate_file"))
        }
        (Some(file), None) => Err(of("worker_certificate_file")(TlsError::Half { file: file.clone() })),
        (None, Some(file)) => Err(of("worker_key_file")(TlsError::Half { file: file.clone() })),
    }
}

fn of(setting: &'static str) -> impl Fn(TlsError) -> WorkerTlsError {
    move |error| WorkerTlsError { setting, error: Box::new(error) }
}

/// Contents of the files of the TLS settings of workers, to detect a change.
#[derive(PartialEq, Eq)]
pub(crate) struct WorkerTlsFiles([Option<(PathBuf, Option<Vec<u8>>)>; 3]);

impl WorkerTlsFiles {
    /// Blocks on disk reads. An unreadable file is reported when TLS is configured from it.
    pub(crate) fn read(settings: &GatewaySettings) -> Self {
        let files = [&settings.worker_ca_file, &settings.worker_certificate_file, &settings.worker_key_file];
        Self(files.map(|file| file.as_ref().map(|file| (file.clone(), std::fs::read(file).ok()))))
    }
}
