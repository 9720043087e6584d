//! What can be wrong with a source of workers.

#[cfg(feature = "discovery")]
use super::FileError;
use super::{DuplicateId, HttpUrlError};

/// Why a source has no new set of workers, or why its set lacks some. Its last good one stands.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DiscoveryError {
    /// An address that is none.
    #[error(transparent)]
    Url(#[from] HttpUrlError),
    /// Two workers with one id.
    #[error(transparent)]
    DuplicateId(#[from] DuplicateId),
    /// A file that is there and makes no sense.
    #[cfg(feature = "discovery")]
    #[error("{path}: {error}")]
    File {
        /// The file.
        path: String,
        /// What is wrong in it.
        error: FileError,
    },
    /// A file that cannot be read.
    #[error("{path} cannot be read: {reason}")]
    Unreadable {
        /// The file.
        path: String,
        /// Why not.
        reason: String,
    },
    /// A name without addresses.
    #[error("{name} cannot be resolved: {reason}")]
    Resolve {
        /// The name.
        name: String,
        /// Why not.
        reason: String,
    },
    /// Engines that were asked and cannot be used as they answered, or did not answer.
    #[error("{}", Engines(.0))]
    Engines(Vec<EngineError>),
    /// The source itself panicked. It is asked again.
    #[error("the source panicked")]
    Panicked,
    /// What sources of embedders have to say.
    #[error("{0}")]
    Other(String),
}

/// What is wrong with one engine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{url}: {reason}")]
pub struct EngineError {
    /// Where it was asked.
    pub url: String,
    /// What is wrong, in words.
    pub reason: String,
}

/// Engines that are shown by name; more are counted.
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
