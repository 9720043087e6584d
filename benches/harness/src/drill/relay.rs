//! TCP relay whose forwarding can be stopped. Stopped connections stay open, as in a network that drops packets.

use std::io;
use std::net::SocketAddr;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::AbortHandle;

/// Relay to one target.
#[derive(Debug)]
pub(super) struct Relay {
    address: SocketAddr,
    /// Target of later connections. Without one they are closed.
    target: watch::Sender<Option<SocketAddr>>,
    is_open: watch::Sender<bool>,
    task: AbortHandle,
}

impl Relay {
    /// Starts an open relay without a target on a free port.
    pub(super) async fn start() -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let (target, targets) = watch::channel(None);
        let (is_open, open) = watch::channel(true);
        let task = tokio::spawn(async move {
            while let Ok((from, _)) = listener.accept().await {
                let (target, open) = (*targets.borrow(), open.clone());
                tokio::spawn(async move { connect(from, target?, open).await.ok() });
            }
        });
        Ok(Self { address, target, is_open, task: task.abort_handle() })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(super) fn set_target(&self, target: SocketAddr) {
        self.target.send_replace(Some(target));
    }

    /// Stops or resumes forwarding in both directions, ends of connections included.
    pub(super) fn set_open(&self, is_open: bool) {
        self.is_open.send_replace(is_open);
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn connect(from: TcpStream, target: SocketAddr, mut open: watch::Receiver<bool>) -> io::Result<()> {
    // An error means that the relay was dropped.
    open.wait_for(|open| *open).await.map_err(io::Error::other)?;
    let to = TcpStream::connect(target).await?;
    from.set_nodelay(true)?;
    to.set_nodelay(true)?;
    let ((from_read, from_write), (to_read, to_write)) = (from.into_split(), to.into_split());
    tokio::select! {
        biased;
        () = forward(from_read, to_write, open.clone()) => {}
        () = forward(to_read, from_write, open) => {}
    }
    Ok(())
}

async fn forward(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, mut open: watch::Receiver<bool>) {
    let mut buffer = vec![0; 16 << 10];
    loop {
        let read = from.read(&mut buffer).await.unwrap_or(0);
        let is_running = open.wait_for(|open| *open).await.is_ok();
        if read == 0 || !is_running || to.write_all(&buffer[..read]).await.is_err() {
            return;
        }
    }
}
