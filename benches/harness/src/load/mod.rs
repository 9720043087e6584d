//! Load generator over HTTP: sends a workload to any endpoint with OpenAI's API and records the responses with their
//! times.
//!
//! Defines the arguments and the execution. [`pace`] determines arrival times, [`body`] serializes requests, and [`drive`]
//! has the clients, which send them by [`pointsman_trial::driver`].
//!
//! In an open loop a request is sent at its arrival time, independently of other requests. A request that cannot be
//! sent in time is recorded as late, with its times relative to the arrival time. The numbers of sockets and the memory
//! are bounded. Every error is a recorded failure with its reason; no record is missing. [`crate::results`] computes
//! percentiles and warnings.
//!
//! Facts that a client cannot observe are absent: the time of the routing decision, the router's predictions and,
//! without a response header for it, the serving rank.

pub mod body;
pub mod drive;
pub mod pace;

use std::fs;
use std::io::Write;
use std::num::{NonZero, NonZeroU32};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::available_parallelism;
use std::time::Duration;

use clap::Args;
use clap::builder::RangedU64ValueParser;
use hyper::Uri;
use pointsman_trial::driver::{Answer, ClientOptions, HttpClient, TimerLag};
use pointsman_trial::workload::{VOCABULARY, Workload};

use crate::measure::{Stopwatch, process_cpu};
use crate::results::distribution::nearest_rank;
use crate::results::{ClientHealth, Facts, Reporting, Run, Warmup};
use crate::source::Source;
use crate::{Failed, unusable};
use body::{Api, Extra, Form};
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
    /// Number of threads [default: number of cores, up to 4]
    #[arg(long, value_parser = RangedU64ValueParser::<usize>::new().range(1..=256))]
    pub threads: Option<usize>,
    /// Output arguments.
    #[command(flatten)]
    pub reporting: Reporting,
}

impl Load {
    /// Sends the workload on its own runtime and writes figures to `out` and warnings to `warnings_out`.
    ///
    /// # Errors
    /// The workload cannot be read or sent, or the figures are rejected or cannot be written. Failed requests are part
    /// of the figures and no errors.
    pub fn run(&self, out: impl Write, warnings_out: impl Write) -> Result<(), Failed> {
        let workload = self.workload()?;
        let policy = self.label.as_ref().unwrap_or(&self.url).clone();
        let facts = self.reporting.facts(policy, self.seed, &workload);
        let runtime = crate::runtime(self.threads.unwrap_or_else(|| cores().min(4)))?;
        let (run, client) = runtime.block_on(self.send(workload))?;
        let facts = Facts { client: Some(client), ..facts };
        self.reporting.finish(&run, &facts, out, warnings_out)
    }

    /// The workload with its final arrival times and output lengths.
    ///
    /// # Errors
    /// The trace cannot be read, or no request remains for the measurement.
    pub fn workload(&self) -> Result<Workload, Failed> {
        let mut workload = self.pace.apply(self.source.load(self.seed)?, self.seed);
        if let Some(output_tokens) = self.output_tokens {
            workload.requests.iter_mut().for_each(|request| request.output_tokens = output_tokens);
        }
        let requests = workload.requests.len();
        if self.warmup.of(requests) >= requests {
            return Err(format!("warmup covers all {requests} requests").into());
        }
        Ok(workload)
    }

    /// Sends `workload` and waits for all responses. Requires a runtime with timers and sockets, preferably with
    /// several threads.
    ///
    /// # Errors
    /// The arguments of the client are invalid.
    pub async fn send(&self, workload: Workload) -> Result<(Run, ClientHealth), Failed> {
        let uri = self.uri()?;
        let key = self
            .api_key_file
            .as_deref()
            .map(|path| fs::read_to_string(path).map_err(unusable("read the key in", path)));
        let client = HttpClient::new(&ClientOptions {
            has_tls: uri.scheme_str() == Some("https"),
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
        let (lag, wall, cpu) = (TimerLag::start(), Stopwatch::start(), process_cpu());
        let connections = NonZeroU32::new(self.connections_max).expect("the parser refuses 0");
        let client = Arc::new(client);
        let sender = Arc::clone(&client);
        let exchange = move |body: Vec<u8>, clock| {
            let (client, uri) = (Arc::clone(&sender), uri.clone());
            async move { client.exchange(&uri, body.into(), clock, Answer::default()).await }
        };
        let warmup = self.warmup.of(workload.requests.len());
        let drive::Driven { requests, itl_us, ended_us } =
            drive::drive(workload, form, connections, warmup, exchange).await?;
        let mut lags_us: Vec<u64> = lag.end().iter().map(|lag| lag.as_micros() as u64).collect();
        lags_us.sort_unstable();
        let cpu = (process_cpu() - cpu).as_secs_f64();
        let health = ClientHealth {
            cpu_share: cpu / wall.elapsed().as_secs_f64().max(1e-9) / cores() as f64,
            lag_p99_us: nearest_rank(&lags_us, 99).unwrap_or_default(),
        };
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

    fn uri(&self) -> Result<Uri, Failed> {
        let uri = format!("{}{}", self.url.trim_end_matches('/'), self.api.path()).parse::<Uri>().ok();
        let is_http = |uri: &Uri| matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some();
        let invalid = || format!("{:?} is not a URL such as http://127.0.0.1:8000", self.url);
        Ok(uri.filter(is_http).ok_or_else(invalid)?)
    }
}

/// Number of cores available to this process; 1 if unknown.
fn cores() -> usize {
    available_parallelism().map_or(1, NonZero::get)
}
