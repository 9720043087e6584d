//! Mistakes on the command line, and readers that close the output, as a newcomer meets them.
#![cfg(unix)]

use std::fs;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use pointsman_gateway::app::Gateway;
use pointsman_gateway::settings::{AdminSettings, GatewaySettings, ModelSettings, Settings};
use pointsman_trial::mock::{MockConfig, MockEngine};
use tokio::time::timeout;

use crate::common::admin::TOKEN;
use crate::common::process::{Process, serve};
use crate::common::proxy::{PATIENCE, request};

fn pointsman(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
    command.args(args).env_clear().stdin(Stdio::null());
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// `serve` arguments of one model.
const MODEL: [&str; 4] = ["--model", "m", "--worker", "http://127.0.0.1:9"];

fn file(name: &str, content: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::write(&path, content).expect("the target directory can be written");
    path
}

/// The output of a command that ends by itself.
async fn output(mut command: Command) -> Output {
    let run = tokio::task::spawn_blocking(move || command.output().expect("the program exists"));
    timeout(PATIENCE, run).await.expect("end before the timeout").expect("no panic")
}

/// Exit code and stderr contain the reason and the remedy.
#[tokio::test]
async fn mistakes_are_explained() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let taken = taken.local_addr().expect("bound").to_string();
    let _taken = TcpListener::bind(&taken);
    let token = file("mistakes.token", TOKEN);
    let admin = ["--admin-token-file", token.to_str().expect("text"), "--admin-listen"];
    let with_model = |command: &'static str, args: &[&str]| [&[command], &MODEL[..], args].concat().join(" ");
    let cases = [
        ("serve".to_owned(), "--model and --worker, or --config FILE, as in: pointsman serve --model"),
        ("check-config --listen 8080".to_owned(), "--model and --worker"),
        ("serve --model m".to_owned(), "--worker <URL>"),
        ("serve --config nowhere.toml".to_owned(), "nowhere.toml cannot be read"),
        (with_model("serve", &["--port", "8080"]), "'--listen'"),
        (with_model("serve", &["--port=8080"]), "'--listen'"),
        (with_model("serve", &["--host", "0.0.0.0"]), "'--listen'"),
        (with_model("serve", &["--block-size", "16"]), "router.block_size=16"),
        (with_model("serve", &["--listen", "here"]), "such as 127.0.0.1:8080"),
        (with_model("serve", &["--listen", "10.0.0.1"]), "such as 127.0.0.1:8080"),
        (with_model("serve", &["--listen", &taken]), "in use. End the other process, or choose another gateway.listen"),
        (with_model("serve", &["--listen", &taken]), "--reuse-port"),
        (with_model("serve", &["--listen", "127.0.0.1:0", admin[0], admin[1], admin[2], &taken]), "--admin-listen"),
        (with_model("serve", &["--listen", "0", "--set", &format!("picker.listen={taken}")]), "another picker.listen"),
        (with_model("serve", &["--policy", "fastest"]), "latency"),
        (with_model("serve", &["--set", "router.blocksize=16"]), "perhaps router.block_size"),
        (with_model("serve", &["--set", "block_size=16"]), "perhaps router.block_size"),
        (with_model("serve", &["--set", "lisen=8080"]), "perhaps gateway.listen"),
        (with_model("serve", &["--set", "tokens.sorce=engine"]), "perhaps tokens.source"),
        (with_model("serve", &["--set", "tokens.source=motor"]), "one of auto, local, engine, none"),
        (with_model("serve", &["--set", "router.block_size"]), "SECTION.KEY=VALUE"),
        ("serve --set tokens.source=engine".to_owned(), "with --model and --worker, or in [models.tokens] of the file"),
        ("serve --tokenizer tokenizer.json".to_owned(), "--model <NAME>"),
        (with_model("check-config", &["--tokenizer", "nowhere.json"]), "nowhere.json, which cannot be read"),
        (with_model("check-config", &["--chat-template", "nowhere.jinja"]), "absent without tokenizer_file"),
    ];
    for (line, words) in cases {
        let output = output(pointsman(&line.split(' ').collect::<Vec<_>>())).await;
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{line}: {said}");
        assert!(said.contains(words), "{line}: no {words:?} in {said}");
        assert!(!said.contains("panicked"), "{line}: {said}");
    }
}

