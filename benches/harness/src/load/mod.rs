//! Load generator over HTTP: sends a workload to any endpoint with OpenAI's API and records the responses with their
//! times.
//!
//! Defines the arguments and the execution. [`pace`] determines arrival times, [`body`] serializes requests, [`client`]
//! sends one and reads the response, [`drive`] sends all, [`health`] monitors this process.
//!
//! In an open loop a request is sent at its arrival time, independently of other requests. A request that cannot be
//! sent in time is recorded as late, with its times relative to the arrival time. The numbers of sockets and the memory
//! are bounded. Every error is a recorded failure with its reason; no record is missing. [`crate::results`] computes
//! percentiles and warnings.
//!
//! Facts that a client cannot observe are absent: the time of the routing decision, the router's predictions and,
//! without a response header for it, the serving rank.

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
use client::{Client, ClientError, ClientOptions};
use health::Watch;
use pace::Pace;

/// Default maximum number of connections and therefore of requests in flight; within the usual limit of file
/// descriptors.
const CONNECTIONS: u32 = 1_000;

/// Arguments of the load generator.
#[derive(Args, Clone, Debug)]
pub struct Load {
    /// URL of the endpoint without a path: http://host:port, or https
    #[arg(long)]
    pub url: String,
    /// Name of the model
    #[arg(long)]
    pub model: String,
    /// API of the endpoint to use
    #[arg(long, value_enum, default_value_t)]
    pub api: Api,
    /// Workload arguments.
    #[command(flatten)]
    pub source: Source,
    /// Arrival time arguments.
    #[command(flatten)]
    pub pace: Pace,
    /// Seed of a generated workload and of random arrivals
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Number or share of initial requests that only warm caches and are excluded from all figures
    #[arg(long, default_value = "10%")]
    pub warmup: Warmup,
    /// Number of output tokens of every request, instead of the workload's
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub output_tokens: Option<u32>,
    /// Exclusive upper bound of token ids, for models with a smaller vocabulary
    #[arg(long, value_name = "TOKENS", default_value_t = VOCABULARY, value_parser = clap::value_parser!(u32).range(2..=u64::from(VOCABULARY) as i64))]
    pub vocabulary: u32,
    /// Additional fields of every request, as a JSON object
    ///
    /// '{"ignore_eos": true}' makes vLLM and SGLang generate exactly the requested number of tokens. Without it, a
    /// model that stops early makes the workload lighter.
    #[arg(long, value_name = "JSON", default_value = "{}")]
    pub extra_body: Extra,
    /// File with the key for `Authorization: Bearer`
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// Timeout of a whole request in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub timeout: u32,
    /// Maximum number of requests in flight, each on its own connection; further requests are sent late
    #[arg(long, value_name = "COUNT", default_value_t = CONNECTIONS, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub connections_max: u32,
    /// Response header that identifies the serving rank [default: none]
    ///
    /// Pointsman's gateway does not send one, because clients must not see individual workers. Engines and other
    /// routers may.
    #[arg(long, value_name = "NAME")]
    pub rank_header: Option<String>,
    /// Name of the endpoint in the figures [default: the URL]
    #[arg(long, value_name = "NAME")]
    pub label: Option<String>,
    /// File for the records of all requests, one JSON object per line, in the workload's order
    #[arg(long, value_name = "FILE")]
    pub records: Option<PathBuf>,
    /// Number of threads [default: number of cores, up to 4]
    #[arg(long, value_parser = RangedU64ValueParser::<usize>::new().range(1..=256))]
    pub threads: Option<usize>,
    /// Output arguments.
    #[command(flatten)]
    pub reporting: Reporting,
}

/// Errors of a load run.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The trace is invalid.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// No request is due before the end of the steps.
    #[error("the steps end before the first request is due")]
    NothingDue,
    /// All requests would belong to the warm-up.
    #[error("warmup covers all {requests} requests")]
    OnlyWarmup {
        /// Number of requests.
        requests: usize,
    },
    /// The key file cannot be read.
    #[error("cannot read the key in {path}: {source}")]
    ApiKey {
        /// Path of the file.
        path: PathBuf,
        /// Error from the operating system.
        source: io::Error,
    },
    /// The client cannot be created.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// A request body cannot be serialized.
    #[error(transparent)]
    Body(#[from] BodyError),
    /// The runtime could not be started.
    #[error("cannot start a runtime of {threads} threads: {source}")]
    Runtime {
        /// Requested number of threads.
        threads: usize,
        /// Error from the operating system.
        source: io::Error,
    },
    /// The records cannot be written.
    #[error("cannot write the records to {path}: {source}")]
    Records {
        /// Path of the file.
        path: PathBuf,
        /// Error from the operating system.
        source: io::Error,
    },
    /// The figures could not be written or were rejected by `--strict`.
    #[error(transparent)]
    Reporting(#[from] ReportingError),
}

impl Load {
    /// Sends the workload on its own runtime and writes figures to `out` and warnings to `warnings_out`.
    ///
    /// # Errors
    /// The workload cannot be read or sent, or the figures are rejected or cannot be written. Failed requests are part
    /// of the figures and no errors.
    pub fn run(&self, out: impl Write, warnings_out: impl Write) -> Result<(), LoadError> {
        let (run, facts) = self.measure()?;
        Ok(self.reporting.finish(&run, &facts, out, warnings_out)?)
    }

    /// Sends the workload on its own runtime and returns the run.
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
            // An endpoint does not report its predictions.
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

    /// The workload with its final arrival times and output lengths.
    ///
    /// # Errors
    /// The trace cannot be read, or no request remains for the measurement.
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

    /// Sends `workload` and waits for all responses. Requires a runtime with timers and sockets, preferably with
    /// several threads.
    ///
    /// # Errors
    /// The arguments of the client are invalid.
    pub async fn send(&self, workload: Workload) -> Result<(Run, ClientHealth), LoadError> {
        let key = self.api_key_file.as_ref().map(|path| {
            let read = fs::read_to_string(path);
            read.map_err(|source| LoadError::ApiKey { path: path.clone(), source })
        });
        let client = Client::new(&ClientOptions {
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
        let exchange = |body, clock| {
            let client = Arc::clone(&client);
            async move { client.exchange(body, clock).await }
        };
        let warmup = self.warmup.of(workload.requests.len());
        let drive::Driven { requests, itl_us, ended_us } =
            drive::drive(workload, form, connections, warmup, exchange).await?;
        let health = watch.end();
        let run = Run {
            requests,
            itl_us,
            rank_samples: Vec::new(),
            ranks: client.ranks(),
            warmup_requests: warmup,
            ended_us,
            preemptions: None,
        };
        Ok((run, health))
    }
}
