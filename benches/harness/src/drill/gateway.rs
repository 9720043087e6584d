//! Process of a gateway, its log, its metrics page and its reports.

use std::fs::{self, File};
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use pointsman_trial::driver::HttpClient;
use serde_json::Value;

use super::traffic::{self, CACHEABLE_TOKENS};
use crate::{Failed, unusable};

/// Token of the administration listeners.
const TOKEN: &str = "drill-0123456789";

/// Timeout of the first token of a stream, and of each further one. It is far above the latency of the mock engines, and
/// a request with a retry stays within the timeout of its client.
const ENGINE_TIMEOUT_MS: u32 = 4_000;

/// Runs a program until it is dropped, with its output in a file.
#[derive(Debug)]
pub(super) struct Process {
    child: Child,
    log: PathBuf,
}

impl Process {
    pub(super) fn start(mut command: Command, log: PathBuf) -> Result<Self, Failed> {
        let output = File::create(&log)?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(output);
        let program = PathBuf::from(command.get_program());
        let child = command.spawn().map_err(unusable("start", &program))?;
        Ok(Self { child, log })
    }

    /// First complete line of the log that contains `text`.
    pub(super) fn logged(&mut self, text: &str) -> Result<Option<String>, Failed> {
        let log = fs::read_to_string(&self.log)?;
        let found = log.split_inclusive('\n').find(|line| line.ends_with('\n') && line.contains(text));
        match found {
            Some(line) => Ok(Some(line.to_owned())),
            None if self.child.try_wait()?.is_some() => {
                Err(format!("a process ended early, with this log:\n{log}").into())
            }
            None => Ok(None),
        }
    }
}

