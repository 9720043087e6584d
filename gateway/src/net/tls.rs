//! TLS for clients.
//!
//! Builds the listener's TLS configuration from certificate chain and key. Errors occur at startup and name the file,
//! never its content. The listener performs handshakes; the worker client has its own TLS.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::crypto::ring;
use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WantsServerCert;
use rustls::{ConfigBuilder, RootCertStore, ServerConfig};

use crate::settings::{PickerSettings, read_at_most};

/// Maximum file size of a chain or key.
const FILE_BYTES_MAX: usize = 1 << 20;

/// TLS configuration error.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// Unreadable file.
    #[error("{} cannot be read: {error}", file.display())]
    Read {
        /// Path of the file.
        file: PathBuf,
        /// System error.
        error: std::io::Error,
    },
    /// Invalid certificate chain or key.
    #[error("{} {rule}", file.display())]
    Content {
        /// Path of the file.
        file: PathBuf,
        /// Violated rule.
        rule: &'static str,
    },
    /// A chain without a key, or a key without a chain.
    #[error("{} is given alone: TLS needs a certificate chain and its key", file.display())]
    Half {
        /// The configured file.
        file: PathBuf,
    },
    /// No self-signed certificate.
    #[error("no self-signed certificate can be generated: {0}")]
    SelfSigned(rcgen::Error),
    /// A chain and key rejected by rustls.
    #[error("the chain of {} and the key of {} cannot be used: {error}", certificate_file.display(), key_file.display())]
    Pair {
        /// Path of the chain.
        certificate_file: PathBuf,
        /// Path of the key.
        key_file: PathBuf,
        /// Error of rustls.
        error: rustls::Error,
    },
}

impl TlsError {
    /// The error of a chain and key that rustls rejects.
    pub(crate) fn pair(certificate_file: &Path, key_file: &Path) -> impl Fn(rustls::Error) -> Self {
        move |error| Self::Pair { certificate_file: certificate_file.to_owned(), key_file: key_file.to_owned(), error }
    }

    /// The error of a certificate that is no authority.
    pub(crate) fn no_authority(file: &Path) -> Self {
        Self::Content { file: file.to_owned(), rule: "has a certificate that is no authority" }
    }
}

/// TLS 1.2 and 1.3 configuration from a PEM chain, server certificate first, and a PEM key.
pub(crate) fn server(certificate_file: &Path, key_file: &Path) -> Result<Arc<ServerConfig>, TlsError> {
    let (chain, key) = (certificates(certificate_file)?, private_key(key_file)?);
    let config = builder().with_single_cert(chain, key);
    let mut config = config.map_err(TlsError::pair(certificate_file, key_file))?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

/// TLS of the endpoint picker: from its files, or with a self-signed certificate. `None`: not encrypted.
pub(crate) fn picker(settings: &PickerSettings) -> Result<Option<Arc<ServerConfig>>, TlsError> {
    if settings.plaintext {
        return Ok(None);
    }
    if let (Some(certificate_file), Some(key_file)) = (&settings.tls_certificate_file, &settings.tls_key_file) {
        return server(certificate_file, key_file).map(Some);
    }
    let own = rcgen::generate_simple_self_signed(["pointsman".to_owned()]).map_err(TlsError::SelfSigned)?;
    let key = PrivateKeyDer::try_from(own.signing_key.serialize_der()).expect("a generated key is valid");
    let config = builder().with_single_cert(vec![own.cert.der().clone()], key);
    let mut config = config.expect("a generated certificate fits its key");
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(Some(Arc::new(config)))
}

fn builder() -> ConfigBuilder<ServerConfig, WantsServerCert> {
    ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("ring supports TLS 1.2 and 1.3")
        .with_no_client_auth()
}

/// The authorities of a PEM file.
pub(crate) fn authorities(file: &Path) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for authority in certificates(file)? {
        roots.add(authority).map_err(|_| TlsError::no_authority(file))?;
    }
    Ok(roots)
}

/// The certificates of a PEM file, at least one.
pub(crate) fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let content = |rule| TlsError::Content { file: file.to_owned(), rule };
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&read(file)?).collect();
    let chain = chain.map_err(|error| content(no_pem(&error)))?;
    if chain.is_empty() {
        return Err(content("has no certificate, must have one with its intermediates, or the authorities"));
    }
    Ok(chain)
}

/// The private key of a PEM file.
pub(crate) fn private_key(file: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    let content = |error: pem::Error| TlsError::Content { file: file.to_owned(), rule: no_pem(&error) };
    PrivateKeyDer::from_pem_slice(&read(file)?).map_err(content)
}

fn read(file: &Path) -> Result<Vec<u8>, TlsError> {
    let bytes = read_at_most(file, FILE_BYTES_MAX + 1);
    match bytes.map_err(|error| TlsError::Read { file: file.to_owned(), error })? {
        bytes if bytes.len() > FILE_BYTES_MAX => {
            Err(TlsError::Content { file: file.to_owned(), rule: "is longer than 1 MiB" })
        }
        bytes => Ok(bytes),
    }
}

/// The parser's own message may quote the file.
fn no_pem(error: &pem::Error) -> &'static str {
    if matches!(error, pem::Error::NoItemsFound) {
        "has no private key, must have one in PEM without a passphrase"
    } else {
        "is not PEM"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(file: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tls").join(file)
    }

    #[test]
    fn unusable_files_are_rejected_by_name() {
        let refused =
            |certificate: &str, key: &str| server(&data(certificate), &data(key)).expect_err("rejected").to_string();
        let cases = [
            (refused("absent.crt", "test-only.key"), "absent.crt cannot be read: "),
            (refused("test-only.key", "test-only.key"), "test-only.key has no certificate"),
            (refused("test-only.crt", "test-only.crt"), "test-only.crt has no private key"),
            (refused("test-only.crt", "other-test-only.key"), "other-test-only.key cannot be used: "),
            (refused("broken.crt", "test-only.key"), "broken.crt is not PEM"),
        ];
        for (error, expected) in cases {
            assert!(error.contains(expected), "{error}");
        }
    }
}
