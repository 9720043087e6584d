//! The gateway as a process.
//!
//! Owns its runtime, its signals and its exit code. Promises that a first SIGTERM or SIGINT ends it in order: `/ready` says
//! no for `drain_delay_ms` while everything is still answered, then the listener closes, then requests in flight have
//! `drain_timeout_ms`; that a second one ends it at once; and that no other signal ends it. Leaves settings to their loader and requests to the
//! [`Gateway`].

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;
use tokio::time::sleep;

use super::reload::Reloader;
use super::telemetry::{AccessLog, Metrics, parse_level, start_log, write_problems};
use super::{Drained, Gateway, LoadSettings};
use crate::settings::{LogFormat, Settings};

/// What was given cannot be used.
const UNUSABLE: u8 = 2;

/// A signal to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// SIGINT: Ctrl-C.
    Interrupt,
    /// SIGTERM: what service managers send.
    Terminate,
}

impl Signal {
    /// The exit code of a process that is ended by it, as shells show it.
    #[must_use]
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Interrupt => 130,
            Self::Terminate => 143,
        }
    }
}

/// How a gateway ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// In order, though perhaps some requests took too long.
    Drained(Drained),
    /// At once, by a second signal.
    AtOnce(Signal),
}

/// Runs the gateway until a signal ends it.
///
/// Exits with 0 when it has ended in order, also where requests took longer than `drain_timeout_ms` and were broken (a
/// line of the log says how many); with 2 when it cannot start, which one line on stderr explains; and with 130 or 143
/// when a second SIGINT or SIGTERM ended it at once.
#[must_use]
pub fn run(settings: Settings, load: LoadSettings) -> ExitCode {
    let format = settings.gateway.log_format;
    let level = match parse_level(&settings.gateway.log_level) {
        Ok(level) => level,
        Err(error) => return unusable(format, &format!("gateway.log_level: {error}")),
    };
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return unusable(format, &format!("no runtime: {error}")),
    };
    // The log counts what it drops: the recorder comes first.
    drop(Metrics::install());
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
    let ended = runtime.block_on(started(settings, load));
    // Nobody waits for a tokenizer's thread.
    runtime.shutdown_background();
    logs.flush();
    match ended {
        Ok(Ended::Drained(_)) => ExitCode::SUCCESS,
        Ok(Ended::AtOnce(signal)) => ExitCode::from(signal.exit_code()),
        Err(error) => unusable(format, &error),
    }
}

/// Starts and runs a gateway, and says why it cannot.
async fn started(settings: Settings, load: LoadSettings) -> Result<Ended, String> {
    let hear = |error| format!("signals cannot be heard: {error}");
    let (mut signals, hangups) = (signals().map_err(hear)?, hangups().map_err(hear)?);
    let gateway = tokio::select! {
        biased;
        // Nothing has been accepted yet.
        Some(_) = signals.recv() => return Ok(Ended::Drained(Drained { broken: 0 })),
        gateway = Gateway::start_reloadable(settings, load) => gateway.map_err(|error| error.to_string())?,
    };
    let admin_address = gateway.admin_address().map(tracing::field::display);
    tracing::info!(address = %gateway.address(), admin_address, version = env!("CARGO_PKG_VERSION"), "listening");
    let reloads = tokio::spawn(reload_at(hangups, Arc::clone(&gateway.reloader)));
    let ended = run_until(gateway, signals).await;
    reloads.abort();
    Ok(ended)
}

/// Runs a gateway until the first of `signals` has drained it, or the second one ends it at once.
pub async fn run_until(gateway: Gateway, mut signals: mpsc::Receiver<Signal>) -> Ended {
    let signal = signals.recv().await;
    // As they are now: a reload may have changed them.
    let app = gateway.current.get();
    let drain_delay = Duration::from_millis(app.settings.gateway.drain_delay_ms);
    let drain_timeout = Duration::from_millis(app.settings.gateway.drain_timeout_ms);
    drop(app);
    let Some(signal) = signal else {
        // Whoever sends signals has gone, and nobody could end it any more.
        return Ended::Drained(gateway.shutdown(drain_timeout).await);
    };
    tracing::info!(?signal, "ending: no longer ready");
    gateway.begin_drain();
    let drained = async {
        sleep(drain_delay).await;
        tracing::info!("no new connections; requests in flight may end");
        gateway.shutdown(drain_timeout).await
    };
    tokio::select! {
        biased;
        Some(signal) = signals.recv() => {
            tracing::warn!(?signal, "ending at once");
            Ended::AtOnce(signal)
        }
        drained = drained => {
            match drained.broken {
                0 => tracing::info!("ended: nothing was in flight any more"),
                broken => tracing::warn!(broken, "ended: connections were still busy after drain_timeout_ms, and were broken"),
            }
            Ended::Drained(drained)
        }
    }
}

/// Reloads the settings at each SIGHUP; several that come during a reload are one.
async fn reload_at(mut hangups: mpsc::Receiver<()>, reloader: Arc<Reloader>) {
    while hangups.recv().await.is_some() {
        tracing::info!("SIGHUP: configuration reload requested");
        // It is reported by whoever reloads.
        let _ = reloader.reload().await;
    }
}

/// Reports why a gateway cannot start, whether the log works or not.
fn unusable(format: LogFormat, why: &str) -> ExitCode {
    match format {
        LogFormat::Text => refuse(format, &format!("error: {why}")),
        LogFormat::Json => refuse(format, why),
    }
}

/// Reports on stderr why a gateway is not even started: a problem a line, in the format of the log.
#[must_use]
pub fn refuse(format: LogFormat, problems: &str) -> ExitCode {
    write_problems(format, problems);
    ExitCode::from(UNUSABLE)
}

/// The process's signals, from now on.
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
            let heard = tokio::select! {
                biased;
                Some(()) = interrupt.recv() => Signal::Interrupt,
                Some(()) = terminate.recv() => Signal::Terminate,
                else => return,
            };
            if sender.send(heard).await.is_err() {
                return;
            }
        }
    });
    Ok(receiver)
}

/// SIGHUP, from now on.
#[cfg(unix)]
fn hangups() -> std::io::Result<mpsc::Receiver<()>> {
    use tokio::signal::unix::{SignalKind, signal};
    let (sender, receiver) = mpsc::channel(1);
    let mut hangup = signal(SignalKind::hangup())?;
    tokio::spawn(async move {
        // One that waits stands for all that came since.
        while hangup.recv().await.is_some() && !matches!(sender.try_send(()), Err(TrySendError::Closed(()))) {}
    });
    Ok(receiver)
}

/// None, where there is no SIGHUP.
#[cfg(not(unix))]
fn hangups() -> std::io::Result<mpsc::Receiver<()>> {
    Ok(mpsc::channel(1).1)
}

/// Ctrl-C, which is all that other systems have.
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
