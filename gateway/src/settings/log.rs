//! Destinations and levels of the logs.

use std::path::PathBuf;

use tracing_subscriber::filter::{LevelFilter, Targets};

/// Destination of the access log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AccessLog {
    /// Disabled.
    Off,
    /// The standard output of the process.
    Stdout,
    /// The standard error of the process, beside the log.
    Stderr,
    /// Appended to this file.
    File(PathBuf),
}

impl AccessLog {
    /// Parses `gateway.access_log`; `None` if the value breaks the rule.
    ///
    /// ```
    /// use pointsman_gateway::settings::AccessLog;
    ///
    /// assert_eq!(AccessLog::parse("stdout"), Some(AccessLog::Stdout));
    /// assert_eq!(AccessLog::parse("/var/log/a.jsonl"), Some(AccessLog::File("/var/log/a.jsonl".into())));
    /// assert_eq!(AccessLog::parse("access.jsonl"), None);
    /// ```
    pub fn parse(value: &str) -> Option<Self> {
        match value {
            "off" => Some(Self::Off),
            "stdout" => Some(Self::Stdout),
            "stderr" => Some(Self::Stderr),
            path => Some(PathBuf::from(path)).filter(|path| path.is_absolute()).map(Self::File),
        }
    }
}

/// Filter of a `log_level`: a level, targets with levels, or both, separated by commas. Targets that no part covers are
/// disabled.
///
/// ```
/// use pointsman_gateway::settings::parse_level;
///
/// let level = parse_level("info,pointsman::route=debug").unwrap();
/// assert!(level.would_enable("pointsman::route", &tracing::Level::DEBUG));
/// assert!(!level.would_enable("pointsman::queue", &tracing::Level::DEBUG));
/// let error = parse_level("info,verbose").unwrap_err();
/// assert!(error.starts_with("\"verbose\" is no log level"));
/// ```
///
/// # Errors
/// A part that is not a level.
pub fn parse_level(level: &str) -> Result<Targets, String> {
    level.split(',').map(str::trim).try_fold(Targets::new(), |targets, part| {
        let wrong = || {
            format!(
                "{part:?} is no log level, must be error, warn, info, debug, trace or off, or TARGET= and one of them"
            )
        };
        let (target, level) = part.split_once('=').map_or((None, part), |(target, level)| (Some(target), level));
        let level = named_level(level).ok_or_else(wrong)?;
        match target {
            None => Ok(targets.with_default(level)),
            Some("") => Err(wrong()),
            Some(target) => Ok(targets.with_target(target, level)),
        }
    })
}

/// A level by name. The parser also takes numbers and an empty text.
fn named_level(name: &str) -> Option<LevelFilter> {
    name.parse().ok().filter(|_| name.starts_with(|first: char| first.is_ascii_alphabetic()))
}
