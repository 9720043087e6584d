//! A listener and its connections.
//!
//! Owns the socket and the connections accepted on it. Promises that a drain accepts nothing new, lets requests in flight
//! end, and says how many it had to break. Leaves what is answered to the routes.

use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{sleep, timeout};

/// How long the listener rests when the system has no descriptor for another connection.
const ACCEPT_REST: Duration = Duration::from_millis(20);

/// How a drain ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drained {
    /// Connections that were still busy at the deadline, and were broken.
    pub broken: usize,
}

/// A listening socket.
pub(crate) struct Listener {
    address: SocketAddr,
    stop: watch::Sender<bool>,
    task: JoinHandle<JoinSet<()>>,
}

impl Listener {
    /// Listens at `address` and answers with `routes`.
    pub(crate) async fn start(address: SocketAddr, routes: Router) -> std::io::Result<Self> {
        let listener = TcpListener::bind(address).await?;
        let address = listener.local_addr()?;
        let (stop, stopped) = watch::channel(false);
        Ok(Self { address, stop, task: tokio::spawn(accept(listener, routes, stopped)) })
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Closes the socket, lets requests in flight end, and breaks what is left at the deadline.
    pub(crate) async fn drain(self, deadline: Duration) -> Drained {
        self.stop.send_replace(true);
        let Ok(mut connections) = self.task.await else { return Drained { broken: 0 } };
        let all_ended = async { while connections.join_next().await.is_some() {} };
        if timeout(deadline, all_ended).await.is_ok() {
            return Drained { broken: 0 };
        }
        let broken = connections.len();
        connections.shutdown().await;
        Drained { broken }
    }
}

async fn accept(listener: TcpListener, routes: Router, mut stopped: watch::Receiver<bool>) -> JoinSet<()> {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            _ = stopped.changed() => return connections,
            Some(_) = connections.join_next() => {}
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    connections.spawn(converse(stream, routes.clone(), stopped.clone()));
                }
                Err(_) => sleep(ACCEPT_REST).await,
            },
        }
    }
}

async fn converse(stream: TcpStream, routes: Router, mut stopped: watch::Receiver<bool>) {
    // Tokens are small and wanted at once; a connection works without it too.
    let _ = stream.set_nodelay(true);
    let service = TowerToHyperService::new(routes);
    let conversation = http1::Builder::new().timer(TokioTimer::new()).serve_connection(TokioIo::new(stream), service);
    tokio::pin!(conversation);
    tokio::select! {
        biased;
        // How a client goes is its own affair.
        _ = conversation.as_mut() => {}
        () = ended(&mut stopped) => {
            conversation.as_mut().graceful_shutdown();
            let _ = conversation.await;
        }
    }
}

/// Comes back when the listener is told to stop, or is gone.
async fn ended(stopped: &mut watch::Receiver<bool>) {
    // Either answer means the same.
    let _ = stopped.wait_for(|stopped| *stopped).await;
}
