//! Bounded line reader with a checksum of the whole file.
//!
//! Memory is limited to one line of the maximum length for any file. The formats parse the lines.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::Xxh3;

use crate::workload::WorkloadError;

/// Maximum length of a line: 2 million tokens in blocks of 16, each with an id of several digits.
const LINE_BYTES_MAX: usize = 1 << 22;

/// Reader of the non-blank lines of a file.
pub(super) struct Lines {
    path: PathBuf,
    file: BufReader<File>,
    /// Number of the current line, from 1.
    number: usize,
    /// The current line; empty at the end.
    bytes: Vec<u8>,
    hasher: Xxh3,
}

impl Lines {
    pub(super) fn open(path: &Path) -> Result<Self, WorkloadError> {
        let file = BufReader::new(File::open(path).map_err(|source| unread(path, &source))?);
        Ok(Self { path: path.to_owned(), file, number: 0, bytes: Vec::new(), hasher: Xxh3::new() })
    }

    /// Reads the next non-blank line; none at the end.
    pub(super) fn next(&mut self) -> Result<Option<&str>, WorkloadError> {
        loop {
            self.bytes.clear();
            let mut part = (&mut self.file).take(LINE_BYTES_MAX as u64 + 1);
            let read = part.read_until(b'\n', &mut self.bytes);
            read.map_err(|source| unread(&self.path, &source))?;
            self.hasher.update(&self.bytes);
            self.number += 1;
            if self.bytes.len() > LINE_BYTES_MAX {
                return Err(self.broken(&format!("longer than {LINE_BYTES_MAX} bytes")));
            }
            if std::str::from_utf8(&self.bytes).is_err() {
                return Err(self.broken("not UTF-8"));
            }
            if self.bytes.is_empty() || !trim(&self.bytes).unwrap_or_default().is_empty() {
                return Ok(self.current());
            }
        }
    }

    /// The current line without surrounding whitespace.
    pub(super) fn current(&self) -> Option<&str> {
        trim(&self.bytes).filter(|text| !text.is_empty())
    }

    /// Error for the current line.
    pub(super) fn broken(&self, rule: &str) -> WorkloadError {
        WorkloadError(format!("trace {}, line {}: {rule}", self.path.display(), self.number))
    }

    /// Reads to the end and returns the XXH3-64 of the whole file in hex.
    pub(super) fn checksum(&mut self) -> Result<String, WorkloadError> {
        loop {
            let part = self.file.fill_buf().map_err(|source| unread(&self.path, &source))?;
            if part.is_empty() {
                return Ok(format!("{:016x}", self.hasher.digest()));
            }
            self.hasher.update(part);
            let read = part.len();
            self.file.consume(read);
        }
    }
}

fn unread(path: &Path, source: &io::Error) -> WorkloadError {
    WorkloadError(format!("cannot read trace {}: {source}", path.display()))
}

/// Text without surrounding whitespace and without the byte order mark that some editors write.
fn trim(bytes: &[u8]) -> Option<&str> {
    std::str::from_utf8(bytes).ok().map(|text| text.trim_start_matches('\u{feff}').trim())
}
