//! Listening sockets that a service manager passes to the process (`LISTEN_FDS`).
//!
//! A socket belongs to the listener with its address. The service manager keeps the socket open, and several processes
//! may hold it, so a restart refuses no connection: until some process accepts, connections wait in the backlog.

use std::io;
use std::net::SocketAddr;

use listenfd::ListenFd;
use tokio::net::TcpListener;

/// Passed sockets without a listener yet.
#[derive(Debug, Default)]
pub(crate) struct PassedSockets(Vec<(SocketAddr, std::net::TcpListener)>);

impl PassedSockets {
    /// Takes the sockets of the process. To be called before other threads run, because it changes the environment.
    ///
    /// # Errors
    /// A passed descriptor is not a listening TCP socket.
    pub(crate) fn of_process() -> io::Result<Self> {
        let mut passed = ListenFd::from_env();
        let mut sockets = Vec::with_capacity(passed.len());
        for n in 0..passed.len() {
            if let Some(socket) = passed.take_tcp_listener(n)? {
                sockets.push((socket.local_addr()?, socket));
            }
        }
        Ok(Self(sockets))
    }

    /// The socket of a listener with this address; `None` if it must bind one itself.
    pub(crate) fn take(&mut self, address: SocketAddr) -> Option<io::Result<TcpListener>> {
        let position = self.0.iter().position(|(passed, _)| is_same(*passed, address))?;
        let (_, socket) = self.0.swap_remove(position);
        Some(socket.set_nonblocking(true).and_then(|()| TcpListener::from_std(socket)))
    }

    /// Logs the sockets without a listener. Clients that connect to them get no response.
    pub(crate) fn warn_of_unused(&self) {
        for (address, _) in &self.0 {
            tracing::warn!(%address, "the service manager passed a socket with the address of no listener");
        }
    }
}

/// Whether the addresses are equal. All unspecified addresses count as equal, because systemd listens on `[::]` if only
/// a port is given.
fn is_same(passed: SocketAddr, address: SocketAddr) -> bool {
    passed == address
        || passed.port() == address.port() && passed.ip().is_unspecified() && address.ip().is_unspecified()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unspecified_addresses_are_equal() {
        let same =
            |passed: &str, address: &str| is_same(passed.parse().expect("valid"), address.parse().expect("valid"));
        assert!(same("127.0.0.1:80", "127.0.0.1:80") && same("[::]:80", "0.0.0.0:80"));
        assert!(
            !same("127.0.0.1:80", "127.0.0.1:81") && !same("[::]:80", "127.0.0.1:80") && !same("[::]:80", "[::]:81")
        );
    }
}
