//! Files of recorded decisions: `POOL.NUMBER.decisions` in the directory `gateway.decision_path`.
//!
//! A task appends the new entries of every model once a second, and the end of a regular shutdown appends the last ones.
//! Decisions do not wait for it: entries that leave the memory before they are written are lost and counted. A file begins
//! with a keyframe. The oldest file is removed after its successor has entries, and a failed write leaves no trace, so a
//! full disk costs new entries only.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use metrics::counter;
use pointsman::{RecordCursor, RecordFile, RecordPart, Router, WorkerEntry};
use tokio::sync::Mutex;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep};

use super::latest::Latest;
use super::serving::Pools;
use crate::formats::live::names::worker_name;
use crate::observe::clock::unix_ms;
use crate::observe::metric::metric_table;
use crate::observe::throttle::LogThrottle;
use crate::settings::GatewaySettings;

metric_table! {
    LOST: counter "pointsman_gateway_decision_segments_lost_total" ["model"] =
        "Segments of recorded decisions that were not written to files, or not completely: they left the memory \
         first, or a write failed.";
    BYTES: counter "pointsman_gateway_decision_bytes_total" ["model"] = "Bytes written to files of recorded decisions.";
}

/// Interval of writes.
const INTERVAL: Duration = Duration::from_secs(1);

/// Interval of log lines on failed writes.
const FAILURE_LINES: Duration = Duration::from_secs(60);

/// The files of every model.
pub(crate) struct DecisionFiles {
    writers: Mutex<BTreeMap<String, DecisionWriter>>,
    failures: LogThrottle,
}

impl Default for DecisionFiles {
    fn default() -> Self {
        Self { writers: Mutex::default(), failures: LogThrottle::new(FAILURE_LINES) }
    }
}

impl DecisionFiles {
    /// Appends new entries once per [`INTERVAL`].
    pub(crate) async fn write_continuously(self: Arc<Self>, latest: Latest<Pools>) {
        loop {
            sleep(INTERVAL).await;
            self.write(&latest.get()).await;
        }
    }

    /// Appends the new entries of every model.
    pub(crate) async fn write(&self, pools: &Pools) {
        let gateway = &pools.settings.gateway;
        if gateway.decision_path.is_none() {
            return;
        }
        let mut writers = self.writers.lock().await;
        for model in pools.models.all() {
            let (router, name) = (model.router.clone(), model.settings.name.clone());
            let mut writer = writers.remove(&name).unwrap_or_default();
            let settings = gateway.clone();
            let work = move || {
                let written = writer.write(&router, &settings);
                (writer, written)
            };
            let Ok((writer, written)) = spawn_blocking(work).await else { continue }; // it starts a new file
            match written {
                Ok(Written { bytes, lost }) => {
                    counter!(BYTES.name, "model" => name.clone()).increment(bytes);
                    counter!(LOST.name, "model" => name.clone()).increment(lost);
                }
                Err(error) => {
                    counter!(LOST.name, "model" => name.clone()).increment(1);
                    if let Some(suppressed) = self.failures.next_line(Instant::now()) {
                        tracing::warn!(model = name, %error, suppressed, "recorded decisions could not be written");
                    }
                }
            }
            writers.insert(name, writer);
        }
    }
}

/// Writer of the files of one model.
#[derive(Debug, Default)]
struct DecisionWriter {
    cursor: RecordCursor,
    /// The present file and its length.
    file: Option<(File, u64)>,
    /// Workers whose names are in the present file.
    named: Option<Arc<[WorkerEntry]>>,
    /// Whether entries of the present segment are missing in the file.
    is_broken: bool,
}

/// Result of a write.
#[derive(Debug, PartialEq, Eq)]
struct Written {
    bytes: u64,
    /// Segments of which entries are missing.
    lost: u64,
}

impl DecisionWriter {
    fn write(&mut self, router: &Router, settings: &GatewaySettings) -> io::Result<Written> {
        let Some(directory) = &settings.decision_path else { return Ok(Written { bytes: 0, lost: 0 }) };
        let (parts, mut lost) = router.records_after(&mut self.cursor);
        let pool = &router.config().pool;
        let clock_start_unix_ms = unix_ms().saturating_sub(router.now().0 / 1_000_000);
        let mut bytes = 0;
        for part in parts {
            match self.append(&part, directory, settings, (pool, &router.workers()), clock_start_unix_ms) {
                Ok(Some(appended)) => bytes += appended,
                Ok(None) => lost += 1,
                Err(error) => return Err(error),
            }
        }
        Ok(Written { bytes, lost })
    }

