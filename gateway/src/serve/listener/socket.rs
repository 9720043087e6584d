//! Listening sockets.
//!
//! Owns how an address is bound. Promises that a gateway can start while another one of the same user still drains at the
//! same addresses (`SO_REUSEPORT`), and that sharing an address is logged. Leaves accepting to the listener.

use std::io;
use std::net::SocketAddr;

use tokio::net::{TcpListener, TcpSocket};

/// Connections that wait to be accepted, as far as the system allows.
const BACKLOG: u32 = 1024;

/// A socket that listens at `address`. While two processes listen there, the system gives each new connection to either.
pub(crate) fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let is_shared = address.port() != 0 && socket(address)?.bind(address).is_err();
    let own = socket(address)?;
    #[cfg(all(unix, not(any(target_os = "solaris", target_os = "illumos"))))]
    own.set_reuseport(true)?;
    own.bind(address)?;
    let listener = own.listen(BACKLOG)?;
    if is_shared {
        tracing::warn!(%address, "another process listens at this address too: until it ends, each gets a share of new connections");
    }
    Ok(listener)
}

fn socket(address: SocketAddr) -> io::Result<TcpSocket> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    // Connections of a predecessor that wait for their end are in nobody's way. On Windows the option means something else.
    #[cfg(unix)]
    socket.set_reuseaddr(true)?;
    Ok(socket)
}
