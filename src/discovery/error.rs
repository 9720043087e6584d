//! Errors of worker sources.

#[cfg(feature = "discovery")]
use super::FileError;
use super::{DuplicateWorker, HttpUrlError};

/// Reason for which a source has no new set of workers, or an incomplete one. The last valid set remains in use.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DiscoveryError {
    /// An invalid address.
    #[error(transparent)]
    Url(#[from] HttpUrlError),
    /// Two workers with the same id or engine.
    #[error(transparent)]
    Duplicate(#[from] DuplicateWorker),
    /// A file with invalid content.
    #[cfg(feature = "discovery")]
    #[error("{path}: {error}")]
    File {
        /// The file.
        path: String,
        /// The defect.
        error: FileError,
    },
    /// An unreadable file.
    #[error("{path} cannot be read: {reason}")]
    Unreadable {
        /// The file.
        path: String,
        /// The reason.
        reason: String,
    },
    /// A name without addresses.
    #[error("{name} cannot be resolved: {reason}")]
    Resolve {
        /// The name.
        name: String,
        /// The reason.
        reason: String,
    },
    /// Kubernetes resources that cannot be watched. The last received state is used.
    #[cfg(feature = "kubernetes")]
    #[error("{resource} cannot be watched since {since}: {reason}")]
    Watch {
        /// The resource, with its namespace.
        resource: String,
        /// Time of the first failure after the last success, RFC 3339.
        since: String,
        /// The reason.
        reason: String,
    },
    /// Engines that did not respond to the probe or gave unusable responses.
    #[error("{}", Engines(.0))]
    Engines(Vec<EngineError>),
    /// The source panicked. It is polled again.
    #[error("the source panicked")]
    Panicked,
    /// Error of an embedder's source.
    #[error("{0}")]
    Other(String),
}

/// Error of one engine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{url}: {reason}")]
pub struct EngineError {
    /// The probed address.
    pub url: String,
    /// The error message.
    pub reason: String,
}

/// Maximum number of engines in a message; further ones are counted.
const SHOWN_MAX: usize = 8;

struct Engines<'a>(&'a [EngineError]);

impl std::fmt::Display for Engines<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (n, error) in self.0.iter().take(SHOWN_MAX).enumerate() {
            write!(f, "{}{error}", if n == 0 { "" } else { "; " })?;
        }
        match self.0.len().saturating_sub(SHOWN_MAX) {
            0 => Ok(()),
            more => write!(f, "; and {more} more"),
        }
    }
}
