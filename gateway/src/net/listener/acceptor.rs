//! Accept loop with connection limits.
//!
//! Accepts a connection only with a free place. Without free descriptors it gives up a spare one, so that the client
//! receives an error response. The listener serves the connections.

use std::fs::File;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use metrics::{Counter, Gauge};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep};

use super::ListenerOptions;
use crate::observe::page::{ACCEPT_ERRORS, CONNECTIONS, CONNECTIONS_REFUSED, HANDSHAKES_REFUSED};
use crate::observe::throttle::LogThrottle;

/// Pause after an accept without a free descriptor.
const ACCEPT_REST: Duration = Duration::from_millis(20);

/// Log interval of accept errors and of a full listener.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Errors for a process and a machine without free descriptors: EMFILE and ENFILE on Unix.
const NO_DESCRIPTOR: [i32; 2] = [24, 23];

/// File for the spare descriptor.
const SPARE_FILE: &str = "/dev/null";

/// Metrics of one listener.
struct ListenerMeters {
    connections: Gauge,
    handshakes_refused: Counter,
    accept_errors: Counter,
    refused: Counter,
}

impl ListenerMeters {
    fn new(name: &'static str) -> Self {
        Self {
            connections: metrics::gauge!(CONNECTIONS.name, "listener" => name),
            handshakes_refused: metrics::counter!(HANDSHAKES_REFUSED.name, "listener" => name),
            accept_errors: metrics::counter!(ACCEPT_ERRORS.name, "listener" => name),
            refused: metrics::counter!(CONNECTIONS_REFUSED.name, "listener" => name),
        }
    }
}

/// A place among the connections, held by one connection.
pub(super) struct Place {
    connections: Gauge,
    _permit: OwnedSemaphorePermit,
}

impl Place {
    fn new(connections: &Gauge, permit: OwnedSemaphorePermit) -> Self {
        connections.increment(1.0);
        Self { connections: connections.clone(), _permit: permit }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.connections.decrement(1.0);
    }
}

/// An accepted connection.
pub(super) struct Accepted {
    pub(super) stream: TcpStream,
    pub(super) peer: SocketAddr,
    pub(super) place: Place,
    /// Whether it exceeds the limit or used the last descriptor.
    pub(super) is_overflow: bool,
}

/// Source of connections.
pub(super) struct Acceptor {
    listener: TcpListener,
    free: Arc<Semaphore>,
    /// Places for connections above the limit.
    overflow: Arc<Semaphore>,
    connections_max: usize,
    meters: ListenerMeters,
    /// Absent after its use.
    spare: Option<File>,
    trouble_logged: LogThrottle,
    refused_logged: LogThrottle,
    name: &'static str,
}

impl Acceptor {
    pub(super) fn new(listener: TcpListener, options: &ListenerOptions) -> Self {
        let connections_max = options.connections_max.max(1) as usize;
        let overflow_max = options.overflow.as_ref().map_or(0, |overflow| overflow.connections_max as usize);
        let places = |n: usize| Arc::new(Semaphore::new(n.min(Semaphore::MAX_PERMITS)));
        Self {
            listener,
            free: places(connections_max),
            overflow: places(overflow_max),
            connections_max,
            meters: ListenerMeters::new(options.name),
            spare: spare(),
            trouble_logged: LogThrottle::new(LOG_INTERVAL),
            refused_logged: LogThrottle::new(LOG_INTERVAL),
            name: options.name,
        }
    }

    pub(super) fn handshakes_refused(&self) -> Counter {
        self.meters.handshakes_refused.clone()
    }

    /// The next connection. Cancel-safe: no accepted connection is lost.
    pub(super) async fn next(&mut self) -> Accepted {
        let (free, overflow) = (Arc::clone(&self.free), Arc::clone(&self.overflow));
        let (permit, mut is_overflow) = tokio::select! {
            biased;
            permit = free.acquire_owned() => (permit, false),
            permit = overflow.acquire_owned() => (permit, true),
        };
        let mut permit = permit.expect("the semaphores stay open");
        let mut gave_up_spare = false;
        let (stream, peer) = loop {
            if !gave_up_spare && self.spare.is_none() {
                self.spare = spare();
            }
            let error = match self.listener.accept().await {
                Ok(accepted) => break accepted,
                Err(error) => error,
            };
            self.meters.accept_errors.increment(1);
            if let Some(suppressed) = self.trouble_logged.next_line(Instant::now()) {
                tracing::warn!(listener = self.name, %error, suppressed, "cannot accept connections");
            }
            let is_short = error.raw_os_error().is_some_and(|code| NO_DESCRIPTOR.contains(&code));
            if is_short && self.spare.take().is_some() {
                gave_up_spare = true;
            } else {
                sleep(ACCEPT_REST).await;
            }
        };
        // A place may have become free during the wait.
        if is_overflow && let Ok(freed) = Arc::clone(&self.free).try_acquire_owned() {
            (permit, is_overflow) = (freed, false);
        }
        let is_overflow = is_overflow || gave_up_spare;
        if is_overflow {
            self.meters.refused.increment(1);
            if let Some(suppressed) = self.refused_logged.next_line(Instant::now()) {
                let (listener, connections_max) = (self.name, self.connections_max);
                tracing::warn!(listener, connections_max, suppressed, "connection refused: connection limit reached");
            }
        }
        Accepted { stream, peer, place: Place::new(&self.meters.connections, permit), is_overflow }
    }

    /// Connections in the backlog, which closing the socket would reset; as many as there are places.
    pub(super) fn waiting(self) -> Vec<Accepted> {
        let Self { listener, free, meters, .. } = self;
        let Ok(listener) = listener.into_std() else { return Vec::new() };
        let mut waiting = Vec::new();
        while let Ok(permit) = Arc::clone(&free).try_acquire_owned() {
            // The socket is non-blocking: an empty backlog ends the loop.
            let Ok((stream, peer)) = listener.accept() else { break };
            let Ok(stream) = stream.set_nonblocking(true).and_then(|()| TcpStream::from_std(stream)) else { continue };
            let place = Place::new(&meters.connections, permit);
            waiting.push(Accepted { stream, peer, place, is_overflow: false });
        }
        waiting
    }
}

/// A spare descriptor; `None` without a free one.
fn spare() -> Option<File> {
    File::open(SPARE_FILE).ok()
}
