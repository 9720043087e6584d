//! Decode ranks that hold the last turn of a session, for bidirectional transfers.
//!
//! vLLM's NIXL connector can read blocks of a decode rank into a prefill rank (`bidirectional_kv_xfer`). The parameters of
//! such a read are in the last event of a response. They are kept per session and used once, for the next turn.

use std::sync::Arc;
use std::time::Duration;

use ahash::AHashMap;
use axum::body::Bytes;
use parking_lot::Mutex;
use tokio::time::Instant;

/// Time for which parameters are valid, below the 480 s for which vLLM keeps the blocks by default
/// (`decoder_kv_blocks_ttl`).
const KEPT: Duration = Duration::from_secs(450);

/// Maximum number of sessions. Further ones are not kept.
const SESSIONS_MAX: usize = 65_536;

/// Maximum length of parameters.
const PARAMETERS_BYTES_MAX: usize = 1 << 20;

/// Parameters of the last turn by session.
#[derive(Debug, Default)]
pub(super) struct LastTurns(Mutex<AHashMap<Arc<str>, Turn>>);

#[derive(Debug)]
struct Turn {
    parameters: Bytes,
    ended: Instant,
}

impl LastTurns {
    /// Keeps the parameters of a turn that has ended now.
    pub(super) fn keep(&self, session: Arc<str>, parameters: Bytes, now: Instant) {
        if parameters.len() > PARAMETERS_BYTES_MAX {
            return;
        }
        // The table is consistent after every statement.
        let mut turns = self.0.lock();
        if turns.len() >= SESSIONS_MAX {
            turns.retain(|_, turn| now.duration_since(turn.ended) < KEPT);
        }
        if turns.len() < SESSIONS_MAX || turns.contains_key(&session) {
            turns.insert(session, Turn { parameters, ended: now });
        }
    }

    /// Takes the parameters of the last turn, if they are still valid.
    pub(super) fn take(&self, session: &str, now: Instant) -> Option<Bytes> {
        let turn = self.0.lock().remove(session)?;
        (now.duration_since(turn.ended) < KEPT).then_some(turn.parameters)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn parameters_are_used_once_and_expire() {
        let (turns, now) = (LastTurns::default(), Instant::now());
        let parameters = Bytes::from_static(b"{}");
        turns.keep("a".into(), parameters.clone(), now);
        turns.keep("b".into(), parameters.clone(), now);
        assert_eq!(turns.take("a", now), Some(parameters));
        assert_eq!(turns.take("a", now), None, "used once");
        assert_eq!(turns.take("b", now + KEPT), None, "expired");
        turns.keep("c".into(), vec![b' '; PARAMETERS_BYTES_MAX + 1].into(), now);
        assert_eq!(turns.take("c", now), None, "too long");
    }

    #[tokio::test]
    async fn full_tables_drop_expired_sessions_only() {
        let (turns, now) = (LastTurns::default(), Instant::now());
        for n in 0..SESSIONS_MAX {
            turns.keep(n.to_string().into(), Bytes::new(), now);
        }
        turns.keep("new".into(), Bytes::new(), now);
        assert_eq!(turns.take("new", now), None, "all others are valid");
        let later = now + KEPT;
        turns.keep("new".into(), Bytes::new(), later);
        assert_eq!(turns.take("new", later), Some(Bytes::new()));
    }
}
