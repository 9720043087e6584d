//! The `pointsman` command. For now it says its version; the gateway itself comes later.

use clap::{Parser, Subcommand};

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
}

#[expect(clippy::print_stdout, reason = "the version is this command's answer")]
fn main() {
    match Cli::parse().command {
        Command::Version => println!("pointsman {}", env!("CARGO_PKG_VERSION")),
    }
}
