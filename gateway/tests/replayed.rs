//! Files of recorded decisions: a gateway process writes them, and `replay-decisions` repeats their decisions.
#![cfg(unix)]

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::Duration;

use pointsman_trial::mock::{MockConfig, MockEngine};
use serde_json::json;
use tokio::process::Command;
use tokio::time::{sleep, timeout};

use crate::common::process::{Process, serve};
use crate::common::proxy::{PATIENCE, ready, request};

const REQUESTS: usize = 40;
/// Requests directly before the end of the process.
const LAST_REQUESTS: usize = 10;

/// `replay-decisions` with this file.
async fn replay(file: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
    command.env_clear().arg("replay-decisions").arg(file);
    timeout(PATIENCE, command.output()).await.expect("end before the timeout").expect("the program exists")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The only file of recorded decisions, once it has all of them.
async fn complete_file(directory: &Path) -> PathBuf {
    let expected = format!("{REQUESTS} decisions replayed, 0 differ");
    let complete = async {
        loop {
            let files = fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path());
            if let [file] = files.collect::<Vec<_>>().as_slice() {
                let output = replay(file).await;
                assert!(output.status.success(), "{}", text(&output.stderr));
                if text(&output.stdout).contains(&expected) {
                    return file.clone();
                }
            }
            sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(PATIENCE, complete).await.expect("all decisions are written before the timeout")
}

async fn chat(gateway: SocketAddr, n: usize) {
    let content = format!("session {} {}", n % 5, "of many words ".repeat(200));
    let body = json!({ "model": "mock", "max_tokens": 2, "messages": [{ "role": "user", "content": content }] });
    let answer = request(gateway, "POST", "/v1/chat/completions", "", body.to_string().as_bytes()).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn decisions_of_a_process_are_replayed_from_its_files() {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("decisions-{}", std::process::id()));
    let mut engines = Vec::new();
    for _ in 0..2 {
        engines.push(
            MockEngine::start(MockConfig { time_scale: 100.0, ..MockConfig::default() }).await.expect("an engine"),
        );
    }
    let mut command = serve();
    command.args(["--listen", "127.0.0.1:0", "--model", "mock"]);
    for engine in &engines {
        command.args(["--worker", &engine.url()]);
    }
    command.args(["--set", &format!("gateway.decision_path={}", directory.display())]);
    let process = Process::start(command).await;
    ready(process.address).await;
    for n in 0..REQUESTS {
        chat(process.address, n).await;
    }
    let file = complete_file(&directory).await;
    for n in 0..LAST_REQUESTS {
        chat(process.address, n).await;
    }
    process.signal("TERM");
    assert_eq!(process.exit().await.code(), Some(0));
    let report = text(&replay(&file).await.stdout);
    let expected = format!("{} decisions replayed, 0 differ", REQUESTS + LAST_REQUESTS);
    assert!(report.contains(&expected), "the shutdown writes the last decisions: {report}");

    let cut = directory.join("cut");
    let bytes = fs::read(&file).expect("the file is readable");
    fs::write(&cut, &bytes[..bytes.len() - 7]).expect("written");
    let output = replay(&cut).await;
    let report = text(&output.stdout);
    assert!(report.contains("damaged or cut at byte") && report.contains("0 differ"), "{report}");
    fs::remove_dir_all(&directory).expect("removed");
    for engine in engines {
        engine.shutdown().await;
    }
}
