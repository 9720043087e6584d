//! Subscriptions to SGLang's load sockets, one per rank.
//!
//! One task per worker. A closed socket is reconnected with increasing delays. Unusable messages are counted and not
//! replaced; a report without a successor becomes stale.

use tokio::task::JoinSet;

use super::{EngineLoadSources, report};
use crate::actors::io::engine_socket::{SocketError, Subscription};
use crate::actors::views::worker::WorkerEntry;
use crate::actors::worker_tasks;
use crate::engine_load::{MESSAGE_BYTES_MAX, read_stat};
use crate::ingest::Backoff;
use crate::protocol::{WorkerId, WorkerRank};
use crate::zmtp::Caps;

/// A message consists of three small frames.
const CAPS: Caps = Caps {
    frame_bytes_max: MESSAGE_BYTES_MAX as u64,
    message_bytes_max: MESSAGE_BYTES_MAX as u64,
    message_frames_max: 4,
};

/// Inputs of a worker's task: its ranks and their sockets.
type Sockets = Vec<(WorkerRank, String)>;

/// Starts the subscriptions to the workers. They end with the router.
pub(super) fn watch(sources: &EngineLoadSources) {
    worker_tasks::watch(&sources.fleet, &sources.status, sources.clone(), sockets_of, listen);
}

fn sockets_of(worker: &WorkerEntry) -> Option<Sockets> {
    let load = worker.config.load.as_ref()?;
    let socket = |rank: &WorkerRank| Some((*rank, load.socket_of_rank(rank.rank).ok()??)); // validated at the registration
    let sockets: Sockets = worker.ranks.iter().filter_map(socket).collect();
    (!sockets.is_empty()).then_some(sockets)
}

async fn listen(sources: EngineLoadSources, _: WorkerId, _: u64, sockets: Sockets) {
    let mut listeners = JoinSet::new(); // dropping it ends them
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
                    Ok(Err(_)) | Err(SocketError::Parts(_)) => sources.meters.engine_load_errors.add("message", 1),
                    Err(error) => {
                        tracing::debug!(%rank, %error, "engine load socket disconnected, reconnecting");
                        break;
                    }
                }
            }
        }
        tokio::time::sleep(backoff.next_delay()).await;
    }
}
