//! The `pointsman` command.
//!
//! Owns the command line, and is the only place that reads files and the environment. Exits with 0 on success, with 2
//! when what it was given cannot be used. The gateway itself comes later.

mod config;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use pointsman_gateway::demo::{Demo, DemoConfig, Progress};
use pointsman_gateway::mock::{MockConfig, MockEngine};

/// Routes each LLM request to the engine rank that will serve it fastest.
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
    /// Checks a configuration file and the POINTSMAN_ROUTER_* variables over it, and prints what results: every
    /// setting, and whether it came from the file, the environment or the defaults. Exits with 2 and a list of all
    /// problems if it cannot be used.
    CheckConfig {
        /// The TOML file.
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
    },
    /// Runs an LLM engine without a GPU: it answers OpenAI's requests with made-up tokens in modelled time, and
    /// publishes the KV events of its prefix cache as vLLM or SGLang do. Ends on Ctrl-C. docs/mock-engine.md has
    /// endpoints and examples.
    MockEngine(Box<MockConfig>),
    /// Shows what routing by cache is worth: four mock engines of two ranks and the gateway, the same requests round
    /// robin and then by Pointsman's own policy, and a table. Takes less than a minute. Exits with 1 if requests
    /// failed. docs/quick-start.md explains the table.
    Demo(DemoConfig),
}

#[expect(clippy::print_stdout, reason = "what a command prints is its answer")]
fn main() -> ExitCode {
    let answer = match Cli::parse().command {
        Command::Version => Ok(format!("pointsman {}\n", env!("CARGO_PKG_VERSION"))),
        Command::CheckConfig { config } => check_config(&config, environment()),
        Command::MockEngine(config) => mock_engine(*config),
        Command::Demo(config) => return demo(&config),
    };
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

/// The process's variables. What is not UTF-8 comes with replacement characters, which no setting takes.
fn environment() -> impl Iterator<Item = (String, String)> {
    let text = |os: std::ffi::OsString| os.to_string_lossy().into_owned();
    std::env::vars_os().map(move |(name, value)| (text(name), text(value)))
}

/// The effective configuration, or every problem, one a line.
fn check_config(path: &Path, env: impl Iterator<Item = (String, String)>) -> Result<String, String> {
    let text = fs::read_to_string(path).map_err(|error| format!("{} cannot be read: {error}\n", path.display()))?;
    let loaded = config::load(&text, env).map_err(|errors| errors.to_string())?;
    Ok(loaded.to_string())
}

/// Runs an engine until it is interrupted, and says where it is once it answers.
#[expect(clippy::print_stdout, reason = "where a command listens is its answer")]
fn mock_engine(config: MockConfig) -> Result<String, String> {
    let runtime = tokio::runtime::Runtime::new().map_err(|error| format!("no runtime: {error}\n"))?;
    runtime.block_on(async {
        let engine = MockEngine::start(config).await.map_err(|error| format!("{error}\n"))?;
        println!("listening on {}", engine.url());
        for rank in 0..engine.config().data_parallel_size {
            println!("rank {rank}: events {}, replay {}", engine.event_endpoint(rank), engine.replay_endpoint(rank));
        }
        tokio::signal::ctrl_c().await.map_err(|error| format!("interrupts cannot be heard: {error}\n"))?;
        engine.shutdown().await;
        Ok(String::new())
    })
}

/// Runs the demo, prints what came of it, and stays up if asked to.
fn demo(config: &DemoConfig) -> ExitCode {
    match run_demo(config) {
        Ok(is_clean) => ExitCode::from(u8::from(!is_clean)),
        Err(problem) => {
            eprintln!("{problem}");
            ExitCode::from(2)
        }
    }
}

/// Whether every request was answered.
#[expect(clippy::print_stdout, reason = "what came of it is the command's answer")]
fn run_demo(config: &DemoConfig) -> Result<bool, String> {
    let runtime = tokio::runtime::Runtime::new().map_err(|error| format!("no runtime: {error}"))?;
    runtime.block_on(async {
        let demo = Demo::run(config, &Progress::stderr()).await.map_err(|error| error.to_string())?;
        let report = demo.report();
        let is_clean = report.is_clean();
        if config.json {
            println!("{}", report.json());
        } else {
            print!("{report}");
        }
        if config.stay {
            // Standard output stays one JSON object where one was asked for.
            if config.json {
                eprint!("{}", demo.addresses())
            } else {
                print!("{}", demo.addresses())
            }
            tokio::signal::ctrl_c().await.map_err(|error| format!("interrupts cannot be heard: {error}"))?;
        }
        demo.shutdown().await;
        Ok(is_clean)
    })
}
