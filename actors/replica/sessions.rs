//! Sharing of sessions: publishes the bindings of the scheduler, and forwards those of other replicas to it.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::sync::oneshot::error::TryRecvError;

use super::bus::ReplicaBus;
use crate::actors::delivery::strand::Strand;
use crate::actors::scheduler::Scheduler;
use crate::replica::{MessageError, ReplicaTopic, decode_sessions, encode_sessions};
use crate::session::SessionBinding;

/// Maximum length of a message, which is also the maximum per interval.
const BYTES_MAX: usize = 8 << 10;

/// Mean time in which some replica repeats a binding, if [`BYTES_MAX`] permits.
const REPEAT_INTERVAL: Duration = Duration::from_secs(5);

/// Maximum number of received messages that wait for the scheduler.
const RECEIVED_MAX: usize = 256;

pub(super) struct SessionSharing {
    bus: Arc<dyn ReplicaBus>,
    pool: Arc<str>,
    scheduler: Arc<Strand<Scheduler>>,
    /// Outstanding reply of the scheduler.
    answer: Option<oneshot::Receiver<Vec<SessionBinding>>>,
    /// Whether the last reply had no bindings.
    is_idle: bool,
    /// Held by every received message that the scheduler has not applied.
    applied: Arc<()>,
}

impl SessionSharing {
    pub(super) fn new(bus: Arc<dyn ReplicaBus>, pool: Arc<str>, scheduler: Arc<Strand<Scheduler>>) -> Self {
        Self { bus, pool, scheduler, answer: None, is_idle: false, applied: Arc::default() }
    }

    /// Publishes new bindings, and repetitions at a rate for `replicas` replicas in total.
    pub(super) fn on_tick(&mut self, replicas: u32) {
        if self.answer.is_none() {
            let (life, period) = (self.bus.life(), REPEAT_INTERVAL * replicas);
            let share = move |scheduler: &mut Scheduler| scheduler.share_sessions(life, period, BYTES_MAX);
            self.answer = Some(self.scheduler.ask(share));
        }
        // An idle scheduler has replied already. The reply of a busy one is published after the next interval.
        match self.answer.as_mut().map(oneshot::Receiver::try_recv) {
            Some(Ok(bindings)) if !bindings.is_empty() => {
                (self.answer, self.is_idle) = (None, false);
                self.bus.publish(&self.pool, ReplicaTopic::Sessions, encode_sessions(&bindings).into());
            }
            Some(Err(TryRecvError::Empty)) | None => {}
            Some(Ok(_) | Err(TryRecvError::Closed)) => (self.answer, self.is_idle) = (None, true),
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.is_idle
    }

    /// Forwards received bindings. Returns the number of lost messages: those that a busy scheduler cannot take.
    pub(super) fn on_message(&self, payload: &[u8]) -> Result<u64, MessageError> {
        let bindings = decode_sessions(payload)?;
        if Arc::strong_count(&self.applied) > RECEIVED_MAX {
            return Ok(1);
        }
        let applied = Arc::clone(&self.applied);
        self.scheduler.query(move |scheduler| {
            scheduler.receive_sessions(&bindings);
            drop(applied);
            || {}
        });
        Ok(0)
    }
}
