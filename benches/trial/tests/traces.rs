//! Tests of the trace readers with valid and invalid files of every format.

use std::fs;
use std::path::{Path, PathBuf};

use pointsman_trial::workload::trace::read;
use pointsman_trial::workload::{Arrivals, Workload, WorkloadError};
use proptest::prelude::*;

const MOONCAKE: &str = r#"{"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [4, 9]}
{"timestamp": 0, "input_length": 600, "output_length": 7, "hash_ids": [4, 8]}
{"timestamp": 3000, "input_length": 512, "output_length": 0, "hash_ids": [5]}
"#;

const QWEN: &str = r#"{"chat_id": 10, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 20, "output_length": 3, "type": "text", "turn": 1, "hash_ids": [1, 2]}
{"chat_id": 11, "parent_chat_id": 10, "timestamp": 62.5, "input_length": 33, "output_length": 4, "type": "search", "turn": 2, "hash_ids": [1, 3, 7]}
"#;

/// A file that is deleted on drop.
struct Trace(PathBuf);

impl Trace {
    fn new(name: &str, bytes: impl AsRef<[u8]>) -> Self {
        let thread = std::thread::current().name().unwrap_or_default().replace(':', "-");
        let directory = std::env::temp_dir().join(format!("pointsman-workload-{}-{thread}", std::process::id()));
        fs::create_dir_all(&directory).expect("directory");
        let path = directory.join(name);
        fs::write(&path, bytes).expect("written");
        Self(path)
    }

    fn read(&self, limit: Option<usize>) -> Result<Workload, WorkloadError> {
        read(&self.0, limit)
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        fs::remove_dir_all(self.0.parent().expect("a directory")).expect("removed");
    }
}

#[test]
fn formats_are_detected_by_the_first_line() {
    for (text, format) in [(MOONCAKE, "mooncake"), (QWEN, "qwen")] {
        let detected = Trace::new("a.jsonl", text).read(None).expect("a trace");
        assert_eq!(detected.name, format!("a.jsonl ({format})"));
        assert_eq!((detected.arrivals, detected.requests[0].arrival_us), (Arrivals::OpenLoop, 0));
    }
    let unknown = Trace::new("a.jsonl", "\n{\"a\": 1}\n").read(None).expect_err("no format").to_string();
    assert!(unknown.contains("a.jsonl, line 2: neither mooncake's nor qwen's format"), "{unknown}");
}

#[test]
fn arrivals_lengths_and_sessions_are_parsed() {
    let facts = |name, text: &str| {
        let trace = Trace::new(name, text).read(None).expect("a trace");
        let fact = |request: &pointsman_trial::workload::Request| {
            (request.arrival_us, request.prompt_tokens(), request.output_tokens)
        };
        (trace.requests.iter().map(fact).collect::<Vec<_>>(), trace.requests[1].session)
    };
    // Two requests share a tick of 3 s. The last one requests no output and gets one token.
    assert_eq!(facts("a.jsonl", MOONCAKE), (vec![(0, 700, 5), (1_500_000, 600, 7), (3_000_000, 512, 1)], None));
    assert_eq!(facts("a.jsonl", QWEN), (vec![(0, 20, 3), (1_386_000, 33, 4)], Some(10)));
}

#[test]
fn the_checksum_covers_all_bytes_for_any_limit() {
    let trace = Trace::new("a.jsonl", MOONCAKE);
    let whole = trace.read(None).expect("a trace").trace_checksum;
    assert_eq!(whole, Some(format!("{:016x}", xxhash_rust::xxh3::xxh3_64(MOONCAKE.as_bytes()))));
    let first = trace.read(Some(1)).expect("a trace");
    assert_eq!((first.requests.len(), first.trace_checksum), (1, whole));
}

#[test]
fn errors_contain_file_line_and_rule() {
    let broken = |name, text: &str| Trace::new(name, text).read(None).expect_err(text).to_string();
    for (error, expected) in [
        (broken("a.jsonl", &MOONCAKE.replace("600", "1600")), "a.jsonl, line 2: input_length 1600 needs 4 hash_ids"),
        (broken("a.jsonl", &MOONCAKE.replace("512", "99999999999")), "line 3: input_length is 99999999999, must be"),
        (broken("a.jsonl", &format!("{MOONCAKE}\n\n{{\"timestamp\": 1}}\n")), "line 6: missing field"),
        (
            broken("a.jsonl", &QWEN.replace("62.5", "-1")),
            "a.jsonl, line 2: timestamp is -1, must be a time of at least 0",
        ),
        (broken("a.jsonl", "\n \n"), "a.jsonl has no requests"),
    ] {
        assert!(error.contains(expected), "{error}");
    }
    let long = Trace::new("a.jsonl", vec![b' '; 1 << 23]).read(None).expect_err("too long").to_string();
    assert!(long.contains("line 1: longer than 4194304 bytes"), "{long}");
    let binary = Trace::new("a.jsonl", b"\xff\n").read(None).expect_err("no text").to_string();
    assert!(binary.contains("line 1: not UTF-8"), "{binary}");
    let missing = read(Path::new("/nowhere/none.jsonl"), None).expect_err("no file").to_string();
    assert!(missing.contains("cannot read trace /nowhere/none.jsonl"), "{missing}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn arbitrary_bytes_are_parsed_or_rejected(bytes in prop::collection::vec(any::<u8>(), 0..300), format in 0_usize..3) {
        let first: &[&str] = &["", MOONCAKE, QWEN];
        let _ = Trace::new("a.jsonl", [first[format].as_bytes(), &bytes].concat()).read(None);
    }
}
