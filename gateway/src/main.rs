//! The `pointsman` command: command line, configuration file and environment.
//!
//! Exits with 0 on success and with 2 for invalid input; [`app::run`] has further exit codes. The library implements
//! the commands.

mod command;

use std::ffi::OsString;
use std::fs::{self, File};
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use clap::builder::PossibleValuesParser;
use clap::error::{ContextKind, ContextValue};
use clap::{Args, Parser, Subcommand};
use pointsman::policy::Policy;
use pointsman_gateway::app;
use pointsman_gateway::app::replay::{ReplayArgs, replay_decisions};
use pointsman_gateway::app::top::{self, TopArgs};
use pointsman_gateway::net::certificates::Certificate;
use pointsman_gateway::net::limits::ProcessLimits;
use pointsman_gateway::settings::{ConfigFile, Flag, LoadError, LoadErrors, Loaded, LogFormat, Secrets, Sources};
use pointsman_trial::demo::{Demo, DemoConfig, Progress};
use pointsman_trial::mock::{MockConfig, MockEngine};

use command::demo::OneModel;
use command::output::{Stop, ended, print, print_error};

/// After a burst of small requests, the allocator of glibc keeps all of their memory; jemalloc needs `make` to be built.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// A `serve` command that works, for the error without arguments.
const EXAMPLE: &str = "pointsman serve --model Qwen/Qwen3-8B --worker http://127.0.0.1:8000";

/// Flags of other servers, with those of `serve` that have their effect.
const FOREIGN_FLAGS: [(&str, &str); 6] = [
    ("--port", "--listen"),
    ("--host", "--listen"),
    ("--bind", "--listen"),
    ("--block-size", "--set router.block_size=16"),
    ("--kv-block-size", "--set router.block_size=16"),
    ("--api-key", "--worker-api-key-file FILE"),
];

/// Routes each LLM request to the engine rank with the lowest expected cost.
#[derive(Debug, Parser)]
#[command(name = "pointsman", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Prints the version and exits.
    Version,
    /// Runs the gateway: OpenAI's API in front of engines.
    #[command(after_help = SERVE_HELP)]
    Serve(Box<SettingsArgs>),
    /// Checks the arguments of `serve` and prints every effective setting with its origin: file, environment, flag or
    /// default. On errors prints all problems and exits with 2.
    CheckConfig(Box<SettingsArgs>),
    /// Runs an LLM engine without a GPU: it answers OpenAI requests with generated tokens in modelled time and
    /// publishes KV events of its prefix cache like vLLM or SGLang. Ends on Ctrl-C.
    MockEngine(Box<MockConfig>),
    /// Decides recorded decisions again, from files that the gateway has written (gateway.decision_path), and compares each
    /// choice bit for bit. Exits with 1 if a choice differs from the recorded one.
    ReplayDecisions(ReplayArgs),
    /// Measures cache-aware routing: four mock engines of two ranks and the gateway serve the same requests round robin
    /// and with the default policy, then a table follows. Takes less than a minute. Exits with 1 if requests failed.
    Demo(DemoConfig),
    /// Prints the state of a running gateway: the live page of its administration listener. `watch pointsman top ...`
    /// refreshes it.
    Top(TopArgs),
}

