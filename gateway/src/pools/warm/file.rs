//! Snapshot files: `POOL.snapshot` in the directory `gateway.snapshot_path`.
//!
//! A file is written under another name, synchronized to the disk and renamed, so a reader finds the previous file or
//! the complete new one. One gateway uses a directory.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use pointsman::{RouterConfig, Snapshot, SnapshotError};

/// Reason to ignore a snapshot file.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReadError {
    /// The file cannot be read.
    #[error("cannot be read: {0}")]
    Io(#[from] io::Error),
    /// Other contents than a snapshot of the pool.
    #[error(transparent)]
    Refused(#[from] SnapshotError),
    /// The reading thread ended.
    #[error("cannot be read: {0}")]
    Lost(String),
}

impl ReadError {
    /// Name in metrics.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Io(_) | Self::Lost(_) => "failed",
            Self::Refused(error) => error.name(),
        }
    }
}

/// File of a pool. Pool names are valid file names.
pub(super) fn path_of(directory: &Path, pool: &str) -> PathBuf {
    directory.join(format!("{pool}.snapshot"))
}

/// Reads the snapshot of a pool with this configuration; `None` without a file. A size that follows from the engines is
/// compared by the router, once it is known.
pub(super) fn read(path: &Path, pool: &RouterConfig) -> Result<Option<Snapshot>, ReadError> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let snapshot = Snapshot::decode(&bytes)?;
    snapshot.check_pool(pool, pool.block_size)?;
    Ok(Some(snapshot))
}

/// Replaces the file at `path`. Creates its directory.
pub(super) fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(directory)?;
    let unfinished = path.with_extension("snapshot.tmp");
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt as _;
        options.mode(0o600);
    }
    let mut file = options.open(&unfinished)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    drop(file);
    fs::rename(&unfinished, path)?;
    // The rename is durable once the directory is synchronized. Only Unix opens directories.
    if cfg!(unix) { File::open(directory)?.sync_all() } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use pointsman::internals::snapshot::SnapshotLayout;

    use super::*;

    #[test]
    fn a_file_is_replaced_as_a_whole_and_refused_by_name() {
        let directory = std::env::temp_dir().join(format!("pointsman-snapshot-{}", std::process::id()));
        let path = path_of(&directory, "a.b");
        assert_eq!(path.file_name().and_then(|name| name.to_str()), Some("a.b.snapshot"));
        let pool = RouterConfig { block_size: Some(64), ..RouterConfig::default() };
        let layout = SnapshotLayout::of(&pool, 64);
        assert!(matches!(read(&path, &pool), Ok(None)));
        let snapshot = |created_ms| Snapshot { layout: layout.clone(), created_ms, ranks: Vec::new() };
        for created_ms in [1, 2] {
            write(&path, &snapshot(created_ms).encode()).expect("written");
            assert_eq!(read(&path, &pool).expect("readable"), Some(snapshot(created_ms)));
        }
        assert_eq!(fs::read_dir(&directory).expect("the directory exists").count(), 1, "no unfinished file is left");

        let other = RouterConfig { block_size: Some(1), ..pool.clone() };
        assert_eq!(read(&path, &other).expect_err("another layout").name(), "layout");
        assert!(read(&path, &RouterConfig::default()).is_ok(), "the engines will report the size");
        let bytes = snapshot(3).encode();
        write(&path, &bytes[..bytes.len() - 1]).expect("written");
        assert_eq!(read(&path, &pool).expect_err("truncated").name(), "checksum");
        fs::create_dir(path_of(&directory, "d")).expect("created");
        assert_eq!(read(&path_of(&directory, "d"), &pool).expect_err("a directory").name(), "failed");
        assert!(write(&path.join("x"), b"").is_err(), "a file is no directory");
        fs::remove_dir_all(&directory).expect("removed");
    }
}
