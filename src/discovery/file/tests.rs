use proptest::prelude::*;

use super::*;
use crate::protocol::{KvEventsConfig, LoadSource, WorkerConfig, WorkerId};

const TOML: &str = r#"
[[workers]]
url = "http://10.0.0.7:8000"
id = 7
data_parallel_size = 2
taints = ["large"]
load = { metrics = "http://0.0.0.0:9000/metrics" }

[workers.kv_events]
endpoint = "tcp://*:5557"

[[workers]]
probe = true
url = "http://[::1]:8000"
"#;

const JSON: &str = r#"{ "workers": [
    { "url": "http://10.0.0.7:8000", "id": 7, "data_parallel_size": 2, "taints": ["large"],
      "load": { "metrics": "http://0.0.0.0:9000/metrics" }, "kv_events": { "endpoint": "tcp://*:5557" } },
    { "probe": true, "url": "http://[::1]:8000" }
] }"#;

fn refused(format: FileFormat, text: &str) -> String {
    format.parse(text.as_bytes()).expect_err("must be refused").to_string()
}

#[test]
fn both_formats_have_equal_content() {
    let kv_events =
        KvEventsConfig { endpoint: "tcp://10.0.0.7:5557".to_owned(), replay_endpoint: None, topic: String::new() };
    let first = WorkerConfig {
        data_parallel_size: 2,
        taints: ["large".to_owned()].into(),
        kv_events: Some(kv_events),
        load: Some(LoadSource::Metrics("http://10.0.0.7:9000/metrics".to_owned())),
        ..WorkerConfig::at("http://10.0.0.7:8000")
    };
    let expected = [
        NamedWorker { id: Some(WorkerId(7)), config: first, probe: false },
        NamedWorker { id: None, config: WorkerConfig::at("http://[::1]:8000"), probe: true },
    ];
    assert_eq!(FileFormat::Toml.parse(TOML.as_bytes()).expect("TOML"), expected);
    assert_eq!(FileFormat::Json.parse(JSON.as_bytes()).expect("JSON"), expected);
    assert_eq!(FileFormat::Toml.parse(b"workers = []"), Ok(vec![]));
}

#[test]
fn event_endpoints_of_single_ranks_are_read_in_both_formats() {
    let toml = "[[workers]]\nurl = \"http://e\"\nkv_events_by_rank = { \"3\" = { endpoint = \"tcp://*:40123\" } }\n";
    let json =
        r#"{ "workers": [{ "url": "http://e", "kv_events_by_rank": { "3": { "endpoint": "tcp://*:40123" } } }] }"#;
    for workers in [FileFormat::Toml.parse(toml.as_bytes()), FileFormat::Json.parse(json.as_bytes())] {
        let config = workers.expect("valid").remove(0).config;
        assert_eq!(config.kv_events_of(3).expect("valid").map(|of| of.endpoint).as_deref(), Some("tcp://e:40123"));
    }
    assert!(refused(FileFormat::Toml, &toml.replace("\"3\"", "x")).starts_with("line 3: "));
}

#[test]
fn mistakes_are_named_with_their_line() {
    let toml = |text| refused(FileFormat::Toml, text);
    let role = toml("[[workers]]\nurl = \"http://e\"\nrole = \"prefil\"\n");
    assert!(
        role.starts_with("line 3: unknown variant `prefil`, expected one of `prefill`, `decode`, `both`"),
        "{role}"
    );
    let unknown = toml("[[workers]]\nurl = \"http://e\"\n\nendpiont = \"x\"\n");
    assert!(unknown.starts_with("line 4: unknown field `endpiont`, expected one of"), "{unknown}");
    assert_eq!(toml("[[workers]]\nendpoint = \"http://e\"\n"), "line 2: unknown field `endpoint`, must be `url`");
    assert_eq!(toml("[[workers]]\nid = 1\n"), "line 1: missing field `url`");
    assert!(toml("").ends_with("missing field `workers`"), "a truncated file is not an empty list");
    assert!(toml("[[workers]]\nurl = \"http://e\"\nid = -1\n").starts_with("line 3: "));
    assert!(toml("[[workers]]\nurl = \"http://e\nid = 1\n").starts_with("line 2: "));
    assert!(toml("[[worker]]\nurl = \"http://e\"\n").starts_with("line 1: unknown field `worker`"));
    let json = |text| refused(FileFormat::Json, text);
    assert!(
        json("{ \"workers\": [\n{ \"url\": \"http://e\",\n \"x\": 1 }] }").starts_with("line 3: unknown field `x`")
    );
    assert!(json("{ \"workers\": [").starts_with("line 1: EOF"));
    assert_eq!(json(r#"{ "workers": [{ "url": "http://e", "url": "http://f" }] }"#), "line 1: duplicate field `url`");
}

#[test]
fn broken_rules_name_the_worker() {
    let toml = |text| refused(FileFormat::Toml, text);
    assert_eq!(
        toml("[[workers]]\nurl = \"http://e\"\n[[workers]]\nurl = \"http://f\"\ntotal_kv_blocks = 0\n"),
        "workers[1] at \"http://f\": total_kv_blocks is 0, must be at least 1"
    );
    assert_eq!(
        toml("[[workers]]\nurl = \"grpc://e\"\n"),
        "workers[0]: url \"grpc://e\" is refused: its scheme is \"grpc\", must be http or https"
    );
    assert_eq!(
        toml("[[workers]]\nurl = \"http://e\"\n[[workers]]\nurl = \"HTTP://E:80/\"\n"),
        "workers at \"http://e\" and \"http://e\" are the same engine, which must be named once"
    );
    assert_eq!(
        toml("[[workers]]\nurl = \"http://e\"\nid = 1\n[[workers]]\nurl = \"http://f\"\nid = 1\n"),
        "workers at \"http://e\" and \"http://f\" both have the id 1, ids must differ"
    );
}

#[test]
fn the_file_name_determines_the_format() {
    assert_eq!(FileFormat::of_name("/etc/workers.TOML"), Ok(FileFormat::Toml));
    assert_eq!(FileFormat::of_name("a.b.json"), Ok(FileFormat::Json));
    for name in ["workers", "workers.yaml", "toml"] {
        assert_eq!(FileFormat::of_name(name), Err(FileError::Format));
    }
}

#[test]
fn long_and_deep_files_are_rejected() {
    let long = vec![b' '; FileFormat::BYTES_MAX + 1];
    assert_eq!(FileFormat::Json.parse(&long), Err(FileError::TooLong(FileFormat::BYTES_MAX)));
    for (format, open, close) in [(FileFormat::Json, "{\"workers\":", ""), (FileFormat::Toml, "workers = ", "")] {
        refused(format, &format!("{open}{}{}{close}", "[".repeat(100_000), "]".repeat(100_000)));
    }
    assert_eq!(FileFormat::Toml.parse(b"\xff"), Err(FileError::NotText));
}

proptest! {
    #[test]
    fn no_content_panics(cut in 0..TOML.len(), at in 0..JSON.len(), with in any::<u8>()) {
        let _ = FileFormat::Toml.parse(&TOML.as_bytes()[..cut]);
        let mut json = JSON.as_bytes().to_vec();
        json[at] = with;
        let _ = FileFormat::Json.parse(&json);
        let mut toml = TOML.as_bytes().to_vec();
        toml[cut] = with;
        let _ = FileFormat::Toml.parse(&toml);
    }
}
