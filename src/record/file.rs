//! Files of recorded entries: versioned, with a checksum for each part, so that a damaged file is read up to the damage.
//!
//! ```text
//! file   = "PMDR", version (u8), parts
//! part   = length of the contents (u32, little endian), xxh3-64 of the contents (u64, little endian), contents
//! contents = 1, segment number, milliseconds from 1970 to the start of the router's clock, pool name, entries
//!          | 2, entries of the same segment
//!          | 3, number of workers, for each its id and its name for people
//! ```
//!
//! Numbers in contents are LEB128. The contents of a segment begin with a keyframe.

use xxhash_rust::xxh3::xxh3_64;

use super::bytes::{Reader, put_number, put_text};
use super::ring::RecordPart;
use crate::protocol::WorkerId;

const MAGIC: &[u8; 4] = b"PMDR";
const VERSION: u8 = 8;
const HEAD_BYTES: usize = size_of::<u32>() + size_of::<u64>();
const BEGINS: u8 = 1;
const CONTINUES: u8 = 2;
const NAMES: u8 = 3;

/// Length at which the groups of a part begin another one.
const PART_BYTES: usize = 4 << 10;

/// The format of files with recorded entries.
///
/// ```
/// use pointsman::{RecordFile, RecordPart};
///
/// let mut bytes = RecordFile::head();
/// let part = RecordPart { sequence: 3, begins: true, bytes: b"entries".to_vec(), ends: vec![7] };
/// RecordFile::put(&mut bytes, &part, "default", 1_700_000_000_000);
/// bytes.pop(); // a cut file
/// let mut parts = 0;
/// let read = RecordFile::read(&bytes, &mut |_| parts += 1)?;
/// assert_eq!((parts, read.damaged_at), (0, Some(5)));
/// # Ok::<(), pointsman::internals::record::RecordFileError>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct RecordFile;

/// Reason to reject a file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordFileError {
    /// Other contents.
    #[error("is no file of recorded decisions")]
    Magic,
    /// Another version of the format.
    #[error("has version {version} of the format, must be {VERSION}")]
    Version {
        /// The version.
        version: u8,
    },
}

/// A part of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FiledEntries<'a> {
    /// The segment that begins here; `None` if the last one continues.
    pub segment: Option<FiledSegment<'a>>,
    /// The entries.
    pub entries: &'a [u8],
    /// Names of workers from here on.
    pub names: Vec<(WorkerId, &'a str)>,
}

/// Beginning of a segment in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FiledSegment<'a> {
    /// Number of the segment.
    pub sequence: u64,
    /// Milliseconds from 1970 to the start of the router's clock.
    pub clock_start_unix_ms: u64,
    /// Name of the pool.
    pub pool: &'a str,
}

/// End of the readable part of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileEnd {
    /// Parts that were read.
    pub parts: u64,
    /// Position of the first damaged or cut part; `None` if the file is sound.
    pub damaged_at: Option<usize>,
}

impl RecordFile {
    /// First bytes of a file.
    #[must_use]
    pub fn head() -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.push(VERSION);
        bytes
    }

    /// Appends entries of a pool whose clock started `clock_start_unix_ms` after 1970.
    pub fn put(to: &mut Vec<u8>, part: &RecordPart, pool: &str, clock_start_unix_ms: u64) {
        let (mut from, mut begins) = (0, part.begins);
        while from < part.bytes.len() {
            let full = |end: &&u32| **end as usize - from.min(**end as usize) >= PART_BYTES;
            let end = part.ends.iter().find(full).map_or(part.bytes.len(), |end| *end as usize);
            let mut contents = Vec::with_capacity(end - from + 64);
            if std::mem::take(&mut begins) {
                contents.push(BEGINS);
                put_number(&mut contents, part.sequence);
                put_number(&mut contents, clock_start_unix_ms);
                put_text(&mut contents, pool);
            } else {
                contents.push(CONTINUES);
            }
            contents.extend_from_slice(&part.bytes[from..end]);
            put_part(to, &contents);
            from = end;
        }
    }

    /// Appends the names of workers, for people.
    pub fn put_names(to: &mut Vec<u8>, names: &[(WorkerId, &str)]) {
        let mut contents = vec![NAMES];
        put_number(&mut contents, names.len() as u64);
        for (worker, name) in names {
            put_number(&mut contents, worker.0);
            put_text(&mut contents, name);
        }
        put_part(to, &contents);
    }

    /// Passes the entries of a file to `visit`, in order and up to the first damage.
    ///
    /// # Errors
    /// Bytes of another format, or of another version of it.
    pub fn read(bytes: &[u8], visit: &mut dyn FnMut(FiledEntries<'_>)) -> Result<FileEnd, RecordFileError> {
        let rest = bytes.strip_prefix(MAGIC).ok_or(RecordFileError::Magic)?;
        let (version, mut rest) = rest.split_first().ok_or(RecordFileError::Magic)?;
        if *version != VERSION {
            return Err(RecordFileError::Version { version: *version });
        }
        let mut parts = 0;
        while !rest.is_empty() {
            let Some((entries, after)) = read_part(rest) else {
                return Ok(FileEnd { parts, damaged_at: Some(bytes.len() - rest.len()) });
            };
            visit(entries);
            (parts, rest) = (parts + 1, after);
        }
        Ok(FileEnd { parts, damaged_at: None })
    }
}

