//! Listening sockets.
//!
//! Sets `SO_REUSEPORT`, so that a gateway can start while a draining one of the same user listens on the same address,
//! and logs the sharing.

use std::io;
use std::net::SocketAddr;

use tokio::net::{TcpListener, TcpSocket};

/// Backlog length, limited by the system.
const BACKLOG: u32 = 1024;

/// Binds a listening socket. If two processes listen on `address`, the kernel distributes new connections over them.
pub(crate) fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let is_shared = address.port() != 0 && socket(address)?.bind(address).is_err();
    let own = socket(address)?;
    #[cfg(all(unix, not(any(target_os = "solaris", target_os = "illumos"))))]
    own.set_reuseport(true)?;
    own.bind(address)?;
    let listener = own.listen(BACKLOG)?;
    if is_shared {
        tracing::warn!(%address, "another process listens at this address too: new connections are shared until it ends");
    }
    Ok(listener)
}

fn socket(address: SocketAddr) -> io::Result<TcpSocket> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    // Allows binding while connections of a predecessor linger. The option has another meaning on Windows.
    #[cfg(unix)]
    socket.set_reuseaddr(true)?;
    Ok(socket)
}
