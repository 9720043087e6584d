//! The `pointsman` command: command line, configuration file and environment.
//!
//! Exits with 0 on success and with 2 for invalid input; [`serve::run`] has further exit codes. The library implements
//! the commands.

mod demo_gateway;

use std::fs::{self, File};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use clap::{Args, Parser, Subcommand};
use pointsman_gateway::live::keys;
use pointsman_gateway::live::top::{self, TopError, TopOptions};
use pointsman_gateway::replay::{ReplayArgs, replay_decisions};
use pointsman_gateway::serve::{self, ProcessLimits};
use pointsman_gateway::settings::{ConfigFile, Flag, Loaded, LogFormat, Secrets, Sources};
use pointsman_trial::demo::{Demo, DemoConfig, Progress};
use pointsman_trial::mock::{MockConfig, MockEngine};

use demo_gateway::OneModel;

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
    /// Runs the gateway: OpenAI's API in front of engines. docs/gateway.md describes its settings.
    Serve(Box<SettingsArgs>),
    /// Checks the arguments of `serve` and prints every effective setting with its origin: file, environment, flag or
    /// default. On errors prints all problems and exits with 2.
    CheckConfig(Box<SettingsArgs>),
    /// Runs an LLM engine without a GPU: it answers OpenAI requests with generated tokens in modelled time and
    /// publishes KV events of its prefix cache like vLLM or SGLang. Ends on Ctrl-C. docs/mock-engine.md has endpoints
    /// and examples.
    MockEngine(Box<MockConfig>),
    /// Decides recorded decisions again, from files that the gateway has written (gateway.decision_path), and compares each
    /// choice bit for bit. With --policy or --set it decides them under other settings, and reports what would have changed.
    /// Exits with 1 if a choice differs from the recorded one. docs/flight-recorder.md has examples.
    ReplayDecisions(ReplayArgs),
    /// Measures cache-aware routing: four mock engines of two ranks and the gateway serve the same requests round robin
    /// and with the default policy, then a table follows. Takes less than a minute. Exits with 1 if requests failed.
    /// docs/quick-start.md explains the table.
    Demo(DemoConfig),
    /// Shows the state of a running gateway in the terminal: the live page of its administration listener. Keys: q quits,
    /// j and k scroll. docs/live-page.md explains the columns.
    Top(TopArgs),
}

/// Arguments of `top`.
#[derive(Debug, Args)]
struct TopArgs {
    /// Address of the administration listener.
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8081")]
    admin: String,
    /// File with the token of operators.
    #[arg(long, value_name = "FILE")]
    token_file: PathBuf,
    /// Shows only this model.
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// Maximum number of ranks per model.
    #[arg(long, value_name = "RANKS", default_value_t = 20)]
    ranks: usize,
    /// Prints one frame without colours and exits.
    #[arg(long)]
    once: bool,
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
    #[arg(long, value_name = "URL", requires = "model")]
    worker: Vec<String>,
    /// Listen address for clients (gateway.listen).
    #[arg(long, value_name = "ADDR")]
    listen: Option<SocketAddr>,
    /// Listen address for operators (admin.listen).
    #[arg(long, value_name = "ADDR")]
    admin_listen: Option<SocketAddr>,
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
    /// Any other setting of gateway, admin, picker, replicas or router, such as router.block_size=16. Repeatable.
    #[arg(long, value_name = "SECTION.KEY=VALUE", value_parser = setting_and_value)]
    set: Vec<(String, String)>,
}

fn setting_and_value(text: &str) -> Result<(String, String), String> {
    let (setting, value) = text.split_once('=').ok_or("must be SECTION.KEY=VALUE")?;
    Ok((setting.to_owned(), value.to_owned()))
}

impl SettingsArgs {
    /// Reads the file and merges all sources.
    fn load(&self) -> Result<Loaded, Refused> {
        let model = self.model.clone().map(|name| (name, self.worker.clone()));
        let flags = self.flags();
        let mut sources = Sources { variables: environment(), flags, model, ..Sources::default() };
        let refused = |sources: &Sources, problems| Refused { log_format: sources.log_format(), problems };
        match std::env::current_dir() {
            Ok(directory) => sources.directory = directory,
            Err(error) => return Err(refused(&sources, format!("no working directory: {error}\n"))),
        }
        match self.config.as_deref().map(read_config).transpose() {
            Ok(file) => sources.file = file,
            Err(problem) => return Err(refused(&sources, problem)),
        }
        let log_format = sources.log_format();
        sources.load().map_err(|errors| Refused { log_format, problems: errors.to_string() })
    }