fn put_part(to: &mut Vec<u8>, contents: &[u8]) {
    to.extend_from_slice(&u32::try_from(contents.len()).unwrap_or(u32::MAX).to_le_bytes());
    to.extend_from_slice(&xxh3_64(contents).to_le_bytes());
    to.extend_from_slice(contents);
}

/// The first part, and the bytes after it; `None` if it is damaged.
fn read_part(bytes: &[u8]) -> Option<(FiledEntries<'_>, &[u8])> {
    let (head, rest) = bytes.split_at_checked(HEAD_BYTES)?;
    let (length, checksum) = head.split_at_checked(size_of::<u32>())?;
    let length = u32::from_le_bytes(length.try_into().ok()?) as usize;
    let (contents, after) = rest.split_at_checked(length)?;
    (u64::from_le_bytes(checksum.try_into().ok()?) == xxh3_64(contents)).then_some(())?;
    let mut from = Reader::new(contents);
    let segment = match from.u8()? {
        BEGINS => {
            let (sequence, clock_start_unix_ms) = (from.number()?, from.number()?);
            Some(FiledSegment { sequence, clock_start_unix_ms, pool: from.text()? })
        }
        CONTINUES => None,
        NAMES => {
            let names = from.list(|from| Some((WorkerId(from.number()?), from.text()?)))?;
            return Some((FiledEntries { segment: None, entries: &[], names }, after));
        }
        _ => return None,
    };
    Some((FiledEntries { segment, entries: from.rest(), names: Vec::new() }, after))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> Vec<u8> {
        let mut bytes = RecordFile::head();
        let groups: Vec<u8> = (0..20_000_u32).map(|n| n as u8).collect();
        let part = RecordPart { sequence: 7, begins: true, ends: vec![3_000, 9_000, 20_000], bytes: groups };
        RecordFile::put(&mut bytes, &part, "pool", 5);
        let more = RecordPart { sequence: 7, begins: false, ends: vec![3], bytes: b"abc".to_vec() };
        RecordFile::put(&mut bytes, &more, "pool", 5);
        bytes
    }

    fn read(bytes: &[u8]) -> (Vec<u8>, Result<FileEnd, RecordFileError>) {
        let mut entries = Vec::new();
        let end = RecordFile::read(bytes, &mut |part| entries.extend_from_slice(part.entries));
        (entries, end)
    }

    #[test]
    fn parts_end_where_groups_end() {
        let mut lengths = Vec::new();
        let end = RecordFile::read(&file(), &mut |part| lengths.push((part.segment.is_some(), part.entries.len())));
        assert_eq!(lengths, [(true, 9_000), (false, 11_000), (false, 3)]);
        assert_eq!(end, Ok(FileEnd { parts: 3, damaged_at: None }));
    }

    #[test]
    fn names_are_read_as_written() {
        let mut bytes = file();
        RecordFile::put_names(&mut bytes, &[(WorkerId(7), "10.0.0.7:8000"), (WorkerId(u64::MAX), "")]);
        let mut names = Vec::new();
        let end =
            RecordFile::read(&bytes, &mut |part| names.extend(part.names.iter().map(|(id, name)| (id.0, name.len()))));
        assert_eq!((names, end.map(|end| end.parts)), (vec![(7, 13), (u64::MAX, 0)], Ok(4)));
        bytes[4] = VERSION + 1;
        assert_eq!(read(&bytes).1, Err(RecordFileError::Version { version: VERSION + 1 }));
    }

    #[test]
    fn a_cut_file_is_read_up_to_the_cut() {
        let (bytes, (whole, _)) = (file(), read(&file()));
        for cut in (5..bytes.len()).step_by(7) {
            let (entries, end) = read(&bytes[..cut]);
            assert!(whole.starts_with(&entries), "cut at {cut}");
            let end = end.expect("the head is sound");
            assert!(end.damaged_at.is_some() || [5, bytes.len() - 3 - 1 - HEAD_BYTES].contains(&cut) || end.parts == 1);
        }
        (0..5).for_each(|cut| assert_eq!(read(&bytes[..cut]).1, Err(RecordFileError::Magic)));
    }

    #[test]
    fn a_flipped_byte_ends_the_file() {
        let (bytes, (whole, _)) = (file(), read(&file()));
        for at in (0..60).chain((60..bytes.len()).step_by(13)) {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1 << (at % 8);
            let (entries, end) = read(&damaged);
            assert!(whole.starts_with(&entries) && entries.len() < whole.len(), "flipped at {at}");
            assert!(end.map_or(at < 5, |end| end.damaged_at.is_some_and(|damage| damage <= at)), "flipped at {at}");
        }
    }
}
