//! Ends of all requests: each ends exactly once.

use std::collections::BTreeMap;

/// End of a request, as its client observes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum End {
    Served,
    Failed,
    Rejected,
    Overloaded,
    /// Lost with actors at every attempt.
    Lost,
    /// The client left.
    Vanished,
    /// The router had failed.
    Down,
    /// The gateway died.
    Gone,
}

#[derive(Default)]
pub(crate) struct Ledger {
    open: BTreeMap<u64, ()>,
    pub(crate) ended: BTreeMap<u64, End>,
}

impl Ledger {
    pub(crate) fn open(&mut self, call: u64) {
        self.open.insert(call, ());
    }

    pub(crate) fn end(&mut self, call: u64, end: End) {
        assert!(
            self.open.remove(&call).is_some(),
            "request {call} ends again: {:?}, then {end:?}",
            self.ended.get(&call)
        );
        self.ended.insert(call, end);
    }

    pub(crate) fn open_calls(&self) -> Vec<u64> {
        self.open.keys().copied().collect()
    }
}
