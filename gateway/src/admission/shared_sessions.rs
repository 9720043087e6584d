//! Calls in flight of session names that may be shared.
//!
//! `prompt_cache_key` names the task of one agent in some clients and a whole application in others. A name with more calls
//! in flight than an agent sends is no session: affinity would gather an application on few ranks.

use std::sync::Arc;

use ahash::AHashMap;
use parking_lot::Mutex;

/// Calls in flight of one agent: its own, one that has ended but is not accounted yet, and one beside it, such as for a title.
const CALLS_MAX: u32 = 3;

/// Calls in flight by name.
#[derive(Debug, Default)]
pub(crate) struct SharedSessions(Mutex<AHashMap<String, u32>>);

/// A call in flight, until it is dropped.
#[derive(Debug)]
pub(crate) struct SharedCall {
    sessions: Arc<SharedSessions>,
    name: String,
}

impl SharedSessions {
    /// Begins a call. Returns also whether its name is that of one agent.
    pub(crate) fn begin(self: &Arc<Self>, name: String) -> (SharedCall, bool) {
        let mut calls = self.0.lock();
        let in_flight = calls.entry(name.clone()).or_default();
        *in_flight += 1;
        let is_of_one = *in_flight <= CALLS_MAX;
        drop(calls);
        (SharedCall { sessions: Arc::clone(self), name }, is_of_one)
    }
}

impl Drop for SharedCall {
    fn drop(&mut self) {
        let mut calls = self.sessions.0.lock();
        let Some(in_flight) = calls.get_mut(&self.name) else { return };
        *in_flight -= 1;
        if *in_flight == 0 {
            calls.remove(&self.name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_many_calls_in_flight_are_no_sessions() {
        let sessions = Arc::new(SharedSessions::default());
        let begin = |name: &str| sessions.begin(name.to_owned());
        let (mut calls, mut is_of_one) = (Vec::new(), Vec::new());
        for _ in 0..5 {
            let (call, is) = begin("app");
            calls.push(call);
            is_of_one.push(is);
        }
        assert_eq!(is_of_one, [true, true, true, false, false]);
        assert!(begin("other").1, "each name has its own count");
        calls.truncate(2);
        assert!(begin("app").1);
        calls.clear();
        assert!(sessions.0.lock().is_empty(), "names without calls are forgotten");
    }
}