/// Sources of settings: flags override variables, and variables override the file.
#[derive(Debug, Args)]
struct SettingsArgs {
    /// TOML configuration file.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Serves a model of this name without a file.
    #[arg(long, value_name = "NAME", requires = "worker")]
    model: Option<String>,
    /// Address of an engine of that model, which is probed for its configuration. Repeatable.
    #[arg(long, value_name = "URL", requires = "model", value_parser = worker_url)]
    worker: Vec<String>,
    /// File with the API key of the engines, for every request to them (gateway.worker_api_key_file).
    #[arg(long, value_name = "FILE")]
    worker_api_key_file: Option<String>,
    /// PEM file with the CA bundle for engines at https:// addresses (gateway.worker_ca_file).
    #[arg(long, value_name = "FILE")]
    worker_ca_file: Option<String>,
    /// PEM file of the certificate for engines that require one (gateway.worker_certificate_file).
    #[arg(long, value_name = "FILE")]
    worker_certificate_file: Option<String>,
    /// PEM file of its private key (gateway.worker_key_file).
    #[arg(long, value_name = "FILE")]
    worker_key_file: Option<String>,
    /// The tokenizer.json of that model (tokens.tokenizer_file). Without it the engines tokenize, if they can.
    #[arg(long, value_name = "FILE", requires = "model")]
    tokenizer: Option<String>,
    /// Chat template of that model: a Jinja file or a tokenizer_config.json (tokens.chat_template_file).
    #[arg(long, value_name = "FILE", requires = "model")]
    chat_template: Option<String>,
    /// Routing policy (router.policy) [default: latency].
    #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(Policy::ALL.map(Policy::name)))]
    policy: Option<String>,
    /// Listen address for clients (gateway.listen): IP:PORT, or a port of 127.0.0.1.
    #[arg(long, value_name = "ADDR")]
    listen: Option<String>,
    /// Shares the listen addresses with another gateway that runs, to replace it (gateway.reuse_port).
    #[arg(long)]
    reuse_port: bool,
    /// Listen address for operators (admin.listen).
    #[arg(long, value_name = "ADDR")]
    admin_listen: Option<String>,
    /// File with the token of operators (admin.token_file).
    #[arg(long, value_name = "FILE")]
    admin_token_file: Option<String>,
    /// Log level (gateway.log_level).
    #[arg(long, value_name = "LEVEL")]
    log_level: Option<String>,
    /// Log format: text or json (gateway.log_format).
    #[arg(long, value_name = "FORMAT")]
    log_format: Option<String>,
    /// OpenTelemetry collector for traces, OTLP over gRPC: http://HOST:PORT (gateway.otlp_endpoint).
    #[arg(long, value_name = "URL")]
    otlp_endpoint: Option<String>,
    /// Enables the endpoint picker with the headers of the Gateway API Inference Extension's conformance suite
    /// (picker.conformance=true). Clients can then bypass its choice.
    #[arg(long)]
    conformance: bool,
    /// Any other setting of gateway, admin, picker, replicas or router, such as router.block_size=16, and of the model
    /// above, such as tokens.source=engine or model.messages=pass. Repeatable.
    #[arg(long, value_name = "SECTION.KEY=VALUE", value_parser = setting_and_value)]
    set: Vec<(String, String)>,
}

/// Advice below the flags of `serve`.
const SERVE_HELP: &str = "\
Example:
  pointsman serve --model Qwen/Qwen3-8B --worker http://127.0.0.1:8000 --worker http://127.0.0.1:8001

Tokens:    --tokenizer FILE computes them here. Without it each prompt is sent to /tokenize of an engine first.
KV events: read from engines that report where they publish them. For others name the endpoints in a file (kv_events of
           a worker), or predict their caches from routing decisions: --set router.events.mode=auto

check-config takes the same arguments and prints all settings with their defaults.";

fn setting_and_value(text: &str) -> Result<(String, String), String> {
    let (setting, value) = text.split_once('=').ok_or("must be SECTION.KEY=VALUE")?;
    Ok((setting.to_owned(), value.to_owned()))
}

/// The address of a worker, with the scheme that it usually lacks.
#[expect(clippy::unnecessary_wraps, reason = "the signature of a value parser")]
fn worker_url(text: &str) -> Result<String, String> {
    Ok(if text.contains("://") { text.to_owned() } else { format!("http://{text}") })
}

/// A listen address, resolved if it contains a host name. The loader checks it.
fn listen_address(text: &str) -> String {
    let is_name = !text.starts_with("localhost:") && text.parse::<SocketAddr>().is_err();
    let mut resolved: Vec<SocketAddr> = match text.rsplit_once(':') {
        Some((host, _)) if is_name && !host.is_empty() => text.to_socket_addrs().map(Iterator::collect),
        _ => Ok(Vec::new()),
    }
    .unwrap_or_default();
    resolved.sort_by_key(SocketAddr::is_ipv6);
    resolved.first().map_or_else(|| text.to_owned(), ToString::to_string)
}

impl SettingsArgs {
    /// Reads the file and merges all sources.
    fn load(&self) -> Result<Loaded, Refused> {
        let model = self.model.clone().map(|name| (name, self.worker.clone()));
        let mut sources = Sources { variables: environment(), flags: self.flags(), model, ..Sources::default() };
        let read = self.read(&mut sources);
        let log_format = sources.log_format();
        let loaded = read.and_then(|()| sources.load().map_err(|errors| self.problems(errors)));
        loaded.map_err(|problems| Refused { log_format, problems })
    }

    fn read(&self, sources: &mut Sources) -> Result<(), String> {
        sources.directory = std::env::current_dir().map_err(|error| format!("no working directory: {error}\n"))?;
        sources.file = self.config.as_deref().map(read_config).transpose()?;
        Ok(())
    }

