//! Load over HTTP: a workload sent to any endpoint that speaks OpenAI's API, and what came back when.
//!
//! Owns the arguments and the steps from them to a run. [`pace`] says when requests are due, [`body`] writes them,
//! [`client`] sends one and reads its answer, [`drive`] sends all, [`health`] watches whether this process keeps up.
//!
//! Promises that in an open loop a request is sent when it is due, whatever became of others; that one that could not
//! be sent in time is recorded as late, with its times counted from when it was due; that sockets and memory are
//! bounded; and that what goes wrong is a failure with its reason, never a missing record. Leaves percentiles and doubts
//! to [`crate::results`].
//!
//! What it cannot see stays absent: when a router had chosen, what it predicted, and, unless a header says so, which
//! rank served.

pub mod body;
pub mod client;
pub mod drive;
pub mod health;
pub mod pace;
pub mod stream;

use std::fs;
use std::io::{self, Write};
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use clap::builder::RangedU64ValueParser;
use pointsman_trial::workload::trace::TraceError;
use pointsman_trial::workload::{VOCABULARY, Workload};

use crate::record::Run;
use crate::results::{ClientHealth, Facts, Machine, Reporting, ReportingError, facts};
use crate::simulate::{Warmup, write_records};
use crate::source::Source;
use body::{Api, BodyError, Extra, Form};
use client::{Client, ClientError};
use health::Watch;
use pace::Pace;

/// Most connections, and so most requests in flight, unless told otherwise: what a process may usually open.
const CONNECTIONS: u32 = 1_000;

/// Load over HTTP.
#[derive(Args, Clone, Debug)]
pub struct Load {
    /// Where the endpoint is, without its path: http://host:port, or https
    #[arg(long)]
    pub url: String,
    /// The model to ask for
    #[arg(long)]
    pub model: String,
    /// Which of the endpoint's interfaces to use
    #[arg(long, value_enum, default_value_t)]
    pub api: Api,
    /// What to send.
    #[command(flatten)]
    pub source: Source,
    /// When to send it.
    #[command(flatten)]
    pub pace: Pace,
    /// Seed of a generated workload, and of random arrivals
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Requests that only warm caches and count in no figure: a number, or a share of all
    #[arg(long, default_value = "10%")]
    pub warmup: Warmup,
    /// Tokens to ask of every answer, instead of what the workload says
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub output_tokens: Option<u32>,
    /// Token ids of prompts are below this: for models that know fewer
    #[arg(long, value_name = "TOKENS", default_value_t = VOCABULARY, value_parser = clap::value_parser!(u32).range(2..=u64::from(VOCABULARY) as i64))]
    pub vocabulary: u32,
    /// Fields to add to every request, as a JSON object
    ///
    /// '{"ignore_eos": true}' has vLLM and SGLang generate as many tokens as are asked for: without it a model that
    /// ends early makes a lighter workload.
    #[arg(long, value_name = "JSON", default_value = "{}")]
    pub extra_body: Extra,
    /// File with the key to send as `Authorization: Bearer`
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// Seconds that a request may take, whole
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub timeout: u32,
    /// Most requests in flight, each on a connection of its own; one that is due while so many are is sent late
    #[arg(long, value_name = "COUNT", default_value_t = CONNECTIONS, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub connections_max: u32,
    /// Header of answers whose value tells which rank served [default: nobody tells]
    ///
    /// Pointsman's gateway sends none, for clients are not to tell workers apart; engines and other routers may.
    #[arg(long, value_name = "NAME")]
    pub rank_header: Option<String>,
    /// What figures are said to be of [default: the URL]
    #[arg(long, value_name = "NAME")]
    pub label: Option<String>,
    /// Write what became of each request to this file, one JSON object a line, in the workload's order
    #[arg(long, value_name = "FILE")]
    pub records: Option<PathBuf>,
    /// Threads [default: as many as there are cores, up to 4]
    #[arg(long, value_parser = RangedU64ValueParser::<usize>::new().range(1..=256))]
    pub threads: Option<usize>,
    /// How figures are said.
    #[command(flatten)]
    pub reporting: Reporting,
}

