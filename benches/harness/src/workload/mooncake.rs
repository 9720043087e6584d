//! Reads the Mooncake project's request traces.
//!
//! One JSON object a line: `timestamp` (ms), `input_length`, `output_length`, `hash_ids`. Each hash id names 512
//! tokens, and equal ids mean equal tokens behind an equal prefix; here an id becomes 512 token ids that depend on
//! nothing else, and the prompt is cut to its `input_length`. A closed loop sets its own pace and simulates no output,
//! so times and output lengths are only checked to be there.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::{Prompt, append_tokens};

/// Tokens that one hash id stands for.
pub const TOKENS_PER_ID: usize = 512;

/// Why a trace could not be read.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file cannot be opened or read.
    #[error("cannot read trace {path}: {source}")]
    Read {
        /// The trace.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A line is no request.
    #[error("trace {path}, line {line}: {reason}")]
    Line {
        /// The trace.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// What is wrong with it.
        reason: String,
    },
    /// There is nothing to replay.
    #[error("trace {path} has no requests")]
    Empty {
        /// The trace.
        path: PathBuf,
    },
}

#[derive(Deserialize)]
struct Line {
    #[serde(rename = "timestamp")]
    _timestamp: f64,
    #[serde(rename = "output_length")]
    _output_length: u64,
    input_length: usize,
    hash_ids: Vec<u64>,
}

/// Reads the first `limit` requests of the trace at `path`, all of them without a limit. Empty lines are skipped.
///
/// # Errors
/// The file cannot be read, a line is broken (the message names it), or there are no requests.
pub fn read(path: &Path, limit: Option<usize>) -> Result<Vec<Prompt>, TraceError> {
    let failed = |source| TraceError::Read { path: path.to_owned(), source };
    let lines = BufReader::new(File::open(path).map_err(failed)?).lines();
    let mut prompts = Vec::new();
    for (index, line) in lines.enumerate() {
        if limit.is_some_and(|limit| prompts.len() >= limit) {
            break;
        }
        let line = line.map_err(failed)?;
        if line.trim().is_empty() {
            continue;
        }
        let prompt =
            parse(&line).map_err(|reason| TraceError::Line { path: path.to_owned(), line: index + 1, reason })?;
        prompts.push(prompt);
    }
    if prompts.is_empty() {
        return Err(TraceError::Empty { path: path.to_owned() });
    }
    Ok(prompts)
}

/// One line as a prompt.
fn parse(line: &str) -> Result<Prompt, String> {
    let Line { input_length, hash_ids, .. } = serde_json::from_str(line).map_err(|error| error.to_string())?;
    if input_length == 0 {
        return Err("input_length is 0, must be at least 1".to_owned());
    }
    let needed = input_length.div_ceil(TOKENS_PER_ID);
    if hash_ids.len() != needed {
        return Err(format!("input_length {input_length} needs {needed} hash_ids, found {}", hash_ids.len()));
    }
    let mut tokens = Vec::with_capacity(input_length);
    for id in hash_ids {
        let left = input_length - tokens.len();
        append_tokens(&mut tokens, id, TOKENS_PER_ID.min(left));
    }
    Ok(tokens.into_boxed_slice())
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    const GOOD: &str = r#"{"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [4, 9]}"#;

    #[test]
    fn equal_ids_are_equal_tokens_and_the_tail_is_cut() {
        let first = parse(GOOD).expect("good line");
        assert_eq!(first.len(), 700);
        let second = parse(&GOOD.replace("[4, 9]", "[4, 8]")).expect("good line");
        assert_eq!(first[..512], second[..512]);
        assert_ne!(first[512..], second[512..]);
        let longer = parse(&GOOD.replace("700", "1024")).expect("good line");
        assert_eq!(first[..], longer[..700]);
    }

    #[test]
    fn broken_lines_say_what_is_wrong() {
        let cases = [
            (GOOD.replace("700", "1025"), "input_length 1025 needs 3 hash_ids, found 2"),
            (GOOD.replace("700", "512"), "input_length 512 needs 1 hash_ids, found 2"),
            (GOOD.replace("700", "0"), "input_length is 0"),
            (GOOD.replace("700", "-1"), "invalid value: integer `-1`"),
            (GOOD.replace("hash_ids", "hashes"), "missing field `hash_ids`"),
            (GOOD.replace("timestamp", "time"), "missing field `timestamp`"),
            (GOOD[..20].to_owned(), "EOF"),
        ];
        for (line, expected) in cases {
            let error = parse(&line).expect_err(&line);
            assert!(error.contains(expected), "{line}: {error}");
        }
    }

    #[test]
    fn errors_name_the_file_and_the_line() {
        let directory = std::env::temp_dir().join(format!("pointsman-bench-{}", std::process::id()));
        std::fs::create_dir_all(&directory).expect("directory");
        let path = directory.join("trace.jsonl");
        let mut file = File::create(&path).expect("file");
        write!(file, "{GOOD}\n\n{{\"timestamp\": 1}}\n").expect("written");

        let error = read(&path, None).expect_err("line 3 is broken").to_string();
        assert!(error.contains("trace.jsonl, line 3: missing field"), "{error}");
        assert_eq!(read(&path, Some(1)).expect("line 1 is good").len(), 1);

        let missing = read(&directory.join("none.jsonl"), None).expect_err("no file").to_string();
        assert!(missing.contains("none.jsonl"), "{missing}");
        std::fs::write(&path, "\n").expect("written");
        assert!(matches!(read(&path, None), Err(TraceError::Empty { .. })));
        std::fs::remove_dir_all(&directory).expect("removed");
    }
}