    /// Appends entries. `None` if the beginning of their segment is in no file.
    fn append(
        &mut self,
        part: &RecordPart,
        directory: &Path,
        settings: &GatewaySettings,
        (pool, workers): (&str, &Arc<[WorkerEntry]>),
        clock_start_unix_ms: u64,
    ) -> io::Result<Option<u64>> {
        if self.is_broken && !part.begins {
            return Ok(None);
        }
        let is_full = self.file.as_ref().is_none_or(|(_, length)| *length >= settings.decision_file_bytes_max);
        let is_new = is_full && part.begins;
        if !is_new && self.file.is_none() {
            return Ok(None);
        }
        let mut bytes = if is_new { RecordFile::head().to_vec() } else { Vec::new() };
        if is_new || self.named.as_ref().is_none_or(|named| !Arc::ptr_eq(named, workers)) {
            let names: Vec<_> =
                workers.iter().map(|entry| (entry.worker, worker_name(&entry.config.endpoint))).collect();
            RecordFile::put_names(&mut bytes, &names);
        }
        RecordFile::put(&mut bytes, part, pool, clock_start_unix_ms);
        let added = bytes.len() as u64;
        // Until the next segment begins, unless this entry is written.
        self.is_broken = true;
        if is_new {
            self.file = Some((next_file(directory, pool, settings.decision_files_max, &bytes)?, added));
        } else if let Some((file, length)) = &mut self.file {
            if let Err(error) = file.write_all(&bytes) {
                // A part of an entry would end the readable contents of the file.
                if file.set_len(*length).and_then(|()| file.seek(SeekFrom::Start(*length))).is_err() {
                    self.file = None;
                }
                return Err(error);
            }
            *length += added;
        }
        (self.named, self.is_broken) = (Some(Arc::clone(workers)), false);
        Ok(Some(added))
    }
}

/// A new file with these contents after the existing ones of the pool, of which at most `files_max` − 1 are left.
fn next_file(directory: &Path, pool: &str, files_max: u32, contents: &[u8]) -> io::Result<File> {
    fs::create_dir_all(directory)?;
    let known = files_of(directory, pool)?;
    let next = known.last_key_value().map_or(0, |(number, _)| number + 1);
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt as _;
        options.mode(0o600);
    }
    let path = directory.join(format!("{pool}.{next:08}.decisions"));
    let mut file = options.open(&path)?;
    if let Err(error) = file.write_all(contents) {
        drop(fs::remove_file(path));
        return Err(error);
    }
    let surplus = (known.len() + 1).saturating_sub(files_max as usize);
    for path in known.values().take(surplus) {
        match fs::remove_file(path) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            Ok(()) | Err(_) => {}
        }
    }
    Ok(file)
}

/// Files of a pool, by number.
fn files_of(directory: &Path, pool: &str) -> io::Result<BTreeMap<u64, PathBuf>> {
    let mut known = BTreeMap::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let number = name.strip_prefix(pool).and_then(|rest| rest.strip_prefix('.'));
        let number = number.and_then(|rest| rest.strip_suffix(".decisions")).and_then(|number| number.parse().ok());
        if let Some(number) = number {
            known.insert(number, path);
        }
    }
    Ok(known)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_rotate_and_the_oldest_are_removed() {
        let directory = std::env::temp_dir().join(format!("pointsman-decisions-{}", std::process::id()));
        let settings =
            GatewaySettings { decision_file_bytes_max: 100, decision_files_max: 3, ..GatewaySettings::default() };
        let (mut writer, workers) = (DecisionWriter::default(), Arc::from([]));
        let mut append = |sequence: u64, begins: bool| {
            let part = RecordPart { sequence, begins, bytes: vec![1; 80], ends: vec![80] };
            writer.append(&part, &directory, &settings, ("a.b", &workers), 0).expect("written")
        };
        assert_eq!(append(0, false), None, "no file has the beginning of the segment");
        for sequence in 1..10 {
            assert!(append(sequence, true).is_some());
            assert!(append(sequence, false).is_some(), "a full file takes the rest of a segment");
        }
        let files = files_of(&directory, "a.b").expect("listed");
        assert_eq!(files.keys().copied().collect::<Vec<_>>(), [6, 7, 8]);
        assert!(files_of(&directory, "a").expect("listed").is_empty(), "another pool");
        for path in files.values() {
            let bytes = fs::read(path).expect("readable");
            let end = RecordFile::read(&bytes, &mut |_| {}).expect("a file of records");
            assert_eq!((end.parts, end.damaged_at), (3, None), "names and two parts");
        }
        fs::remove_dir_all(&directory).expect("removed");
    }

    /// `/dev/full` rejects every write, as a full disk.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_failed_write_costs_the_rest_of_its_segment_only() {
        let directory = std::env::temp_dir().join(format!("pointsman-full-{}", std::process::id()));
        let (settings, workers) = (GatewaySettings::default(), Arc::from([]));
        let mut writer = DecisionWriter::default();
        let append = |writer: &mut DecisionWriter, sequence: u64, begins: bool| {
            let part = RecordPart { sequence, begins, bytes: vec![1; 80], ends: vec![80] };
            writer.append(&part, &directory, &settings, ("a", &workers), 0).map(|written| written.is_some())
        };
        assert!(append(&mut writer, 0, true).expect("written"));
        let full = OpenOptions::new().write(true).open("/dev/full").expect("opened");
        let good = writer.file.replace((full, 0));
        append(&mut writer, 1, true).expect_err("no space");
        assert!(writer.file.is_none(), "a device cannot be shortened");
        writer.file = good;
        assert!(!append(&mut writer, 2, false).expect("skipped"), "the beginning of the segment is missing");
        assert!(append(&mut writer, 3, true).expect("space again"));
        let files = files_of(&directory, "a").expect("listed");
        let bytes = fs::read(&files[&0]).expect("readable");
        let end = RecordFile::read(&bytes, &mut |_| {}).expect("a file of records");
        assert_eq!((files.len(), end.parts, end.damaged_at), (1, 3, None), "names and two segments");
        fs::remove_dir_all(&directory).expect("removed");
    }
}
