//! Worker files.
//!
//! The format is a list `workers`, each with `url`, an optional `id`, `probe`, and the fields of
//! [`WorkerConfig`](crate::protocol::WorkerConfig). A file is accepted or rejected as a whole, with the line or the
//! worker and the violated rule; unknown keys are errors. The actors read the files.

mod entry;
#[cfg(test)]
mod tests;

use serde::Deserialize;

use super::{DuplicateWorker, HttpUrlError, NamedWorker, worker_map};

/// File format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileFormat {
    /// TOML.
    Toml,
    /// JSON.
    Json,
}

/// Reason for rejecting a file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FileError {
    /// The file name has an unknown extension.
    #[error("its name must end in .toml or .json")]
    Format,
    /// The file exceeds the maximum size.
    #[error("it is longer than {0} bytes")]
    TooLong(usize),
    /// The file is not text.
    #[error("it is not UTF-8")]
    NotText,
    /// Invalid TOML or JSON, an unknown key, or a value of the wrong type.
    #[error("line {line}: {reason}")]
    Line {
        /// The line, from 1.
        line: usize,
        /// The parser's message.
        reason: String,
    },
    /// A worker with an invalid address.
    #[error("workers[{position}]: {error}")]
    Url {
        /// The worker's position, from 0.
        position: usize,
        /// The defect of the address.
        error: HttpUrlError,
    },
    /// A worker whose settings violate a rule.
    #[error("workers[{position}] at {url:?}: {rule}")]
    Worker {
        /// The worker's position, from 0.
        position: usize,
        /// Its address.
        url: String,
        /// The setting, its value and the rule.
        rule: String,
    },
    /// Two workers with the same id or engine.
    #[error(transparent)]
    Duplicate(#[from] DuplicateWorker),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    workers: Vec<entry::Entry>,
}

impl FileError {
    /// The error without the line or the position in the file.
    fn reason(self) -> String {
        match self {
            Self::Line { reason, .. } | Self::Worker { rule: reason, .. } => reason,
            Self::Url { error, .. } => error.to_string(),
            Self::Format | Self::TooLong(_) | Self::NotText | Self::Duplicate(_) => self.to_string(),
        }
    }
}

impl NamedWorker {
    /// Workers as a workers file in TOML lists them, for settings that contain such a table.
    ///
    /// ```
    /// use pointsman::NamedWorker;
    ///
    /// let workers = NamedWorker::list_of_toml("[[workers]]\nurl = \"http://10.0.0.1:8000\"")?;
    /// assert_eq!(workers[0].config.endpoint, "http://10.0.0.1:8000");
    /// # Ok::<(), String>(())
    /// ```
    ///
    /// # Errors
    /// Invalid TOML, or workers that a file would be rejected for, without the line or the position.
    pub fn list_of_toml(text: &str) -> Result<Vec<Self>, String> {
        FileFormat::Toml.parse(text.as_bytes()).map_err(FileError::reason)
    }
}

impl FileFormat {
    /// Maximum size in bytes.
    pub const BYTES_MAX: usize = 8 << 20;

    /// The format for a file name.
    ///
    /// # Errors
    /// If the extension is neither `toml` nor `json`.
    pub fn of_name(name: &str) -> Result<Self, FileError> {
        match name.rsplit_once('.') {
            Some((_, extension)) if extension.eq_ignore_ascii_case("toml") => Ok(Self::Toml),
            Some((_, extension)) if extension.eq_ignore_ascii_case("json") => Ok(Self::Json),
            Some(_) | None => Err(FileError::Format),
        }
    }

    /// Parses a file.
    ///
    /// ```
    /// use pointsman::internals::discovery::FileFormat;
    ///
    /// let file = r#"
    ///     [[workers]]
    ///     url = "http://10.0.0.7:8000"
    ///     data_parallel_size = 2
    ///     kv_events = { endpoint = "tcp://*:5557" }
    /// "#;
    /// let workers = FileFormat::Toml.parse(file.as_bytes())?;
    /// assert_eq!(workers[0].config.data_parallel_size, 2);
    /// # Ok::<(), pointsman::internals::discovery::FileError>(())
    /// ```
    ///
    /// # Errors
    /// The first defect. A file without `workers` counts as truncated, not as empty; an empty list is `workers = []`.
    pub fn parse(self, content: &[u8]) -> Result<Vec<NamedWorker>, FileError> {
        if content.len() > Self::BYTES_MAX {
            return Err(FileError::TooLong(Self::BYTES_MAX));
        }
        let text = std::str::from_utf8(content).map_err(|_| FileError::NotText)?;
        let File { workers } = match self {
            Self::Toml => toml::from_str(text).map_err(|error| of_toml(text, &error))?,
            Self::Json => serde_json::from_str(text).map_err(|error| of_json(&error))?,
        };
        let workers: Vec<NamedWorker> = workers.into_iter().map(|entry| entry.0).collect();
        let workers = workers.into_iter().enumerate().map(|(position, worker)| checked(position, worker));
        let workers = workers.collect::<Result<Vec<_>, _>>()?;
        worker_map(workers.iter().map(|worker| (worker.id, worker.config.clone())))?;
        Ok(workers)
    }
}

fn checked(position: usize, worker: NamedWorker) -> Result<NamedWorker, FileError> {
    let NamedWorker { id, config, probe } = worker;
    let named = NamedWorker::at(&config.endpoint, &config);
    let named = if probe { named.map(NamedWorker::probed) } else { named };
    let named = named.map_err(|error| FileError::Url { position, error })?;
    match named.config.validate() {
        Ok(()) => Ok(NamedWorker { id, ..named }),
        Err(error) => {
            let (url, rule) = (config.endpoint, error.to_string());
            Err(FileError::Worker { position, url, rule })
        }
    }
}

fn of_toml(text: &str, error: &toml::de::Error) -> FileError {
    let at = error.span().map_or(0, |span| span.start).min(text.len());
    let line = 1 + text.as_bytes()[..at].iter().filter(|byte| **byte == b'\n').count();
    FileError::Line { line, reason: error.message().to_owned() }
}

fn of_json(error: &serde_json::Error) -> FileError {
    let shown = error.to_string();
    let reason = shown.rsplit_once(" at line ").map_or(shown.as_str(), |(reason, _)| reason);
    FileError::Line { line: error.line(), reason: reason.to_owned() }
}
