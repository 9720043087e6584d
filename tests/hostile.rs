//! A socket on plain TCP that violates the KV event protocol according to a script.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use pointsman::protocol::KvEventsConfig;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

use crate::zmtp::{kv_events, listen};

/// Bytes for one connection, sent regardless of the client's bytes.
#[derive(Clone)]
pub(crate) struct Script {
    pub(crate) first: Vec<u8>,
    pub(crate) then: Then,
}

#[derive(Clone)]
pub(crate) enum Then {
    Close,
    /// Sends nothing more.
    Hang,
    /// Sends these bytes this many times, then nothing more.
    Repeat(Vec<u8>, usize),
}

impl Script {
    pub(crate) fn new(first: Vec<u8>, then: Then) -> Self {
        Self { first, then }
    }
}

/// A socket that follows a script per connection, selected by the connection's number.
pub(crate) struct Hostile {
    address: SocketAddr,
    accepted: Arc<AtomicUsize>,
    task: JoinHandle<()>,
}

impl Drop for Hostile {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Hostile {
    pub(crate) async fn start(script: impl Fn(usize) -> Script + Send + 'static) -> Self {
        let listener = listen().await;
        let address = listener.local_addr().expect("bound");
        let accepted = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&accepted);
        let task = tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.expect("a connection");
                tokio::spawn(follow(stream, script(count.fetch_add(1, Ordering::SeqCst))));
            }
        });
        Self { address, accepted, task }
    }

    pub(crate) fn accepted(&self) -> usize {
        self.accepted.load(Ordering::SeqCst)
    }

    /// KV event settings with this socket as the publisher and another one as the replay socket.
    pub(crate) fn kv_events(&self, replay: Option<&Self>) -> KvEventsConfig {
        kv_events(self.address, replay.map(|replay| replay.address))
    }
}

async fn follow(stream: TcpStream, script: Script) {
    let (mut from, mut to) = stream.into_split();
    let sending = async move {
        to.write_all(&script.first).await?;
        match script.then {
            Then::Close => to.shutdown().await?,
            Then::Hang => {}
            Then::Repeat(bytes, times) => {
                for _ in 0..times {
                    to.write_all(&bytes).await?;
                }
            }
        }
        std::io::Result::Ok(to)
    };
    // Unread bytes would turn the end of the connection into a reset, which discards the bytes sent.
    let reading = async move { tokio::io::copy(&mut from, &mut tokio::io::sink()).await };
    let _ = tokio::join!(sending, reading);
}
