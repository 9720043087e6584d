//! What a source that looks again and again has to say.
//!
//! Owns what was said last. Promises that a set is said when it has changed, a complaint when it has changed, and
//! that what was complained of no longer is unsaid by saying the set again.

use super::DiscoveryError;
use crate::protocol::WorkerMap;

/// The last set and the last complaint of one source.
///
/// ```
/// use pointsman::discovery::{Changes, DiscoveryError};
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
    /// A complaint that follows the set just said.
    pending: Option<DiscoveryError>,
}

impl Changes {
    /// What must still be said after the last look.
    pub fn pending(&mut self) -> Option<DiscoveryError> {
        self.pending.take()
    }

    /// Forgets what was said, so that the next look says it all again.
    pub fn forget(&mut self) {
        *self = Self::default();
    }

    /// What to say after a look that found this set (`None`: none that could be used) and this to complain of. A set
    /// goes before its complaint, which is then [pending](Self::pending).
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
    fn sets_and_complaints_are_said_when_they_change() {
        let set = |n: u64| WorkerMap::from([(WorkerId(n), WorkerConfig::at("x"))]);
        let wrong = |what: &str| DiscoveryError::Other(what.to_owned());
        let mut changes = Changes::default();
        assert_eq!(changes.look(Some(set(1)), Some(wrong("a"))), Some(Ok(set(1))));
        assert_eq!((changes.pending(), changes.pending()), (Some(wrong("a")), None));
        assert_eq!(changes.look(Some(set(1)), Some(wrong("a"))), None, "all of it is known");
        assert_eq!(changes.look(Some(set(1)), Some(wrong("b"))), Some(Err(wrong("b"))));
        assert_eq!(changes.look(Some(set(2)), Some(wrong("b"))), Some(Ok(set(2))));
        assert_eq!(changes.pending(), Some(wrong("b")), "a set unsays complaints, so it is said again");
        assert_eq!(changes.look(Some(set(2)), None), Some(Ok(set(2))), "mended");
        assert_eq!(changes.look(None, Some(wrong("c"))), Some(Err(wrong("c"))));
        assert_eq!(changes.look(Some(set(2)), None), Some(Ok(set(2))), "mended again");
        changes.forget();
        assert_eq!(changes.look(Some(set(2)), None), Some(Ok(set(2))));
    }
}
