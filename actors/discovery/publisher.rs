//! Check whether a ZeroMQ publisher listens at an address.
//!
//! Connects, completes the handshake as a subscriber without subscriptions, and closes. Receives no messages.

use std::io::{self, ErrorKind};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::zmtp::{HANDSHAKE_BYTES_MAX, PeerSocket, peer_socket, subscriber_hello};

/// What listens at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Listener {
    /// A publisher.
    Publisher,
    /// Nothing, or something else.
    Other,
    /// No result within the time, or no connection for another reason than a refusal.
    Unknown,
}

/// What listens at an endpoint of the form `tcp://HOST:PORT`. Cancel-safe.
pub(super) async fn listener_at(endpoint: &str, timeout: Duration) -> Listener {
    let Some(address) = endpoint.strip_prefix("tcp://") else { return Listener::Other };
    match tokio::time::timeout(timeout, socket_at(address)).await {
        Ok(Ok(PeerSocket::Publisher)) => Listener::Publisher,
        Ok(Ok(PeerSocket::Other | PeerSocket::Incomplete)) => Listener::Other,
        Ok(Err(error)) if closes(error.kind()) => Listener::Other,
        Ok(Err(_)) | Err(_) => Listener::Unknown,
    }
}

/// Whether the address is reachable and the error is the answer.
fn closes(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::ConnectionRefused | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe)
}

async fn socket_at(address: &str) -> io::Result<PeerSocket> {
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(&subscriber_hello()).await?;
    let mut received = Vec::with_capacity(HANDSHAKE_BYTES_MAX);
    loop {
        let room = (HANDSHAKE_BYTES_MAX - received.len()) as u64;
        let is_end = (&mut stream).take(room).read_buf(&mut received).await? == 0;
        match peer_socket(&received) {
            Ok(PeerSocket::Incomplete) if !is_end => {}
            Ok(socket) => return Ok(socket),
            Err(_) => return Ok(PeerSocket::Other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    #[cfg(feature = "zmq")]
    #[tokio::test]
    async fn a_zeromq_publisher_is_found() {
        use zeromq::{Socket as _, SocketRecv as _, SocketSend as _};
        let mut publisher = zeromq::PubSocket::new();
        let endpoint = publisher.bind("tcp://127.0.0.1:0").await.expect("a port").to_string();
        for _ in 0..3 {
            assert_eq!(listener_at(&endpoint, PATIENCE).await, Listener::Publisher);
        }
        // It still serves subscribers.
        let mut subscriber = zeromq::SubSocket::new();
        subscriber.connect(&endpoint).await.expect("connected");
        subscriber.subscribe("").await.expect("subscribed");
        let received = async {
            loop {
                let message = "event".into();
                publisher.send(message).await.expect("sent");
                if let Ok(message) = tokio::time::timeout(Duration::from_millis(10), subscriber.recv()).await {
                    return message.expect("received");
                }
            }
        };
        let message = tokio::time::timeout(PATIENCE, received).await.expect("the event arrives");
        assert_eq!(message.get(0).map(|frame| &frame[..]), Some(&b"event"[..]));
        let mut router = zeromq::RouterSocket::new();
        let endpoint = router.bind("tcp://127.0.0.1:0").await.expect("a port").to_string();
        assert_eq!(listener_at(&endpoint, PATIENCE).await, Listener::Other, "a replay socket");
    }
}
