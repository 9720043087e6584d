//! A NATS server with JetStream on loopback, for the transport of replicas.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Command;

use tokio::net::TcpStream;

use super::fleet::{Scratch, until};
use super::gateway::Process;
use crate::Failed;

/// A server that may be stopped and started again on its port.
pub(super) struct NatsServer {
    program: PathBuf,
    port: u16,
    running: Option<Process>,
    scratch: Scratch,
}

impl NatsServer {
    /// A server on a free port, not started.
    pub(super) fn new(program: &Path) -> Result<Self, Failed> {
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
        Ok(Self { program: program.to_owned(), port, running: None, scratch: Scratch::create()? })
    }

    pub(super) fn address(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port).into()
    }

    /// Starts the server and waits until it listens.
    pub(super) async fn start(&mut self) -> Result<(), Failed> {
        let mut command = Command::new(&self.program);
        command.args(["-js", "-a", "127.0.0.1", "-p", &self.port.to_string(), "-sd"]).arg(self.scratch.path());
        self.running = Some(Process::start(command, self.scratch.path().join("log"))?);
        let address = self.address();
        until("the NATS server", async || Ok(TcpStream::connect(address).await.is_ok())).await?;
        Ok(())
    }

    /// Kills the server.
    pub(super) fn stop(&mut self) {
        self.running = None;
    }
}
