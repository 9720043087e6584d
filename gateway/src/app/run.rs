//! Process of the gateway: runtime, signals and exit code.
//!
//! The first SIGTERM or SIGINT drains: `/ready` is 503 for `drain_delay_ms` while everything is still served, then the
//! listener closes, then requests in flight have `drain_timeout_ms`. The second signal ends the process immediately.
//! Other signals never end it. The loader provides settings; the [`Gateway`] serves requests.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use sd_notify::NotifyState;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};

use super::reload::Reloader;
use super::{Gateway, LoadSettings};
use crate::net::cores;
use crate::net::listener::{Drained, PassedSockets};
use crate::observe::log::{start_log, write_problems};
use crate::observe::page::Metrics;
use crate::pools::latest::Latest;
use crate::pools::serving::Pools;
use crate::pools::{readiness, workers};
use crate::settings::{AccessLog, LogFormat, Settings, parse_level};

/// Polling interval of the readiness for the service manager.
const READY_INTERVAL: Duration = Duration::from_millis(100);

/// Exit code for invalid input.
const UNUSABLE: u8 = 2;

/// A termination signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// SIGINT: Ctrl-C.
    Interrupt,
    /// SIGTERM, sent by service managers.
    Terminate,
}

impl Signal {
    /// Exit code of a process ended by the signal, as shells report it.
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Interrupt => 130,
            Self::Terminate => 143,
        }
    }
}

/// End of a gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Regular end; some requests may have been cut off.
    Drained(Drained),
    /// Immediate end by a second signal.
    AtOnce(Signal),
}

/// Runs the gateway until a signal ends it.
///
/// Exit codes: 0 after a regular end, even if requests were cut off after `drain_timeout_ms` (the log reports their
/// number); 2 if startup failed, with the reason on stderr; 130 or 143 after a second SIGINT or SIGTERM.
pub fn run(settings: Settings, load: LoadSettings) -> ExitCode {
    let format = settings.gateway.log_format;
    match run_logged(settings, load) {
        Ok(Ended::Drained(_)) => ExitCode::SUCCESS,
        Ok(Ended::AtOnce(signal)) => ExitCode::from(signal.exit_code()),
        Err(reason) => unusable(format, &reason),
    }
}

/// Runs the gateway with its logs; returns the reason if startup fails.
fn run_logged(settings: Settings, load: LoadSettings) -> Result<Ended, String> {
    let sockets = PassedSockets::of_process().map_err(|error| format!("passed sockets (LISTEN_FDS): {error}"))?;
    let level = parse_level(&settings.gateway.log_level).map_err(|error| format!("gateway.log_level: {error}"))?;
    let runtime = cores::build(&mut tokio::runtime::Builder::new_multi_thread());
    let runtime = runtime.map_err(|error| format!("no runtime: {error}"))?;
    // The log counts dropped lines, so the recorder is installed first.
    drop(Metrics::install(workers::series(settings.gateway.metrics_workers_max)));
    let access_log = &settings.gateway.access_log;
    let access = AccessLog::parse(access_log);
    let access = access.ok_or_else(|| format!("gateway.access_log: {access_log:?} names no log"))?;
    let logs = start_log(level, settings.gateway.log_format, &access)
        .map_err(|error| format!("gateway.access_log: {access_log:?} cannot be opened: {error}"))?;
    settings.warnings().iter().for_each(|warning| tracing::warn!("{warning}"));
    let ended = runtime.block_on(started(settings, load, sockets));
    // Does not wait for tokenizer threads.
    runtime.shutdown_background();
    logs.flush();
    ended
}

/// Starts and runs a gateway; returns the reason if startup fails.
async fn started(settings: Settings, load: LoadSettings, sockets: PassedSockets) -> Result<Ended, String> {
    let signals = signals().map_err(|error| format!("cannot install signal handlers: {error}"));
    let (mut signals, hangups) = signals?;
    let gateway = tokio::select! {
        biased;
        // No request has been accepted yet.
        Some(_) = signals.recv() => return Ok(Ended::Drained(Drained { broken: 0 })),
        gateway = Gateway::start_with(settings, Some(load), sockets) => gateway.map_err(|error| error.to_string())?,
    };
    let admin_address = gateway.admin_address().map(tracing::field::display);
    tracing::info!(address = %gateway.address(), admin_address, version = env!("CARGO_PKG_VERSION"), "listening");
    let reloads = tokio::spawn(reload_at(hangups, Arc::clone(&gateway.reloader)));
    let readiness = tokio::spawn(notify_when_ready(gateway.running.pools.clone()));
    let ended = run_until(gateway, signals).await;
    reloads.abort();
    readiness.abort();
    Ok(ended)
}

