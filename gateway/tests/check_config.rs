//! `pointsman check-config` as an operator runs it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Runs the command in an environment of nothing but `env`.
fn check_config(file: &Path, env: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
    command.arg("check-config").arg("--config").arg(file).env_clear().envs(env.iter().copied());
    command.output().expect("the command runs")
}

fn example() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/pointsman.toml")
}

/// A file of this test's own.
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
    let env = [("POINTSMAN_ROUTER_BLOCK_SIZE", "32"), ("POINTSMAN_SOMETHING_ELSE", "x")];
    let output = check_config(&example(), &env);
    assert_eq!((output.status.code(), text(&output.stderr).as_str()), (Some(0), ""));
    let printed = text(&output.stdout);
    let settings = ["block_size = 32", "queue_threshold = 2.0", "seed = 0", "# index_bytes_max is not set"];
    let origins = ["environment: POINTSMAN_ROUTER_BLOCK_SIZE", "file", "default", "default"];
    for (setting, origin) in settings.into_iter().zip(origins) {
        let line = printed.lines().find(|line| line.starts_with(setting)).unwrap_or_else(|| panic!("{printed}"));
        assert!(line.ends_with(&format!(" # {origin}")), "{line}");
    }
    let again = check_config(&written("printed.toml", &printed), &[]);
    assert_eq!(again.status.code(), Some(0), "what was printed is accepted: {}", text(&again.stderr));
}

#[test]
fn a_broken_file_is_refused_with_every_problem() {
    let broken = written(
        "broken.toml",
        "[server]\nport = 1\n[router]\nblok_size = 16\ntemperature = -1.0\n[[router.queue_classes]]\nname = \"a b\"\n",
    );
    let env = [("POINTSMAN_ROUTER_SEED", "x"), ("POINTSMAN_ROUTER_SEAD", "1"), ("POINTSMAN_ROUTER_QUEUE_CLASSES", "")];
    let output = check_config(&broken, &env);
    assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(2), ""));
    assert_eq!(
        text(&output.stderr).lines().collect::<Vec<_>>(),
        [
            "router.blok_size is not a known key, must be the name of a setting",
            "server is not a known key, must be router, the only table",
            "POINTSMAN_ROUTER_QUEUE_CLASSES is \"\", must be absent: queue_classes can be set in the file only",
            "POINTSMAN_ROUTER_SEAD is not a known variable, must end in the name of a setting in upper case",
            "POINTSMAN_ROUTER_SEED is \"x\", must be an integer from 0 to 9223372036854775807",
            "router.temperature is -1, must be between 0 and 1e9 (file)",
            "router.queue_classes[0].name is a b, must be one or more letters, digits, _, . or - (file)",
        ]
    );
}

#[test]
fn a_file_that_is_not_there_is_named() {
    let output = check_config(Path::new("nowhere.toml"), &[]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).starts_with("nowhere.toml cannot be read: "), "{}", text(&output.stderr));
}
