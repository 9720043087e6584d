//! Seeded simulation: the state machines of several routers in one world of engines, networks and clients.
//!
//! A seed determines a script of requests and faults, and every delay. After every step an oracle checks the invariants
//! of ARCHITECTURE.md. A failure prints its seed and step, and the script without the elements that it does not need.
//! `SIMULATION_SEEDS` sets the number of seeds, `SIMULATION_SEED` selects a single one.

mod discovery;
mod engine;
mod gateway;
mod ledger;
mod letter;
mod net;
mod prompt;
mod script;
mod shrink;
mod world;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use pointsman::internals::shell::Defect;
use script::Script;
use world::Summary;

/// Seeds of a plain `cargo test`.
const SEEDS: u64 = 100;

/// Seeds of each deliberate defect.
const DEFECT_SEEDS: u64 = 100;

/// Defects that only thousands of seeds show: their states last for the time of one message.
const RARE: [Defect; 2] = [Defect::ColdRankDumped, Defect::LeftBookingsStay];

/// Seeds between two lines of progress.
const PROGRESS: u64 = 5_000;

#[expect(clippy::disallowed_methods, reason = "test effort is not router configuration")]
fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

/// Reports a violated invariant with the shortest script that violates it.
///
/// # Panics
/// Always.
fn report(seed: u64, failure: shrink::Failure) -> ! {
    let (step, at, message) = (failure.step, failure.at.0, failure.message.clone());
    let (short, short_failure) = shrink::shrunk(&Script::new(seed), failure);
    let acts: Vec<String> = short.acts.iter().map(|(at, act)| format!("  {at} ms: {act:?}")).collect();
    panic!(
        "seed {seed} fails at step {step} ({at} ns): {message}\nreduced to {} elements, which fail at step {}: {}\n{:?}\n{}\n\
         repeat: SIMULATION_SEED={seed} cargo test --test simulation",
        short.acts.len(),
        short_failure.step,
        short_failure.message,
        short.settings,
        acts.join("\n"),
    );
}

#[test]
fn invariants_hold_for_every_seed() {
    if let Some(seed) = number("SIMULATION_SEED") {
        match shrink::run(&Script::new(seed)) {
            Ok(summary) => return eprintln!("{summary:?}"),
            Err(failure) => report(seed, failure),
        }
    }
    let seeds = number("SIMULATION_SEEDS").unwrap_or(SEEDS);
    let first = number("SIMULATION_FIRST").unwrap_or(0);
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(4);
    let next = AtomicU64::new(first);
    let run = || {
        let mut totals = Summary::default();
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= first + seeds {
                return totals;
            }
            if seed.is_multiple_of(PROGRESS) && seed > first {
                eprintln!("{seed} seeds started");
            }
            match shrink::run(&Script::new(seed)) {
                Ok(summary) => add(&mut totals, &summary),
                Err(failure) => {
                    next.store(first + seeds, Ordering::Relaxed); // the other threads end
                    report(seed, failure);
                }
            }
        }
    };
    let totals = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(run)).collect();
        let results: Vec<_> = workers.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        let mut totals = Summary::default();
        for result in results {
            match result {
                Ok(summary) => add(&mut totals, &summary),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        totals
    });
    let Summary { steps, time, requests, served, faults, compared, .. } = totals;
    eprintln!(
        "{seeds} seeds: {:.1} simulated hours, {steps} steps, {requests} requests ({served} served), {faults} faults, \
         {compared} bookings compared between gateways",
        time.as_secs_f64() / 3_600.0,
    );
    assert!(served * 4 > requests, "most requests end for another reason");
    assert!(time > Duration::ZERO);
}

fn add(totals: &mut Summary, one: &Summary) {
    totals.steps += one.steps;
    totals.time += one.time;
    totals.requests += one.requests;
    totals.served += one.served;
    totals.faults += one.faults;
    totals.compared += one.compared;
}

/// Every deliberate defect in the shells leads to a failure.
#[test]
fn deliberate_defects_are_found() {
    let seeds = number("SIMULATION_DEFECT_SEEDS").unwrap_or(DEFECT_SEEDS);
    let first = number("SIMULATION_FIRST").unwrap_or(0);
    let fails = |defect: Defect| {
        Defect::plant(Some(defect));
        let failing = (first..first + seeds).find_map(|seed| Some((seed, shrink::run(&Script::new(seed)).err()?)));
        Defect::plant(None);
        failing.map(|(seed, failure)| (seed, failure.message))
    };
    let next = AtomicU64::new(0);
    let run = || {
        let mut found = Vec::new();
        while let Some(defect) = Defect::ALL.get(next.fetch_add(1, Ordering::Relaxed) as usize) {
            let failing = fails(*defect);
            eprintln!("{defect:?}: {failing:?}");
            found.extend(failing.is_none().then_some(*defect));
        }
        found
    };
    let missed: Vec<Defect> = std::thread::scope(|scope| {
        let workers = [scope.spawn(run), scope.spawn(run)];
        workers.into_iter().flat_map(|worker| worker.join().expect("no panic outside of a world")).collect()
    });
    let missed: Vec<Defect> = missed.into_iter().filter(|defect| !RARE.contains(defect)).collect();
    assert_eq!(missed, [], "defects without a failure in {seeds} seeds");
}

/// A failing seed is of use only if a second run takes the same steps.
#[test]
fn equal_seeds_give_equal_traces() {
    for seed in 0..20 {
        let script = Script::new(seed);
        let runs = [shrink::run(&script), shrink::run(&script)].map(|run| run.map_err(|failure| failure.message));
        assert_eq!(runs[0], runs[1], "seed {seed}");
    }
}
