//! Measures the memory of one index, in a process with a counting allocator.
//!
//! It is separate from `versus`, because counting slows down allocations.

use std::alloc::System;
use std::io::{self, Write};
use std::process::ExitCode;

use clap::Parser;
use pointsman_bench::Failed;
use pointsman_versus::index::Replay;
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Measure the memory of one index and print it as JSON
#[derive(Parser)]
#[command(version)]
struct HeapArguments {
    #[command(flatten)]
    replay: Replay,
}

fn live_bytes() -> usize {
    let stats = ALLOCATOR.stats();
    stats.bytes_allocated - stats.bytes_deallocated
}

fn run() -> Result<(), Failed> {
    let heap = HeapArguments::parse().replay.weigh(live_bytes)?;
    Ok(writeln!(io::stdout(), "{}", serde_json::to_string(&heap)?)?)
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // A write error on standard error is ignored, because there is no other output.
            let _ = writeln!(io::stderr(), "error: {error}");
            ExitCode::FAILURE
        }
    }
}
