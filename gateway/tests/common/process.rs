//! A process of `pointsman serve`, killed when its test ends.

use std::net::SocketAddr;
use std::process::{ExitStatus, Stdio};

use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::time::timeout;

use super::proxy::PATIENCE;

/// `pointsman serve` without environment variables, with a log of JSON lines.
pub(crate) fn serve() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
    command.env_clear().args(["serve", "--log-format", "json"]);
    command
}

pub(crate) struct Process {
    pub(crate) child: Child,
    /// Address of the client listener.
    pub(crate) address: SocketAddr,
    /// Address of the admin listener, if enabled.
    pub(crate) admin: Option<SocketAddr>,
    /// Log lines until the gateway listened.
    pub(crate) startup: Vec<String>,
    /// Later log lines, read continuously so that the process never blocks on its log.
    log: UnboundedReceiver<String>,
}

impl Process {
    /// Starts the process and waits until it listens.
    pub(crate) async fn start(command: Command) -> Self {
        Self::start_with(command, Stdio::null(), Stdio::null()).await
    }

    /// As [`Self::start`], with this standard input and output.
    pub(crate) async fn start_with(mut command: Command, input: Stdio, output: Stdio) -> Self {
        command.stdin(input).stdout(output).stderr(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().expect("the program exists");
        let mut lines = BufReader::new(child.stderr.take().expect("stream is piped")).lines();
        let (sender, mut log) = unbounded_channel();
        tokio::spawn(async move {
            while let Ok(Some(line)) = lines.next_line().await {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        let mut startup = Vec::new();
        let line = message(&mut log, "\"message\":\"listening\"", &mut startup).await;
        let address = |field: &str| Some(line[field].as_str()?.parse().expect("an address"));
        let (address, admin) = (address("address").expect("an address for clients"), address("admin_address"));
        Self { child, address, admin, startup, log }
    }

    /// Sends a signal, named without `SIG`.
    pub(crate) fn signal(&self, name: &str) {
        let id = self.child.id().expect("process is running").to_string();
        let sent = std::process::Command::new("kill").args(["-s", name, &id]).status().expect("kill exists");
        assert!(sent.success());
    }

    /// The next log line that contains this text.
    pub(crate) async fn logged(&mut self, text: &str) -> Value {
        message(&mut self.log, text, &mut Vec::new()).await
    }

    /// All lines from the start to the first later one that contains this text.
    pub(crate) async fn until_line(mut self, text: &str) -> Vec<String> {
        let mut lines = std::mem::take(&mut self.startup);
        message(&mut self.log, text, &mut lines).await;
        lines
    }

    pub(crate) async fn exit(mut self) -> ExitStatus {
        timeout(PATIENCE, self.child.wait()).await.expect("end before the timeout").expect("exit status")
    }
}

async fn message(log: &mut UnboundedReceiver<String>, text: &str, before: &mut Vec<String>) -> Value {
    loop {
        let line =
            timeout(PATIENCE, log.recv()).await.unwrap_or_else(|_| panic!("no line {text:?} before the timeout"));
        let Some(line) = line else { panic!("the process ended without a line {text:?}: {before:?}") };
        before.push(line.clone());
        if line.contains(text) {
            return serde_json::from_str(&line).expect("JSON");
        }
    }
}
