//! Session ids.

use std::ops::Deref;
use std::sync::Arc;

/// Invalid length of a session id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("session id has {length} bytes, must have 1 to {}", SessionId::BYTES_MAX)]
pub struct SessionIdError {
    /// Length in bytes.
    pub length: usize,
}

/// Session id of 1 to 256 bytes of text. Cheap to clone.
///
/// ```
/// use pointsman::SessionId;
///
/// assert_eq!(&*SessionId::new("chat-7")?, "chat-7");
/// let error = SessionId::new(&"x".repeat(300)).unwrap_err();
/// assert_eq!(error.to_string(), "session id has 300 bytes, must have 1 to 256");
/// # Ok::<(), pointsman::internals::session::SessionIdError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(Arc<str>);

impl SessionId {
    /// Maximum length in bytes.
    pub const BYTES_MAX: usize = 256;

    /// Validates an id from a caller. An empty id is rejected, because all callers that send one would share a session.
    ///
    /// # Errors
    /// If the id is empty or longer than [`Self::BYTES_MAX`].
    pub fn new(id: &str) -> Result<Self, SessionIdError> {
        Self::try_from(Arc::from(id))
    }
}

impl TryFrom<Arc<str>> for SessionId {
    type Error = SessionIdError;

    fn try_from(id: Arc<str>) -> Result<Self, SessionIdError> {
        match id.len() {
            1..=Self::BYTES_MAX => Ok(Self(id)),
            length => Err(SessionIdError { length }),
        }
    }
}

impl Deref for SessionId {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}