    /// The problems as lines. Those of a command without any model begin with an example.
    fn problems(&self, LoadErrors(mut errors): LoadErrors) -> String {
        let is_bare = self.config.is_none() && self.model.is_none();
        let mut text = String::new();
        if is_bare {
            errors.retain(|error| !matches!(error, LoadError::Value { setting, .. } if setting == "models"));
            text = format!("no model is given: give --model and --worker, or --config FILE, as in: {EXAMPLE}\n");
        }
        text + &LoadErrors(errors).to_string()
    }

    fn flags(&self) -> Vec<Flag> {
        let set = self.set.iter();
        let set = set.map(|(setting, value)| (format!("--set {setting}"), setting.as_str(), Some(value.clone())));
        let address = |address: &Option<String>| address.as_deref().map(listen_address);
        let switch = |is_on: bool| is_on.then(|| "true".to_owned());
        let short = [
            ("--listen", "gateway.listen", address(&self.listen)),
            ("--reuse-port", "gateway.reuse_port", switch(self.reuse_port)),
            ("--policy", "router.policy", self.policy.clone()),
            ("--tokenizer", "tokens.tokenizer_file", self.tokenizer.clone()),
            ("--chat-template", "tokens.chat_template_file", self.chat_template.clone()),
            ("--admin-listen", "admin.listen", address(&self.admin_listen)),
            ("--admin-token-file", "admin.token_file", self.admin_token_file.clone()),
            ("--worker-api-key-file", "gateway.worker_api_key_file", self.worker_api_key_file.clone()),
            ("--worker-ca-file", "gateway.worker_ca_file", self.worker_ca_file.clone()),
            ("--worker-certificate-file", "gateway.worker_certificate_file", self.worker_certificate_file.clone()),
            ("--worker-key-file", "gateway.worker_key_file", self.worker_key_file.clone()),
            ("--log-level", "gateway.log_level", self.log_level.clone()),
            ("--log-format", "gateway.log_format", self.log_format.clone()),
            ("--otlp-endpoint", "gateway.otlp_endpoint", self.otlp_endpoint.clone()),
            ("--conformance", "picker.conformance", switch(self.conformance)),
        ];
        let flags = set.chain(short.map(|(name, setting, value)| (name.to_owned(), setting, value)));
        let given =
            flags.filter_map(|(name, setting, value)| Some(Flag { name, setting: setting.to_owned(), value: value? }));
        given.collect()
    }
}

/// Rejected settings: one problem per line.
struct Refused {
    /// Configured log format.
    log_format: LogFormat,
    problems: String,
}

fn read_config(path: &Path) -> Result<ConfigFile, String> {
    let unreadable = |error| format!("{} cannot be read: {error}\n", path.display());
    let text = fs::read_to_string(path).map_err(unreadable)?;
    let directory = std::path::absolute(path).map_err(unreadable)?;
    Ok(ConfigFile { text, directory: directory.parent().map_or(PathBuf::new(), Path::to_owned) })
}

/// Environment variables. Bytes that are not UTF-8 become replacement characters, which no setting accepts.
fn environment() -> Vec<(String, String)> {
    let text = |os: std::ffi::OsString| os.to_string_lossy().into_owned();
    std::env::vars_os().map(|(name, value)| (text(name), text(value))).collect()
}

fn main() -> ExitCode {
    match arguments().command {
        Command::Version => ended(print(format_args!("pointsman {}\n", env!("CARGO_PKG_VERSION")))),
        Command::Serve(args) => match args.load() {
            Ok(loaded) => app::run(
                loaded.settings,
                Arc::new(move || args.load().map(|loaded| loaded.settings).map_err(|refused| refused.problems)),
            ),
            Err(Refused { log_format, problems }) => app::refuse(log_format, &problems),
        },
        Command::CheckConfig(args) => {
            let loaded = args.load().map_err(|refused| refused.problems);
            let checked = loaded.and_then(|loaded| check_config(&loaded)).map_err(Stop::Problem);
            ended(checked.and_then(print))
        }
        Command::MockEngine(config) => ended(mock_engine(*config)),
        Command::ReplayDecisions(args) => match replay_decisions(&args) {
            Ok(report) => {
                let status = ended(print(&report));
                if report.is_equal() { status } else { ExitCode::from(1) }
            }
            Err(problem) => ended(Err(Stop::Problem(problem))),
        },
        Command::Demo(config) => demo(&config),
        Command::Top(args) => ended(top(&args)),
    }
}

