//! Listening: SGLang's load sockets, one a rank.
//!
//! Owns the tasks, one a worker. Promises that a socket that is gone is tried again, less and less often, and that what
//! cannot be read is counted and nothing is made up for it. What nobody says any more grows old by itself.

use tokio::task::JoinSet;

use super::{EngineLoadSources, report};
use crate::actors::io::engine_socket::{SocketError, Subscription};
use crate::actors::views::worker::WorkerEntry;
use crate::actors::worker_tasks;
use crate::engine_load::{MESSAGE_BYTES_MAX, read_stat};
use crate::ingest::Backoff;
use crate::protocol::{WorkerId, WorkerRank};
use crate::zmtp::Caps;

/// A message is three small parts.
const CAPS: Caps = Caps {
    frame_bytes_max: MESSAGE_BYTES_MAX as u64,
    message_bytes_max: MESSAGE_BYTES_MAX as u64,
    message_frames_max: 4,
};

/// What a worker's task depends on: its ranks and their sockets.
type Sockets = Vec<(WorkerRank, String)>;

/// Starts to listen to the workers. It ends with the router.
pub(super) fn watch(sources: &EngineLoadSources) {
    worker_tasks::watch(&sources.fleet, &sources.status, sources.clone(), sockets_of, listen);
}

fn sockets_of(worker: &WorkerEntry) -> Option<Sockets> {
    let load = worker.config.load.as_ref()?;
    let socket = |rank: &WorkerRank| Some((*rank, load.socket_of_rank(rank.rank).ok()??)); // checked when it joined
    let sockets: Sockets = worker.ranks.iter().filter_map(socket).collect();
    (!sockets.is_empty()).then_some(sockets)
}

async fn listen(sources: EngineLoadSources, _: WorkerId, _: u64, sockets: Sockets) {
    let mut listeners = JoinSet::new(); // dropped, it ends them
    for (rank, endpoint) in sockets {
        listeners.spawn(listen_to(sources.clone(), rank, endpoint));
    }
    while listeners.join_next().await.is_some() {}
}

/// Runs until it is aborted.
async fn listen_to(sources: EngineLoadSources, rank: WorkerRank, endpoint: String) {
    let mut backoff = Backoff::new(rank.worker.0 ^ u64::from(rank.rank));
    loop {
        if let Ok(mut subscription) = Subscription::connect(&endpoint, "", CAPS).await {
            loop {
                let message = subscription.receive().await;
                match message.map(|(_, payload)| read_stat(&payload)) {
                    Ok(Ok(reading)) => {
                        backoff.reset();
                        report(&sources.engine_loads, sources.clock, rank, reading);
                    }
                    Ok(Err(_)) | Err(SocketError::Parts(_)) => sources.meters.engine_load_errors.message.increment(1),
                    Err(error) => {
                        tracing::debug!(%rank, %error, "an engine's load socket is gone; connecting again");
                        break;
                    }
                }
            }
        }
        tokio::time::sleep(backoff.next_delay()).await;
    }
}