    fn flags(&self) -> Vec<Flag> {
        let set = self.set.iter().map(|(setting, value)| Flag {
            name: format!("--set {setting}"),
            setting: setting.clone(),
            value: value.clone(),
        });
        let address = |address: Option<SocketAddr>| address.map(|address| address.to_string());
        let short = [
            ("--listen", "gateway.listen", address(self.listen)),
            ("--admin-listen", "admin.listen", address(self.admin_listen)),
            ("--admin-token-file", "admin.token_file", self.admin_token_file.clone()),
            ("--log-level", "gateway.log_level", self.log_level.clone()),
            ("--log-format", "gateway.log_format", self.log_format.clone()),
            ("--otlp-endpoint", "gateway.otlp_endpoint", self.otlp_endpoint.clone()),
            ("--conformance", "picker.conformance", self.conformance.then(|| "true".to_owned())),
        ];
        let short = short.into_iter().filter_map(|(name, setting, value)| {
            Some(Flag { name: name.to_owned(), setting: setting.to_owned(), value: value? })
        });
        set.chain(short).collect()
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
    match Cli::parse().command {
        Command::Version => answered(Ok(format!("pointsman {}\n", env!("CARGO_PKG_VERSION")))),
        Command::Serve(args) => match args.load() {
            Ok(loaded) => serve::run(
                loaded.settings,
                Arc::new(move || args.load().map(|loaded| loaded.settings).map_err(|refused| refused.problems)),
            ),
            Err(Refused { log_format, problems }) => serve::refuse(log_format, &problems),
        },
        Command::CheckConfig(args) => {
            let loaded = args.load().map_err(|refused| refused.problems);
            answered(loaded.and_then(|loaded| check_config(&loaded)))
        }
        Command::MockEngine(config) => answered(mock_engine(*config)),
        Command::ReplayDecisions(args) => match replay_decisions(&args) {
            Ok(report) => {
                let status = answered(Ok(report.to_string()));
                if report.is_equal() { status } else { ExitCode::from(1) }
            }
            Err(problem) => answered(Err(format!("{problem}\n"))),
        },
        Command::Demo(config) => demo(&config),
        Command::Top(args) => answered(top(args)),
    }
}

/// Prints the output of a command, or its problems.
#[expect(clippy::print_stdout, reason = "the output is the result of the command")]
fn answered(answer: Result<String, String>) -> ExitCode {
    match answer {
        Ok(answer) => {
            print!("{answer}");
            ExitCode::SUCCESS
        }
        Err(problems) => {
            eprint!("{problems}");
            ExitCode::from(2)
        }
    }
}

/// The effective settings, or one line per unusable file.
fn check_config(loaded: &Loaded) -> Result<String, String> {
    let settings = &loaded.settings;
    let secrets = Secrets::problems(settings).into_iter().map(|problem| problem.to_string());
    let files = settings.files().into_iter().filter_map(|(setting, file)| {
        let error = File::open(file).err()?;
        Some(format!("{setting} is {}, which cannot be read: {error}", file.display()))
    });
    let problems: String = secrets.chain(files).map(|problem| format!("{problem}\n")).collect();
    if !problems.is_empty() {
        return Err(problems);
    }
    let limits = ProcessLimits::of(settings);
    settings.warnings().into_iter().chain(limits.warning()).for_each(|warning| eprintln!("warning: {warning}"));
    Ok(format!("{loaded}\n{limits}"))
}

/// Runs an engine until interrupted, and prints its addresses once it is ready.
#[expect(clippy::print_stdout, reason = "the address is the result of the command")]
fn mock_engine(config: MockConfig) -> Result<String, String> {
    let runtime = tokio::runtime::Runtime::new().map_err(|error| format!("no runtime: {error}\n"))?;
    runtime.block_on(async {
        let engine = MockEngine::start(config).await.map_err(|error| format!("{error}\n"))?;
        println!("listening on {}", engine.url());
        for rank in 0..engine.config().data_parallel_size {
            println!("rank {rank}: events {}, replay {}", engine.event_endpoint(rank), engine.replay_endpoint(rank));
        }
        tokio::signal::ctrl_c().await.map_err(|error| format!("cannot install the interrupt handler: {error}\n"))?;
        engine.shutdown().await;
        Ok(String::new())
    })
}

/// Draws the state of a gateway until a key or a signal ends it.
fn top(args: TopArgs) -> Result<String, String> {
    let TopArgs { admin, token_file, model, ranks, once } = args;
    let token = top::read_token(&token_file).map_err(|problem| format!("{problem}\n"))?;
    let options = TopOptions { url: admin, token, model, ranks_max: ranks, has_colours: !once, size: keys::size };
    let runtime = tokio::runtime::Runtime::new().map_err(|error| format!("no runtime: {error}\n"))?;
    runtime.block_on(async {
        let failed = |error: TopError| format!("{error}\n");
        let mut output = std::io::stdout();
        if once {
            return top::once(&options, &mut output).await.map(|()| String::new()).map_err(failed);
        }
        let mut pressed = keys::read_keys();
        let _screen = keys::Screen::enter().map_err(|error| format!("cannot write: {error}\n"))?;
        tokio::select! {
            biased;
            interrupted = tokio::signal::ctrl_c() => {
                interrupted.map_err(|error| format!("cannot install the interrupt handler: {error}\n"))?;
            }
            ended = top::watch(&options, &mut pressed, &mut output) => ended.map_err(failed)?,
        }
        Ok(String::new())
    })
}

/// Runs the demo, prints its result, and stays up if requested.
fn demo(config: &DemoConfig) -> ExitCode {
    match run_demo(config) {
        Ok(is_clean) => ExitCode::from(u8::from(!is_clean)),
        Err(problem) => {
            eprintln!("{problem}");
            ExitCode::from(2)
        }
    }
}

/// Whether every request succeeded.
#[expect(clippy::print_stdout, reason = "the report is the result of the command")]
fn run_demo(config: &DemoConfig) -> Result<bool, String> {
    let runtime = tokio::runtime::Runtime::new().map_err(|error| format!("no runtime: {error}"))?;
    runtime.block_on(async {
        let demo = Demo::<OneModel>::run(config, &Progress::stderr()).await.map_err(|error| error.to_string())?;
        let report = demo.report();
        let is_clean = report.is_clean();
        if config.json {
            println!("{}", report.json());
        } else {
            print!("{report}");
        }
        if config.stay {
            // With `--json`, stdout contains only the JSON object.
            if config.json {
                eprint!("{}", demo.addresses())
            } else {
                print!("{}", demo.addresses())
            }
            tokio::select! {
                interrupted = tokio::signal::ctrl_c() => {
                    interrupted.map_err(|error| format!("cannot install the interrupt handler: {error}"))?;
                }
                () = demo.keep_busy() => {}
            }
        }
        demo.shutdown().await;
        Ok(is_clean)
    })
}
