//! Listening sockets of a process.
//!
//! An address is reserved when the gateway starts, so that a used one ends it before it does anything else. The socket
//! listens once the gateway can serve.

use std::io;
use std::net::SocketAddr;

use tokio::net::{TcpListener, TcpSocket};

use super::passed::PassedSockets;
use crate::settings::Settings;

/// Backlog length, limited by the system.
const BACKLOG: u32 = 1024;

/// Failure to listen at an address.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// The address belongs to another process.
    #[error(
        "cannot listen at {address}: the address is in use. End the other process, or choose another {setting}. Only a \
         gateway that replaces another one shares its address: both with gateway.reuse_port = true (--reuse-port)"
    )]
    Used {
        /// Listen address.
        address: SocketAddr,
        /// Its setting.
        setting: &'static str,
    },
    /// Another failure.
    #[error("cannot listen at {address}: {error}. Choose another {setting}")]
    System {
        /// Listen address.
        address: SocketAddr,
        /// Its setting.
        setting: &'static str,
        /// System error.
        error: io::Error,
    },
}

/// The sockets of a gateway: for clients, operators and proxies.
pub(crate) struct ReservedSockets {
    clients: Reserved,
    admin: Option<Reserved>,
    picker: Option<Reserved>,
}

impl ReservedSockets {
    pub(crate) fn of(settings: &Settings, passed: &mut PassedSockets) -> Result<Self, ListenError> {
        let reuse_port = settings.gateway.reuse_port;
        let mut reserve = |address, setting| Reserved::of(address, setting, reuse_port, passed);
        let (admin, picker) = (settings.admin.as_ref(), settings.picker.as_ref());
        let reserved = Self {
            clients: reserve(settings.gateway.listen, "gateway.listen (--listen)")?,
            admin: admin.map(|admin| reserve(admin.listen, "admin.listen (--admin-listen)")).transpose()?,
            picker: picker.map(|picker| reserve(picker.listen, "picker.listen")).transpose()?,
        };
        passed.warn_of_unused();
        Ok(reserved)
    }

    /// Listens with all of them.
    pub(crate) fn listen(self) -> Result<(TcpListener, Option<TcpListener>, Option<TcpListener>), ListenError> {
        let Self { clients, admin, picker } = self;
        Ok((clients.listen()?, admin.map(Reserved::listen).transpose()?, picker.map(Reserved::listen).transpose()?))
    }
}

/// A socket that does not listen yet.
pub(crate) struct Reserved {
    address: SocketAddr,
    setting: &'static str,
    socket: Socket,
}

enum Socket {
    /// Passed by the service manager. Connections wait in its backlog.
    Passed(TcpListener),
    Bound(TcpSocket),
}

impl Reserved {
    /// Takes the passed socket of this address, or binds one. With `reuse_port` the kernel distributes new connections
    /// over all processes that listen at the address.
    pub(crate) fn of(
        address: SocketAddr,
        setting: &'static str,
        reuse_port: bool,
        passed: &mut PassedSockets,
    ) -> Result<Self, ListenError> {
        let socket = match passed.take(address) {
            Some(socket) => socket.map(Socket::Passed),
            None => bind(address, reuse_port).map(Socket::Bound),
        };
        match socket {
            Ok(socket) => Ok(Self { address, setting, socket }),
            Err(error) => Err(ListenError::of(address, setting, error)),
        }
    }

    /// Listens.
    pub(crate) fn listen(self) -> Result<TcpListener, ListenError> {
        match self.socket {
            Socket::Passed(listener) => Ok(listener),
            Socket::Bound(socket) => {
                socket.listen(BACKLOG).map_err(|error| ListenError::of(self.address, self.setting, error))
            }
        }
    }
}

impl ListenError {
    pub(crate) fn of(address: SocketAddr, setting: &'static str, error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::AddrInUse => Self::Used { address, setting },
            _ => Self::System { address, setting, error },
        }
    }
}

fn bind(address: SocketAddr, reuse_port: bool) -> io::Result<TcpSocket> {
    let is_shared = reuse_port && address.port() != 0 && socket(address)?.bind(address).is_err();
    let own = socket(address)?;
    own.set_reuseport(reuse_port)?;
    own.bind(address)?;
    if is_shared {
        tracing::warn!(%address, "another process listens at this address too: new connections are shared until it ends");
    }
    Ok(own)
}

fn socket(address: SocketAddr) -> io::Result<TcpSocket> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    // Allows binding while connections of a predecessor linger. The option has another meaning on Windows.
    socket.set_reuseaddr(true)?;
    Ok(socket)
}