/// Runs a gateway until the first of `signals` has drained it or the second one ends it.
pub async fn run_until(gateway: Gateway, mut signals: mpsc::Receiver<Signal>) -> Ended {
    let signal = signals.recv().await;
    // The current timeouts, which a reload may have changed.
    let settings = Arc::clone(&gateway.running.pools.get().settings);
    let drain_delay = Duration::from_millis(settings.gateway.drain_delay_ms);
    let drain_timeout = Duration::from_millis(settings.gateway.drain_timeout_ms);
    let Some(signal) = signal else {
        // The sender of signals is gone, so no signal could end the gateway later.
        return Ended::Drained(gateway.shutdown(drain_timeout).await);
    };
    tracing::info!(?signal, "shutdown started: no longer ready");
    notify(NotifyState::Stopping);
    gateway.begin_drain();
    let drained = async {
        sleep(drain_delay).await;
        tracing::info!("listener closed; requests in flight continue");
        gateway.shutdown(drain_timeout).await
    };
    tokio::select! {
        biased;
        Some(signal) = signals.recv() => {
            tracing::warn!(?signal, "shutting down immediately");
            Ended::AtOnce(signal)
        }
        drained = drained => {
            match drained.broken {
                0 => tracing::info!("shutdown complete: no requests in flight"),
                broken => tracing::warn!(broken, "shutdown complete: requests still in flight after drain_timeout_ms were cut off"),
            }
            Ended::Drained(drained)
        }
    }
}

/// Notifies the service manager when the gateway is ready, or after the warm-up time: a gateway without engines has
/// started, too.
async fn notify_when_ready(pools: Latest<Pools>) {
    let started = Instant::now();
    let warm_up = Duration::from_millis(pools.get().settings.gateway.warm_up_ms);
    while !readiness::is_ready(&pools.get()).await && started.elapsed() < warm_up {
        sleep(READY_INTERVAL).await;
    }
    notify(NotifyState::Ready);
}

/// Without a service manager nothing happens.
fn notify(state: NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::warn!(%error, "the service manager could not be notified");
    }
}

/// Reloads the settings at each SIGHUP; several signals during a reload count as one.
async fn reload_at(mut hangups: mpsc::Receiver<()>, reloader: Arc<Reloader>) {
    while hangups.recv().await.is_some() {
        tracing::info!("SIGHUP: configuration reload requested");
        // The reloader reports the result.
        let _ = reloader.reload().await;
    }
}

/// Reports a startup failure, with or without a working log.
fn unusable(format: LogFormat, reason: &str) -> ExitCode {
    match format {
        LogFormat::Text => refuse(format, &format!("error: {reason}")),
        LogFormat::Json => refuse(format, reason),
    }
}

/// Reports on stderr why startup was not attempted: one problem per line, in the log format.
pub fn refuse(format: LogFormat, problems: &str) -> ExitCode {
    write_problems(format, problems);
    ExitCode::from(UNUSABLE)
}

/// Termination signals of the process, and requests for a reload (SIGHUP), one of which represents all since the last.
fn signals() -> std::io::Result<(mpsc::Receiver<Signal>, mpsc::Receiver<()>)> {
    use tokio::signal::unix::{SignalKind, signal};
    let (ends, ended) = mpsc::channel(2);
    let (reloads, reloaded) = mpsc::channel(1);
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let (mut user1, mut user2) = (signal(SignalKind::user_defined1())?, signal(SignalKind::user_defined2())?);
    let mut hangup = signal(SignalKind::hangup())?;
    tokio::spawn(async move {
        loop {
            tokio::select! {
                biased;
                Some(()) = interrupt.recv() => drop(ends.try_send(Signal::Interrupt)),
                Some(()) = terminate.recv() => drop(ends.try_send(Signal::Terminate)),
                Some(()) = hangup.recv() => drop(reloads.try_send(())),
                Some(()) = user1.recv() => tracing::info!(signal = "SIGUSR1", "signal ignored"),
                Some(()) = user2.recv() => tracing::info!(signal = "SIGUSR2", "signal ignored"),
                else => return,
            }
        }
    });
    Ok((ended, reloaded))
}