impl Drop for Process {
    /// Sends SIGKILL.
    fn drop(&mut self) {
        // Errors mean that it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// One gateway over all its lives.
#[derive(Debug)]
pub(super) struct Gateway {
    name: String,
    program: PathBuf,
    settings: Vec<String>,
    engines: Vec<String>,
    directory: PathBuf,
    lives: u32,
    process: Option<Process>,
    http: HttpClient,
    /// Listeners for clients, operators and replicas.
    pub(super) address: Option<SocketAddr>,
    admin: Option<SocketAddr>,
}

impl Gateway {
    pub(super) fn new(
        n: usize,
        program: &Path,
        directory: &Path,
        engines: Vec<String>,
        config: &str,
    ) -> Result<Self, Failed> {
        let name = format!("gateway-{n}");
        let directory = directory.join(&name);
        fs::create_dir_all(&directory)?;
        let token_file = directory.join("token");
        fs::write(&token_file, TOKEN)?;
        fs::write(directory.join("config.toml"), config)?;
        let settings = vec![
            format!("gateway.snapshot_path={}", directory.display()),
            format!("router.block_size={}", super::traffic::BLOCK_SIZE),
            "admin.listen=127.0.0.1:0".to_owned(),
            format!("admin.token_file={}", token_file.display()),
            format!("gateway.first_byte_timeout_ms={ENGINE_TIMEOUT_MS}"),
            format!("gateway.idle_timeout_ms={ENGINE_TIMEOUT_MS}"),
            format!("gateway.answer_timeout_ms={}", 2 * ENGINE_TIMEOUT_MS),
        ];
        Ok(Self {
            name,
            program: program.to_owned(),
            settings,
            engines,
            directory,
            lives: 0,
            process: None,
            http: traffic::http(Some(TOKEN))?,
            address: None,
            admin: None,
        })
    }

    /// Starts the next life. It is not listening yet.
    pub(super) fn start(&mut self) -> Result<(), Failed> {
        self.lives += 1;
        let mut command = Command::new(&self.program);
        command.env_clear().args(["serve", "--log-format", "json", "--listen", "127.0.0.1:0", "--model", "mock"]);
        command.arg("--config").arg(self.directory.join("config.toml"));
        for engine in &self.engines {
            command.args(["--worker", engine]);
        }
        let access_log = format!("gateway.access_log={}", self.access_log().display());
        for setting in self.settings.iter().chain([&access_log]) {
            command.args(["--set", setting]);
        }
        self.process = Some(Process::start(command, self.directory.join(format!("log-{}", self.lives)))?);
        Ok(())
    }

    /// Whether it listens to clients.
    pub(super) fn listens(&mut self) -> Result<bool, Failed> {
        let line = self.logged("\"message\":\"listening\"")?;
        let address = |field: &str| line.as_ref().and_then(|line| address_in(line, field));
        (self.address, self.admin) = (address("address"), address("admin_address"));
        Ok(self.address.is_some())
    }

    /// Its listener for other replicas, once it has started.
    pub(super) fn replicas_address(&mut self) -> Result<Option<SocketAddr>, Failed> {
        Ok(self.logged("\"message\":\"replicas started\"")?.and_then(|line| address_in(&line, "address")))
    }

    fn logged(&mut self, text: &str) -> Result<Option<String>, Failed> {
        self.process.as_mut().map_or(Ok(None), |process| process.logged(text))
    }

    /// Ends it by SIGKILL.
    pub(super) fn kill(&mut self) {
        (self.process, self.address, self.admin) = (None, None, None);
    }

    pub(super) fn is_running(&self) -> bool {
        self.process.is_some()
    }

    pub(super) async fn is_ready(&self) -> bool {
        self.get(self.address, "/ready").await.is_ok()
    }

    /// Sums of the samples of metrics that contain `name`, by their names and labels.
    pub(super) async fn metrics(&self, name: &str) -> Result<Vec<(String, f64)>, Failed> {
        Ok(samples(&self.get(self.admin, "/metrics").await?, name))
    }

    /// Active blocks over all ranks, of all replicas as it counts them.
    pub(super) async fn active_blocks(&self) -> Result<u64, Failed> {
        let text = self.get(self.admin, "/admin/models/mock/loads").await?;
        let loads: Value = serde_json::from_str(&text).map_err(|error| self.error(&error.to_string()))?;
        let ranks = loads["ranks"].as_array().ok_or_else(|| self.error(&text))?;
        ranks.iter().map(|rank| rank["active_blocks"].as_u64().ok_or_else(|| self.error(&text))).sum()
    }

    async fn get(&self, address: Option<SocketAddr>, path: &str) -> Result<String, Failed> {
        let address = address.ok_or_else(|| self.error("it does not listen"))?;
        let response = self.http.fetch(&format!("http://{address}{path}").parse()?, None).await;
        let (status, body) = response.map_err(|error| self.error(&error.to_string()))?;
        let body = String::from_utf8_lossy(&body).into_owned();
        if status == 200 { Ok(body) } else { Err(self.error(&format!("{path}: status {status}: {body}"))) }
    }

    fn error(&self, reason: &str) -> Failed {
        format!("no report of {}: {reason}", self.name).into()
    }

    fn access_log(&self) -> PathBuf {
        self.directory.join(format!("access-{}", self.lives))
    }

    /// Blind decisions and all decisions of this life from `from` on; none until all are logged.
    pub(super) fn blind(&self, from: u64, to: u64) -> Result<Option<Blind>, Failed> {
        let log = fs::read_to_string(self.access_log()).or_else(|error| match error.kind() {
            io::ErrorKind::NotFound => Ok(String::new()),
            _ => Err(error),
        })?;
        if log.lines().count() < usize::try_from(to).unwrap_or(usize::MAX) || !log.ends_with('\n') {
            return Ok(None);
        }
        let (from, to) = (usize::try_from(from).unwrap_or(usize::MAX), usize::try_from(to).unwrap_or(usize::MAX));
        Ok(Some(Blind::count(log.lines().skip(from).take(to.saturating_sub(from)))))
    }
}

/// Decisions about prompts that some rank has cached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Blind {
    pub(super) decisions: u32,
    /// Decisions with less than the complete prefix as predicted hit, whatever the reason.
    pub(super) blind: u32,
}

impl Blind {
    fn count<'a>(lines: impl Iterator<Item = &'a str>) -> Self {
        let mut blind = Self::default();
        for line in lines {
            let predicted = serde_json::from_str::<Value>(line).ok();
            let predicted = predicted.and_then(|line| line["predicted_cached_tokens"].as_u64()).unwrap_or(0);
            blind.decisions += 1;
            blind.blind += u32::from(predicted < CACHEABLE_TOKENS);
        }
        blind
    }

    /// In percent.
    pub(super) fn share(self) -> f64 {
        100.0 * f64::from(self.blind) / f64::from(self.decisions.max(1))
    }
}

fn address_in(line: &str, field: &str) -> Option<SocketAddr> {
    serde_json::from_str::<Value>(line).ok()?[field].as_str()?.parse().ok()
}

fn samples(page: &str, name: &str) -> Vec<(String, f64)> {
    let lines = page.lines().filter(|line| !line.starts_with('#') && line.contains(name));
    lines
        .filter_map(|line| line.rsplit_once(' '))
        .filter_map(|(key, value)| Some((key.to_owned(), value.parse().ok()?)))
        .collect()
}
