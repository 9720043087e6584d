//! Metrics of transports, and the log lines of refused connections.

use std::fmt;
use std::time::Duration;

use metrics::{Counter, Gauge};
use pointsman::named;
use tokio::time::Instant;

use crate::observe::metric::metric_table;
use crate::observe::throttle::LogThrottle;

metric_table! {
    PEERS: gauge "pointsman_gateway_replica_peers" ["state"] =
        "Other replicas by state: `connecting`, `connected` without a warm index, or `serving`.";
    REFUSED: counter "pointsman_gateway_replica_refused_total" ["reason"] =
        "Refused connections and messages of replicas, by reason.";
    SENT: counter "pointsman_gateway_replica_sent_bytes_total" [] = "Bytes sent to other replicas.";
    RECEIVED: counter "pointsman_gateway_replica_received_bytes_total" [] = "Bytes received from other replicas.";
    DROPPED: counter "pointsman_gateway_replica_dropped_total" [] =
        "Messages to other replicas dropped because of a full queue or their length.";
}

/// Log interval of each reason of refusals.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

named! {
    /// Reason of a refused connection or message.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(in crate::replicas) enum RefusalReason {
        /// Missing, wrong, replayed or reordered authentication.
        Authentication = "authentication",
        /// A failed TLS handshake.
        Tls = "tls",
        /// Another version of the protocol.
        Version = "version",
        /// Above a length limit.
        Oversized = "oversized",
        /// No frame or envelope of the protocol.
        Malformed = "malformed",
        /// An older life of a connected replica, or an old message.
        Stale = "stale",
        /// The id of this replica.
        DuplicateId = "duplicate_id",
        /// No complete handshake in time.
        Timeout = "timeout",
        /// More connections than the limit.
        Connections = "connections",
    }
}

named! {
    /// State of a peer in metrics.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(in crate::replicas) enum PeerState {
        /// Not connected.
        Connecting = "connecting",
        /// Without a warm index.
        Connected = "connected",
        /// With a warm index.
        Serving = "serving",
    }
}

/// Handles of a transport.
pub(in crate::replicas) struct ReplicaMeters {
    peers: [Gauge; PeerState::ALL.len()],
    refused: [(Counter, LogThrottle); RefusalReason::ALL.len()],
    /// Counts without a recorder.
    #[cfg(test)]
    counts: [std::sync::atomic::AtomicU64; RefusalReason::ALL.len()],
    pub(in crate::replicas) sent_bytes: Counter,
    pub(in crate::replicas) received_bytes: Counter,
    pub(in crate::replicas) dropped: Counter,
}

impl ReplicaMeters {
    pub(in crate::replicas) fn new() -> Self {
        let refused = |reason: RefusalReason| {
            (metrics::counter!(REFUSED.name, "reason" => reason.name()), LogThrottle::new(LOG_INTERVAL))
        };
        Self {
            peers: PeerState::ALL.map(|state| metrics::gauge!(PEERS.name, "state" => state.name())),
            refused: RefusalReason::ALL.map(refused),
            #[cfg(test)]
            counts: Default::default(),
            sent_bytes: metrics::counter!(SENT.name),
            received_bytes: metrics::counter!(RECEIVED.name),
            dropped: metrics::counter!(DROPPED.name),
        }
    }

    /// Counts a refusal and logs it at most every ten seconds per reason.
    pub(in crate::replicas) fn refused(&self, reason: RefusalReason, peer: &dyn fmt::Display, detail: &str) {
        let (counter, throttle) = &self.refused[reason as usize];
        counter.increment(1);
        #[cfg(test)]
        self.counts[reason as usize].fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        if let Some(suppressed) = throttle.next_line(Instant::now()) {
            tracing::warn!(%peer, reason = reason.name(), detail, suppressed, "replica refused");
        }
    }

    #[cfg(test)]
    pub(in crate::replicas) fn count(&self, reason: RefusalReason) -> u64 {
        self.counts[reason as usize].load(std::sync::atomic::Ordering::Relaxed)
    }

    /// Moves a peer from one state to another; `None` counts nowhere.
    pub(in crate::replicas) fn moved(&self, from: Option<PeerState>, to: Option<PeerState>) {
        if from != to {
            from.into_iter().for_each(|state| self.peers[state as usize].decrement(1.0));
            to.into_iter().for_each(|state| self.peers[state as usize].increment(1.0));
        }
    }
}