/// Forms that newcomers use, with a line of the effective settings.
#[tokio::test]
async fn usual_forms_are_accepted() {
    let tokenizer = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokens/tokenizer.json");
    let tokenizer = tokenizer.to_str().expect("text");
    let token = file("forms.token", TOKEN);
    let token = token.to_str().expect("text");
    let listen = "listen = \"127.0.0.1:18080\"";
    let cases: [(&[&str], &str); 12] = [
        (&["--listen", "18080"], listen),
        (&["--listen", ":18080"], listen),
        (&["--listen", "localhost:18080"], listen),
        (&["--set", "gateway.listen=:18080"], listen),
        (&["--admin-listen", "18080", "--admin-token-file", token], listen),
        (&["--worker", "10.0.0.7:8000"], "worker_urls = [\"http://127.0.0.1:9\", \"http://10.0.0.7:8000\"]"),
        (&["--set", "tokens.source=engine"], "source = \"engine\""),
        (&["--set", "model.tokens.source=engine"], "source = \"engine\""),
        (&["--set", "model.messages=pass"], "messages = \"pass\""),
        (&["--tokenizer", tokenizer], "tokenizer_file = "),
        (&["--policy", "kv"], "policy.name = \"kv\""),
        (&["--reuse-port"], "reuse_port = true"),
    ];
    for (args, line) in cases {
        let output = output(pointsman(&[&["check-config"], &MODEL[..], args].concat())).await;
        assert_eq!(output.status.code(), Some(0), "{args:?}: {}", text(&output.stderr));
        let printed = text(&output.stdout);
        assert!(printed.lines().any(|printed| printed.starts_with(line)), "{args:?}: no {line} in {printed}");
    }
    for args in [&["help", "--help"][..], &["help", "-h"], &["help", "serve", "--help"], &["--help"]] {
        let output = output(pointsman(args)).await;
        let help = text(&output.stdout);
        assert!(output.status.success() && help.contains("Usage: pointsman"), "{args:?}: {help}");
    }
}

#[tokio::test]
async fn help_needs_no_repository() {
    for command in ["serve", "check-config", "mock-engine", "replay-decisions", "demo", "top"] {
        let help = text(&output(pointsman(&[command, "--help"])).await.stdout);
        assert!(!help.contains(".md"), "{command}: {help}");
    }
}

/// The command with an output, or both outputs, that nobody reads.
fn unread(mut command: Command, is_stderr_closed: bool) -> Command {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    if is_stderr_closed {
        command.stderr(writer.try_clone().expect("a descriptor"));
    } else {
        command.stderr(Stdio::piped());
    }
    command.stdout(writer);
    command
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_closed_pipe_ends_a_command_quietly() {
    let token = file("unread.token", TOKEN);
    let token = token.to_str().expect("text");
    let settings = Settings {
        gateway: GatewaySettings { listen: ([127, 0, 0, 1], 0).into(), ..GatewaySettings::default() },
        admin: Some(AdminSettings {
            listen: ([127, 0, 0, 1], 0).into(),
            token_file: token.into(),
            ..AdminSettings::default()
        }),
        models: vec![ModelSettings::named("m")],
        ..Settings::default()
    };
    let gateway = Gateway::start(settings).await.expect("start succeeds");
    let admin = format!("http://{}", gateway.admin_address().expect("an address"));
    let cases: [(&[&str], i32); 8] = [
        (&["version"], 0),
        (&["--help"], 0),
        (&["check-config", MODEL[0], MODEL[1], MODEL[2], MODEL[3]], 0),
        (&["check-config"], 2),
        (&["serve"], 2),
        (&["replay-decisions", "nowhere"], 2),
        (&["mock-engine", "--port", "0"], 0),
        (&["top", "--admin", &admin, "--token-file", token], 0),
    ];
    for (args, code) in cases {
        for is_stderr_closed in [false, true] {
            let output = output(unread(pointsman(args), is_stderr_closed)).await;
            let said = text(&output.stderr);
            assert_eq!(output.status.code(), Some(code), "{args:?}: {said}");
            assert!(!said.contains("panicked") && !said.contains("Broken pipe"), "{args:?}: {said}");
        }
    }
    gateway.shutdown(Duration::ZERO).await;
}

/// The access log of a gateway is not its purpose.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_serves_without_a_reader_of_its_access_log() {
    let engine = MockEngine::start(MockConfig { time_scale: 0.0, ..MockConfig::default() }).await.expect("it starts");
    let mut command = serve();
    command.args(["--listen", "127.0.0.1:0", "--model", "mock", "--worker", &engine.url()]);
    command.args(["--set", "gateway.hold_without_endpoints_ms=60000"]);
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let process = Process::start_with(command, Stdio::null(), writer.into()).await;
    for _ in 0..20 {
        let body = br#"{"model":"mock","prompt":[1,2,3],"max_tokens":2}"#;
        assert_eq!(request(process.address, "POST", "/v1/completions", "", body).await.status, 200);
    }
    drop(process);
    engine.shutdown().await;
}
