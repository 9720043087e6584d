//! Process of the gateway: runtime, signals and exit code.
//!
//! The first SIGTERM or SIGINT drains: `/ready` is 503 for `drain_delay_ms` while everything is still served, then the
//! listener closes, then requests in flight have `drain_timeout_ms`. The second signal ends the process immediately.
//! Other signals never end it. The loader provides settings; the [`Gateway`] serves requests.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;
use tokio::time::{Instant, sleep};

use super::reload::Reloader;
use super::{Gateway, LoadSettings};
use crate::net::listener::Drained;
use crate::net::listener::PassedSockets;
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
    #[must_use]
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
#[must_use]
pub fn run(settings: Settings, load: LoadSettings) -> ExitCode {
    let format = settings.gateway.log_format;
    let sockets = match PassedSockets::of_process() {
        Ok(sockets) => sockets,
        Err(error) => return unusable(format, &format!("passed sockets (LISTEN_FDS): {error}")),
    };
    let level = match parse_level(&settings.gateway.log_level) {
        Ok(level) => level,
        Err(error) => return unusable(format, &format!("gateway.log_level: {error}")),
    };
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return unusable(format, &format!("no runtime: {error}")),
    };
    // The log counts dropped lines, so the recorder is installed first.
    drop(Metrics::install(workers::page));
    let access_log = &settings.gateway.access_log;
    let Some(access) = AccessLog::parse(access_log) else {
        return unusable(format, &format!("gateway.access_log: {access_log:?} names no log"));
    };
    let logs = match start_log(level, format, &access) {
        Ok(logs) => logs,
        Err(error) => {
            return unusable(format, &format!("gateway.access_log: {access_log:?} cannot be opened: {error}"));
        }
    };
    settings.warnings().iter().for_each(|warning| tracing::warn!("{warning}"));
    let ended = runtime.block_on(started(settings, load, sockets));
    // Does not wait for tokenizer threads.
    runtime.shutdown_background();
    logs.flush();
    match ended {
        Ok(Ended::Drained(_)) => ExitCode::SUCCESS,
        Ok(Ended::AtOnce(signal)) => ExitCode::from(signal.exit_code()),
        Err(error) => unusable(format, &error),
    }
}

/// Starts and runs a gateway; returns the reason if startup fails.
async fn started(settings: Settings, load: LoadSettings, sockets: PassedSockets) -> Result<Ended, String> {
    let signal_error = |error| format!("cannot install signal handlers: {error}");
    let (mut signals, hangups) = (signals().map_err(signal_error)?, hangups().map_err(signal_error)?);
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
    notify(ServiceState::Stopping);
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
                broken => tracing::warn!(broken, "shutdown complete: connections still busy after drain_timeout_ms were closed"),
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
    notify(ServiceState::Ready);
}

/// State of the service, as the service manager sees it.
#[derive(Clone, Copy, Debug)]
enum ServiceState {
    Ready,
    Stopping,
}

/// Without a service manager nothing happens.
#[cfg(unix)]
fn notify(state: ServiceState) {
    let state = match state {
        ServiceState::Ready => sd_notify::NotifyState::Ready,
        ServiceState::Stopping => sd_notify::NotifyState::Stopping,
    };
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::warn!(%error, "the service manager could not be notified");
    }
}

/// Only systemd has notifications.
#[cfg(not(unix))]
fn notify(_: ServiceState) {}

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
#[must_use]
pub fn refuse(format: LogFormat, problems: &str) -> ExitCode {
    write_problems(format, problems);
    ExitCode::from(UNUSABLE)
}

/// Termination signals of the process.
#[cfg(unix)]
fn signals() -> std::io::Result<mpsc::Receiver<Signal>> {
    use tokio::signal::unix::{SignalKind, signal};
    let (sender, receiver) = mpsc::channel(2);
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let (mut user1, mut user2) = (signal(SignalKind::user_defined1())?, signal(SignalKind::user_defined2())?);
    tokio::spawn(async move {
        loop {
            let signal = tokio::select! {
                biased;
                Some(()) = user1.recv() => "SIGUSR1",
                Some(()) = user2.recv() => "SIGUSR2",
                else => return,
            };
            tracing::info!(signal, "signal ignored");
        }
    });
    tokio::spawn(async move {
        loop {
            let signal = tokio::select! {
                biased;
                Some(()) = interrupt.recv() => Signal::Interrupt,
                Some(()) = terminate.recv() => Signal::Terminate,
                else => return,
            };
            if sender.send(signal).await.is_err() {
                return;
            }
        }
    });
    Ok(receiver)
}

/// SIGHUP of the process.
#[cfg(unix)]
fn hangups() -> std::io::Result<mpsc::Receiver<()>> {
    use tokio::signal::unix::{SignalKind, signal};
    let (sender, receiver) = mpsc::channel(1);
    let mut hangup = signal(SignalKind::hangup())?;
    tokio::spawn(async move {
        // One pending signal represents all since the last reload.
        while hangup.recv().await.is_some() && !matches!(sender.try_send(()), Err(TrySendError::Closed(()))) {}
    });
    Ok(receiver)
}

/// Never fires on systems without SIGHUP.
#[cfg(not(unix))]
fn hangups() -> std::io::Result<mpsc::Receiver<()>> {
    Ok(mpsc::channel(1).1)
}

/// Ctrl-C, the only signal of other systems.
#[cfg(not(unix))]
fn signals() -> std::io::Result<mpsc::Receiver<Signal>> {
    let (sender, receiver) = mpsc::channel(2);
    tokio::spawn(async move {
        while tokio::signal::ctrl_c().await.is_ok() {
            if sender.send(Signal::Interrupt).await.is_err() {
                return;
            }
        }
    });
    Ok(receiver)
}
