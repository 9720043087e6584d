//! Change detection for sources that poll repeatedly.
//!
//! Keeps the last reported set and error. A set is reported when it has changed, and so is an error. When an error is
//! resolved, the set is reported again.

use super::DiscoveryError;
use crate::protocol::WorkerMap;

/// The last set and the last error of one source.
///
/// ```
/// use pointsman::{internals::discovery::Changes, DiscoveryError};
/// use pointsman::protocol::WorkerMap;
///
/// let mut changes = Changes::default();
/// assert_eq!(changes.look(Some(WorkerMap::new()), None), Some(Ok(WorkerMap::new())));
/// assert_eq!(changes.look(Some(WorkerMap::new()), None), None);
/// let broken = DiscoveryError::Other("broken".to_owned());
/// assert_eq!(changes.look(None, Some(broken.clone())), Some(Err(broken)));
/// ```
#[derive(Debug, Default)]
pub struct Changes {
    said: Option<WorkerMap>,
    complaint: Option<DiscoveryError>,
    /// An error to report after the current set.
    pending: Option<DiscoveryError>,
}

impl Changes {
    /// The error to report after the set of the last poll.
    pub fn pending(&mut self) -> Option<DiscoveryError> {
        self.pending.take()
    }

    /// Resets the state, so that the next poll reports everything again.
    pub fn forget(&mut self) {
        *self = Self::default();
    }

    /// The report after a poll with this set (`None` if unusable) and this error. A set is reported before its error,
    /// which is then [pending](Self::pending).
    pub fn look(
        &mut self,
        found: Option<WorkerMap>,
        complaint: Option<DiscoveryError>,
    ) -> Option<Result<WorkerMap, DiscoveryError>> {
        let mended = self.complaint.is_some() && complaint.is_none();
        let news = found.filter(|found| mended || self.said.as_ref() != Some(found));
        let is_new = complaint != self.complaint || news.is_some();
        self.complaint.clone_from(&complaint);
        let complaint = complaint.filter(|_| is_new);
        if let Some(set) = news {
            self.pending = complaint;
            self.said = Some(set.clone());
            return Some(Ok(set));
        }
        complaint.map(Err)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{WorkerConfig, WorkerId};

    #[test]
    fn sets_and_errors_are_reported_when_they_change() {
        let set = |n: u64| WorkerMap::from([(WorkerId(n), WorkerConfig::at("x"))]);
        let wrong = |what: &str| DiscoveryError::Other(what.to_owned());
        let mut changes = Changes::default();
        assert_eq!(changes.look(Some(set(1)), Some(wrong("a"))), Some(Ok(set(1))));
        assert_eq!((changes.pending(), changes.pending()), (Some(wrong("a")), None));
        assert_eq!(changes.look(Some(set(1)), Some(wrong("a"))), None, "no change");
        assert_eq!(changes.look(Some(set(1)), Some(wrong("b"))), Some(Err(wrong("b"))));
        assert_eq!(changes.look(Some(set(2)), Some(wrong("b"))), Some(Ok(set(2))));
        assert_eq!(changes.pending(), Some(wrong("b")), "a set resolves errors, so the error is repeated");
        assert_eq!(changes.look(Some(set(2)), None), Some(Ok(set(2))), "resolved");
        assert_eq!(changes.look(None, Some(wrong("c"))), Some(Err(wrong("c"))));
        assert_eq!(changes.look(Some(set(2)), None), Some(Ok(set(2))), "resolved again");
        changes.forget();
        assert_eq!(changes.look(Some(set(2)), None), Some(Ok(set(2))));
    }
}
