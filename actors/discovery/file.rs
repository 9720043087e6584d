//! Discovery of workers in a file that is polled.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::io::AsyncReadExt as _;
use tokio::time::{Instant, sleep_until};

use super::prober::{ProbeOptions, Prober};
use super::source::DiscoverySource;
use crate::discovery::{Changes, DiscoveryError, EngineError, FileError, FileFormat, NamedWorker, worker_map};
use crate::protocol::WorkerMap;

/// Default interval of polls.
const INTERVAL: Duration = Duration::from_secs(1);

/// A TOML or JSON file of workers. The content is read every second, so a file replaced by a rename is detected on any
/// file system. An invalid file is reported, and the last valid one stays in force.
///
/// ```
/// use pointsman::{ProbeOptions, RouterConfig, WatchedFile};
///
/// let options = ProbeOptions::of(&RouterConfig::default());
/// assert!(WatchedFile::new("workers.yaml", options.clone()).is_err());
/// let source = WatchedFile::new("workers.toml", options)?;
/// # Ok::<(), pointsman::DiscoveryError>(())
/// ```
#[derive(Debug)]
pub struct WatchedFile {
    path: PathBuf,
    format: FileFormat,
    interval: Duration,
    /// For workers with `probe = true`.
    prober: Prober,
    /// Next poll of the file, and next probe of the workers.
    next_at: Instant,
    ask_at: Instant,
    /// Content of the last read, valid or not.
    content: Option<Vec<u8>>,
    /// Error of that content.
    broken: Option<DiscoveryError>,
    /// Workers of the last valid content.
    workers: Option<Vec<NamedWorker>>,
    /// The same workers completed by probes, with the errors of the others.
    set: Option<WorkerMap>,
    errors: Vec<EngineError>,
    changes: Changes,
}

impl WatchedFile {
    /// Whether a workers file can have this name: it ends in `.toml` or `.json`.
    #[must_use]
    pub fn is_name(name: &str) -> bool {
        FileFormat::of_name(name).is_ok()
    }

    /// Follows a file, which may be missing at first. `options` apply to workers with `probe = true`.
    ///
    /// # Errors
    /// A name that ends in neither `.toml` nor `.json`.
    pub fn new(path: impl Into<PathBuf>, options: ProbeOptions) -> Result<Self, DiscoveryError> {
        let path = path.into();
        let format = format_of(&path)?;
        Ok(Self {
            path,
            format,
            interval: INTERVAL,
            prober: Prober::new(options),
            next_at: Instant::now(),
            ask_at: Instant::now(),
            content: None,
            broken: None,
            workers: None,
            set: None,
            errors: Vec::new(),
            changes: Changes::default(),
        })
    }

    /// Follows another file from now on. Until it is valid, the last valid set stays in force.
    ///
    /// # Errors
    /// A name that ends in neither `.toml` nor `.json`; the previous file stays.
    pub fn set(&mut self, path: impl Into<PathBuf>) -> Result<(), DiscoveryError> {
        let path = path.into();
        (self.format, self.path) = (format_of(&path)?, path);
        (self.content, self.next_at) = (None, Instant::now());
        Ok(())
    }

    /// Sets the interval of polls. Default 1 second.
    #[must_use]
    pub fn every(mut self, interval: Duration) -> Self {
        self.interval = interval;
        self
    }

    async fn refresh(&mut self) -> Option<Result<WorkerMap, DiscoveryError>> {
        match read(&self.path).await {
            Ok(content) if self.content.as_ref() == Some(&content) => {}
            Ok(content) => match self.format.parse(&content) {
                Ok(mut workers) => {
                    locate_key_files(&mut workers, &self.path);
                    (self.content, self.workers, self.broken) = (Some(content), Some(workers), None);
                    self.set = None;
                }
                Err(error) => {
                    self.broken = Some(DiscoveryError::File { path: self.path.display().to_string(), error });
                    self.content = Some(content);
                }
            },
            Err(error) => (self.broken, self.content) = (Some(error), None),
        }
        if let Err(error) = self.complete().await {
            return self.changes.look(None, Some(error));
        }
        let engines = (!self.errors.is_empty()).then(|| DiscoveryError::Engines(self.errors.clone()));
        self.changes.look(self.set.clone(), self.broken.clone().or(engines))
    }

    /// Probes the workers with `probe = true`, if the file has changed or the interval has passed.
    async fn complete(&mut self) -> Result<(), DiscoveryError> {
        let Some(workers) = &self.workers else { return Ok(()) };
        let is_time = workers.iter().any(|worker| worker.probe) && Instant::now() >= self.ask_at;
        if self.set.is_none() || is_time {
            let (complete, errors) = self.prober.ask(workers).await;
            self.ask_at = Instant::now() + self.prober.options.interval;
            self.errors = errors;
            self.set = Some(worker_map(complete)?);
        }
        Ok(())
    }
}

impl DiscoverySource for WatchedFile {
    fn name(&self) -> String {
        self.path.display().to_string()
    }

    async fn next(&mut self) -> Option<Result<WorkerMap, DiscoveryError>> {
        loop {
            if let Some(complaint) = self.changes.pending() {
                return Some(Err(complaint));
            }
            sleep_until(self.next_at).await;
            let news = self.refresh().await;
            self.next_at = Instant::now() + self.interval;
            if news.is_some() {
                return news;
            }
        }
    }

    fn rewind(&mut self) {
        self.changes.forget();
        self.next_at = Instant::now();
    }
}

fn format_of(path: &Path) -> Result<FileFormat, DiscoveryError> {
    let format = FileFormat::of_name(&path.to_string_lossy());
    format.map_err(|error| DiscoveryError::File { path: path.display().to_string(), error })
}

/// Makes the paths of key files relative to the directory of the worker file.
fn locate_key_files(workers: &mut [NamedWorker], path: &Path) {
    let Some(directory) = path.parent() else { return };
    for file in workers.iter_mut().filter_map(|worker| worker.config.api_key_file.as_mut()) {
        *file = directory.join(&*file);
    }
}

/// Reads a regular file up to the length limit.
async fn read(path: &Path) -> Result<Vec<u8>, DiscoveryError> {
    let unreadable = |reason: String| DiscoveryError::Unreadable { path: path.display().to_string(), reason };
    // A read of a pipe or device could block.
    let metadata = tokio::fs::metadata(path).await.map_err(|error| unreadable(error.to_string()))?;
    if !metadata.is_file() {
        return Err(unreadable("not a regular file".to_owned()));
    }
    let file = tokio::fs::File::open(path).await.map_err(|error| unreadable(error.to_string()))?;
    let mut content = Vec::new();
    let read = file.take(FileFormat::BYTES_MAX as u64 + 1).read_to_end(&mut content).await;
    read.map_err(|error| unreadable(error.to_string()))?;
    if content.len() > FileFormat::BYTES_MAX {
        let error = FileError::TooLong(FileFormat::BYTES_MAX);
        return Err(DiscoveryError::File { path: path.display().to_string(), error });
    }
    Ok(content)
}