/// Why there are no figures.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The trace is broken.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// Nothing is sent.
    #[error("the steps end before the first request is due")]
    NothingDue,
    /// All requests would only warm.
    #[error("warmup takes all of {requests} requests")]
    OnlyWarmup {
        /// Requests that there are.
        requests: usize,
    },
    /// The key's file cannot be read.
    #[error("cannot read the key in {path}: {source}")]
    ApiKey {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Nobody can be asked like this.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// A request cannot be written.
    #[error(transparent)]
    Body(#[from] BodyError),
    /// The system gave no threads.
    #[error("cannot start a runtime of {threads} threads: {source}")]
    Runtime {
        /// How many were asked for.
        threads: usize,
        /// What the system said.
        source: io::Error,
    },
    /// The records cannot be kept.
    #[error("cannot write the records to {path}: {source}")]
    Records {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The figures could not be said, or were not to be.
    #[error(transparent)]
    Reporting(#[from] ReportingError),
}

impl Load {
    /// Sends the workload, on a runtime of its own, and says the figures to `out` and what to doubt to `warnings_out`.
    ///
    /// # Errors
    /// The workload cannot be read or sent, or the figures are not to be said. Requests that fail are figures, not errors.
    pub fn run(&self, out: impl Write, warnings_out: impl Write) -> Result<(), LoadError> {
        let (run, facts) = self.measure()?;
        Ok(self.reporting.finish(&run, &facts, out, warnings_out)?)
    }

    /// Sends the workload, on a runtime of its own.
    ///
    /// # Errors
    /// The workload cannot be read or sent.
    pub fn measure(&self) -> Result<(Run, Facts), LoadError> {
        let workload = self.workload()?;
        let (name, checksum) = (workload.name.clone(), workload.trace_checksum.clone());
        let threads = self.threads.unwrap_or_else(|| health::cores().min(4));
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build();
        let runtime = runtime.map_err(|source| LoadError::Runtime { threads, source })?;
        let (run, client) = runtime.block_on(self.send(workload))?;
        if let Some(path) = &self.records {
            let failed = |source| LoadError::Records { path: path.clone(), source };
            write_records(&run.requests, path).map_err(failed)?;
        }
        let facts = Facts {
            policy: self.label.as_ref().unwrap_or(&self.url).clone(),
            // An endpoint does not say what it predicted.
            consults_index: false,
            workers: 0,
            dp_size: 0,
            seed: self.seed,
            workload: name,
            trace_checksum: checksum,
            command: facts::command_line(),
            machine: Machine::read(),
            commit: facts::commit(),
            limits: self.reporting.limits(),
            client: Some(client),
            series: self.reporting.series,
        };
        Ok((run, facts))
    }

    /// What is sent, and when.
    ///
    /// # Errors
    /// The trace cannot be read, or nothing is left of it to be measured.
    pub fn workload(&self) -> Result<Workload, LoadError> {
        let mut workload = self.pace.apply(self.source.load(self.seed)?, self.seed);
        if let Some(output_tokens) = self.output_tokens {
            workload.requests.iter_mut().for_each(|request| request.output_tokens = output_tokens);
        }
        match workload.requests.len() {
            0 => Err(LoadError::NothingDue),
            requests if self.warmup.of(requests) >= requests => Err(LoadError::OnlyWarmup { requests }),
            _ => Ok(workload),
        }
    }

    /// Sends `workload` and waits for all answers. Wants a runtime with timers and sockets, better of several threads.
    ///
    /// # Errors
    /// No client can be made of the arguments.
    pub async fn send(&self, workload: Workload) -> Result<(Run, ClientHealth), LoadError> {
        let key = self.api_key_file.as_ref().map(|path| {
            let read = fs::read_to_string(path);
            read.map_err(|source| LoadError::ApiKey { path: path.clone(), source })
        });
        let client = Client::new(&client::Target {
            url: &self.url,
            api: self.api,
            api_key: key.transpose()?.as_deref().map(str::trim),
            rank_header: self.rank_header.as_deref(),
            timeout: Duration::from_secs(self.timeout.into()),
            connections_max: self.connections_max,
        })?;
        let form = Form {
            api: self.api,
            model: self.model.clone(),
            vocabulary: self.vocabulary,
            extra: self.extra_body.clone(),
        };
        let watch = Watch::start();
        let connections = NonZeroU32::new(self.connections_max).expect("the parser refuses 0");
        let client = Arc::new(client);
        let ask = |body, clock| {
            let client = Arc::clone(&client);
            async move { client.ask(body, clock).await }
        };
        let warmup = self.warmup.of(workload.requests.len());
        let drive::Driven { requests, itl_us, ended_us } =
            drive::drive(workload, form, connections, warmup, ask).await?;
        let health = watch.end();
        let run = Run {
            requests,
            itl_us,
            rank_samples: Vec::new(),
            ranks: client.ranks(),
            warmup_requests: warmup,
            ended_us,
        };
        Ok((run, health))
    }
}