/// The command line. Ends the process for help and for errors.
fn arguments() -> Cli {
    let mut arguments: Vec<OsString> = std::env::args_os().collect();
    if arguments.get(1).is_some_and(|command| command == "help") {
        arguments.retain(|argument| argument != "--help" && argument != "-h");
    }
    Cli::try_parse_from(arguments).unwrap_or_else(|mut error| {
        let flag = error.get(ContextKind::InvalidArg).map(ToString::to_string).unwrap_or_default();
        if let Some((_, own)) = FOREIGN_FLAGS.iter().find(|(foreign, _)| *foreign == flag) {
            error.insert(ContextKind::SuggestedArg, ContextValue::String((*own).to_owned()));
        }
        error.exit()
    })
}

/// The effective settings, or one line per unusable file.
fn check_config(loaded: &Loaded) -> Result<String, String> {
    let settings = &loaded.settings;
    let secrets = Secrets::problems(settings).into_iter().map(|problem| problem.to_string());
    let files = loaded.files().filter_map(|(setting, file)| {
        let error = File::open(file).err()?;
        Some(format!("{setting} is {}, which cannot be read: {error}", file.display()))
    });
    let problems: String = secrets.chain(files).map(|problem| format!("{problem}\n")).collect();
    if !problems.is_empty() {
        return Err(problems);
    }
    let limits = ProcessLimits::of(settings);
    settings
        .warnings()
        .into_iter()
        .chain(limits.warning())
        .chain(Certificate::all(settings).iter().filter_map(Certificate::warning))
        .for_each(|warning| print_error(format_args!("warning: {warning}")));
    Ok(format!("{loaded}\n{limits}"))
}

/// Runs an engine until interrupted, and prints its addresses once it is ready.
fn mock_engine(config: MockConfig) -> Result<(), Stop> {
    runtime()?.block_on(async {
        let engine = MockEngine::start(config).await.map_err(|error| Stop::Problem(error.to_string()))?;
        let mut addresses = format!("listening on {}\n", engine.url());
        for rank in 0..engine.config().data_parallel_size {
            let (events, replay) = (engine.event_endpoint(rank), engine.replay_endpoint(rank));
            addresses += &format!("rank {rank}: events {events}, replay {replay}\n");
        }
        let until_interrupted = async {
            print(addresses)?;
            interrupted().await
        };
        let ended = until_interrupted.await;
        engine.shutdown().await;
        ended
    })
}

fn runtime() -> Result<tokio::runtime::Runtime, Stop> {
    tokio::runtime::Runtime::new().map_err(|error| Stop::Problem(format!("no runtime: {error}")))
}

async fn interrupted() -> Result<(), Stop> {
    let failed = |error| Stop::Problem(format!("cannot install the interrupt handler: {error}"));
    tokio::signal::ctrl_c().await.map_err(failed)
}

/// Prints the state of a gateway, as wide as `COLUMNS`, which `watch` exports.
fn top(args: &TopArgs) -> Result<(), Stop> {
    let token = top::read_token(&args.token_file).map_err(Stop::Problem)?;
    let columns =
        environment().into_iter().find(|(name, _)| name == "COLUMNS").and_then(|(_, value)| value.parse().ok());
    let page = runtime()?.block_on(top::page(args, &token, columns.unwrap_or(140))).map_err(Stop::Problem)?;
    print(page)
}

/// Runs the demo, prints its result, and stays up if requested.
fn demo(config: &DemoConfig) -> ExitCode {
    match run_demo(config) {
        Ok(is_clean) => ExitCode::from(u8::from(!is_clean)),
        Err(stop) => ended(Err(stop)),
    }
}

/// Whether every request succeeded.
fn run_demo(config: &DemoConfig) -> Result<bool, Stop> {
    runtime()?.block_on(async {
        let demo = Demo::<OneModel>::run(config, Progress::Stderr).await;
        let demo = demo.map_err(|error| Stop::Problem(error.to_string()))?;
        let report = demo.report();
        let is_clean = report.is_clean();
        let shown = async {
            match config.json {
                true => print(format_args!("{}\n", report.json()))?,
                false => print(report)?,
            }
            if config.stay {
                // With `--json`, stdout contains only the JSON object.
                match config.json {
                    true => print_error(demo.addresses()),
                    false => print(demo.addresses())?,
                }
                tokio::select! {
                    biased;
                    interrupted = interrupted() => interrupted?,
                    () = demo.keep_busy() => {}
                }
            }
            Ok(is_clean)
        };
        let shown = shown.await;
        demo.shutdown().await;
        shown
    })
}
