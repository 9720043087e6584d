//! API keys of workers, by file.
//!
//! The keys of the settings are validated at the start and at a reload. Files that only a worker source names are read at
//! their first use. Every file is read again at the next poll of an engine, at most once per second, so that a replaced key
//! needs no reload. A file that becomes unusable keeps its last key. Contents are never printed.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::http::HeaderValue;
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::settings::{Secret, SecretError};

/// Age at which a poll reads a file again.
const FRESH_MAX: Duration = Duration::from_secs(1);

/// A key file and the setting that names it.
#[derive(Clone)]
pub(super) struct KeyFile {
    pub(super) setting: &'static str,
    pub(super) file: PathBuf,
}

/// Keys that have been read.
#[derive(Default)]
pub(super) struct WorkerKeys(Mutex<BTreeMap<PathBuf, KnownKey>>);

struct KnownKey {
    /// `Authorization` header, marked sensitive.
    header: HeaderValue,
    read_at: Instant,
    /// Whether the last read failed, which was logged.
    is_failing: bool,
}

impl WorkerKeys {
    /// Replaces all keys by those of the settings.
    pub(super) fn set(&self, keys: &BTreeMap<PathBuf, Secret>) {
        let read_at = Instant::now();
        let known = keys.iter().filter_map(|(file, key)| {
            Some((file.clone(), KnownKey { header: key.bearer()?, read_at, is_failing: false }))
        });
        *self.0.lock() = known.collect();
    }

    /// The header for the key in a file, which is read only once.
    ///
    /// # Errors
    /// An unusable file.
    pub(super) fn header(&self, file: &KeyFile) -> Result<HeaderValue, SecretError> {
        if let Some(known) = self.0.lock().get(&file.file) {
            return Ok(known.header.clone());
        }
        self.read(file)
    }

    /// As [`header`](Self::header), from the present content of the file.
    ///
    /// # Errors
    /// A file that has been unusable since its first use.
    pub(super) async fn fresh_header(self: &Arc<Self>, file: &KeyFile) -> Result<HeaderValue, SecretError> {
        if let Some(known) = self.0.lock().get(&file.file).filter(|known| known.read_at.elapsed() < FRESH_MAX) {
            return Ok(known.header.clone());
        }
        let (keys, path) = (Arc::clone(self), file.clone());
        let read = tokio::task::spawn_blocking(move || keys.read(&path)).await;
        read.unwrap_or_else(|_| self.header(file))
    }

    fn read(&self, KeyFile { setting, file }: &KeyFile) -> Result<HeaderValue, SecretError> {
        let read = Secret::worker_key(setting, file);
        let (mut known, read_at) = (self.0.lock(), Instant::now());
        match read {
            Ok(key) => {
                let header = key.bearer().expect("a worker key is printable");
                known.insert(file.clone(), KnownKey { header: header.clone(), read_at, is_failing: false });
                Ok(header)
            }
            Err(error) => {
                let Some(known) = known.get_mut(file) else { return Err(error) };
                known.read_at = read_at;
                if !std::mem::replace(&mut known.is_failing, true) {
                    tracing::warn!(%error, "API key of workers unusable; the last one stays in use");
                }
                Ok(known.header.clone())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn polls_replace_keys_and_an_unusable_file_keeps_its_last_key() {
        let file = std::env::temp_dir().join(format!("pointsman-worker-keys-{}", std::process::id()));
        std::fs::write(&file, "first\n").expect("file written");
        let keys = Arc::new(WorkerKeys::default());
        let of = KeyFile { setting: "gateway.worker_api_key_file", file: file.clone() };
        let shown = |header: Result<HeaderValue, SecretError>| {
            let header = header.expect("a key");
            assert!(header.is_sensitive());
            header.to_str().expect("text").to_owned()
        };
        assert_eq!(shown(keys.header(&of)), "Bearer first");
        std::fs::write(&file, "second").expect("file written");
        assert_eq!(shown(keys.fresh_header(&of).await), "Bearer first", "read less than a second ago");
        tokio::time::advance(FRESH_MAX).await;
        assert_eq!(shown(keys.header(&of)), "Bearer first", "requests read no file again");
        assert_eq!(shown(keys.fresh_header(&of).await), "Bearer second");
        assert_eq!(shown(keys.header(&of)), "Bearer second");
        for content in [Some("two words"), None] {
            match content {
                Some(content) => std::fs::write(&file, content).expect("file written"),
                None => std::fs::remove_file(&file).expect("file removed"),
            }
            tokio::time::advance(FRESH_MAX).await;
            assert_eq!(shown(keys.fresh_header(&of).await), "Bearer second");
        }
        keys.set(&BTreeMap::new());
        let error = keys.header(&of).expect_err("no file and no former key").to_string();
        assert!(error.starts_with("gateway.worker_api_key_file is /") && error.contains("cannot be read"), "{error}");
        keys.set(&BTreeMap::from([(file.clone(), Secret::new("third"))]));
        assert_eq!(shown(keys.header(&of)), "Bearer third");
    }
}
