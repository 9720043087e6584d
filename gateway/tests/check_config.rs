//! `pointsman check-config` as an operator runs it.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Runs the command with only `env` in its environment.
fn check_config(file: &Path, env: &[(&str, &str)]) -> Output {
    run(&["--config".as_ref(), file.as_os_str()], env)
}

fn run(args: &[&OsStr], env: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
    command.arg("check-config").args(args).env_clear().envs(env.iter().copied());
    command.output().expect("the command runs")
}

fn example() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/pointsman.toml")
}

/// A file of this test.
fn written(name: &str, text: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::write(&path, text).expect("the target directory can be written");
    path
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("output is UTF-8")
}

#[test]
fn the_example_is_accepted_and_printed() {
    // More connections than any machine has descriptors for.
    let env = [
        ("POINTSMAN_ROUTER_BLOCK_SIZE", "32"),
        ("POINTSMAN_GATEWAY_CONNECTIONS_MAX", "100"),
        ("POINTSMAN_SOMETHING_ELSE", "x"),
    ];
    let output = check_config(&example(), &env);
    assert_eq!((output.status.code(), text(&output.stderr).as_str()), (Some(0), ""));
    let printed = text(&output.stdout);
    let settings = ["block_size = 32", "queue.threshold = 2.0", "seed = 0", "# index.bytes_max is not set"];
    let origins = ["environment: POINTSMAN_ROUTER_BLOCK_SIZE", "file", "default", "default"];
    for (setting, origin) in settings.into_iter().zip(origins) {
        let line = printed.lines().find(|line| line.starts_with(setting)).unwrap_or_else(|| panic!("{printed}"));
        assert!(line.ends_with(&format!(" # {origin}")), "{line}");
    }
    let again = check_config(&written("printed.toml", &printed), &[]);
    assert_eq!(again.status.code(), Some(0), "printed settings load again: {}", text(&again.stderr));
}

#[test]
fn certificates_that_are_not_valid_are_warned_of() {
    let tls = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tls");
    let (chain, key) = (tls.join("expired-test-only.crt"), tls.join("test-only.key"));
    let config = format!(
        "[gateway]\ntls_certificate_file = {chain:?}\ntls_key_file = {key:?}\n\
         [[models]]\nname = \"m\"\nworker_urls = [\"http://e\"]\n"
    );
    let output = check_config(&written("expired.toml", &config), &[]);
    assert_eq!(output.status.code(), Some(0));
    let told = text(&output.stderr);
    let start =
        format!("warning: gateway.tls_certificate_file is {}, with a certificate that expired ", chain.display());
    assert!(told.lines().any(|line| line.starts_with(&start)), "{told}");
}

#[test]
fn unusable_files_are_named_without_content() {
    written("short.key", "hush-hush\n");
    let file = written(
        "files.toml",
        "[gateway]\nsalt_secret_file = \"short.key\"\nworker_ca_file = \"nowhere.pem\"\n\
         [[models]]\nname = \"m\"\nworker_urls = [\"http://e\"]\ntokens = { tokenizer_file = \"nowhere.json\" }\n\
         [[tenants]]\nname = \"t\"\nkeys_file = \"nowhere.keys\"\n",
    );
    let output = check_config(&file, &[]);
    assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(2), ""));
    let told = text(&output.stderr);
    let beginnings = [
        ("gateway.salt_secret_file is ", "short.key, which must hold at least 16 bytes"),
        ("tenants[0].keys_file is ", "nowhere.keys, which cannot be read: "),
        ("gateway.worker_ca_file is ", "nowhere.pem, which cannot be read: "),
        ("models[0].tokens.tokenizer_file is ", "nowhere.json, which cannot be read: "),
    ];
    assert_eq!(told.lines().count(), beginnings.len(), "{told}");
    for (line, (setting, problem)) in told.lines().zip(beginnings) {
        assert!(line.starts_with(setting) && line.contains(problem) && !line.contains("hush"), "{line}");
    }
}
