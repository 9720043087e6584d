//! Hints to engines, for workers that [receive them](pointsman::protocol::WorkerConfig::session_hints).
//!
//! SGLang evicts the blocks to which a session refers after all others. A call refers to its blocks at its end, and `POST
//! /close_session` drops these references (reference: SGLang 0.5.23, `session_ref_tracker.py`, `components/full.py`).
//! A session is open while its agent executes tools. It is closed by a stream without a call of a tool, by a call to
//! another worker, and after five idle minutes.

use std::fmt::Write as _;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use lru::LruCache;
use parking_lot::Mutex;
use pointsman::RequestOptions;
use pointsman::protocol::WorkerId;
use tokio::time::Instant;

use super::engine_calls::EngineCalls;
use crate::formats::openai::{Endpoint, RequestBody, hashed};

/// Idle time after which a later call of any session closes a session. Most tools take seconds.
const IDLE_MAX: Duration = Duration::from_secs(300);

/// Open sessions. The longest idle one is closed first.
const SESSIONS_MAX: NonZeroUsize = NonZeroUsize::new(16_384).expect("not zero");

/// Hints of a request.
#[derive(Default)]
pub(crate) struct Hints {
    session: Option<Arc<str>>,
    priority: Option<u32>,
}

impl Hints {
    pub(super) fn new(endpoint: Endpoint, body: &RequestBody, options: &RequestOptions) -> Self {
        let is_read = matches!(endpoint, Endpoint::Chat | Endpoint::Completions | Endpoint::Responses);
        let session = options.session_id.clone().filter(|_| is_read && body.takes_session);
        let priority = (is_read && body.takes_priority).then_some(options.strict_priority);
        Self { session, priority }
    }

    /// Fields for the body at an engine that receives sessions and priorities or not, and the id of the session, which no
    /// other model or tenant has.
    pub(super) fn of(&self, model: &str, (sessions, priorities): (bool, bool)) -> (String, Option<String>) {
        let session = self.session.as_ref().filter(|_| sessions);
        let session = session.map(|name| hashed(&[model, "\n", name].concat()));
        let mut fields = String::new();
        if let Some(id) = &session {
            let _ = write!(fields, "\"session_id\":\"{id}\",");
        }
        if let Some(priority) = self.priority.filter(|_| priorities) {
            let _ = write!(fields, "\"priority\":{priority},");
        }
        (fields, session)
    }
}

/// A JSON object with further fields in front. It has others.
pub(super) fn with_fields(body: &Bytes, fields: &str) -> Bytes {
    match body.iter().position(|byte| *byte == b'{').filter(|_| !fields.is_empty()) {
        Some(brace) => [&body[..=brace], fields.as_bytes(), &body[brace + 1..]].concat().into(),
        None => body.clone(),
    }
}

/// Open sessions of all engines.
pub(crate) struct EngineSessions(Mutex<LruCache<String, OpenSession>>);

/// Closed when dropped.
struct OpenSession {
    worker: WorkerId,
    used: Instant,
    _close: EngineCalls,
}

impl Default for EngineSessions {
    fn default() -> Self {
        Self(Mutex::new(LruCache::new(SESSIONS_MAX)))
    }
}

impl EngineSessions {
    /// A call of a session is sent to a worker, where `close` ends the session.
    pub(super) fn called(
        self: &Arc<Self>,
        id: &str,
        worker: WorkerId,
        close: impl FnOnce() -> EngineCalls,
    ) -> SessionCall {
        let (mut open, used) = (self.0.lock(), Instant::now());
        while open.peek_lru().is_some_and(|(_, oldest)| used - oldest.used >= IDLE_MAX) {
            open.pop_lru();
        }
        match open.get_mut(id).filter(|known| known.worker == worker) {
            Some(known) => known.used = used,
            None => drop(open.push(id.to_owned(), OpenSession { worker, used, _close: close() })),
        }
        SessionCall { sessions: Arc::clone(self), id: id.to_owned() }
    }
}

/// A call of an open session.
pub(super) struct SessionCall {
    sessions: Arc<EngineSessions>,
    id: String,
}

impl SessionCall {
    /// Closes the session: the response calls no tool.
    pub(super) fn stopped(&self) {
        self.sessions.0.lock().pop(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    fn called(sessions: &Arc<EngineSessions>, id: usize) {
        sessions.called(&id.to_string(), WorkerId(1), EngineCalls::default);
    }

    fn open(sessions: &EngineSessions) -> Vec<String> {
        sessions.0.lock().iter().map(|(id, _)| id.clone()).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_later_call_closes_idle_sessions() {
        let sessions = Arc::default();
        called(&sessions, 1);
        advance(IDLE_MAX / 2).await;
        called(&sessions, 2);
        advance(IDLE_MAX / 2 - Duration::from_millis(1)).await;
        called(&sessions, 3);
        assert_eq!(open(&sessions), ["3", "2", "1"]);
        called(&sessions, 2);
        advance(Duration::from_millis(1)).await;
        called(&sessions, 4);
        assert_eq!(open(&sessions), ["4", "2", "3"]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_session_beyond_the_maximum_closes_the_longest_idle_one() {
        let sessions = Arc::default();
        (0..SESSIONS_MAX.get()).for_each(|id| called(&sessions, id));
        called(&sessions, 0);
        called(&sessions, SESSIONS_MAX.get());
        let open = open(&sessions);
        assert_eq!(open.len(), SESSIONS_MAX.get());
        assert_eq!((open[1].as_str(), open.last().map(String::as_str)), ("0", Some("2")));
    }
}
