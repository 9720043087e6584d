//! Tests in processes of their own.

use std::process::Command;

/// Environment variable of a process that runs one test.
const ALONE: &str = "POINTSMAN_TEST_ALONE";

/// Runs the calling test in a process of its own, and returns from it in the present one. For tests of process-wide
/// state: the metrics recorder, allocated bytes, panic hooks, the interest of tracing callsites. It stands in the test
/// itself, whose name it reads, and not in a helper.
macro_rules! alone {
    () => {{
        fn here() {}
        if !$crate::alone::runs_alone(std::any::type_name_of_val(&here)) {
            return;
        }
    }};
}

/// Whether this process runs the test of this place only. If not, another process has run it.
///
/// # Panics
/// If the test fails.
pub(crate) fn runs_alone(place: &str) -> bool {
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let parts = place.split("::").skip(1).take_while(|part| !matches!(*part, "{{closure}}" | "here"));
    let name = parts.collect::<Vec<_>>().join("::");
    let this = std::env::current_exe().expect("the path of this test");
    let run = Command::new(this).args(["--exact", &name, "--nocapture"]).env(ALONE, "1").output();
    let run = run.expect("the process starts");
    let (output, errors) = (String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr));
    eprint!("{output}{errors}");
    assert!(run.status.success() && output.contains("1 passed"), "{name} failed in its own process: {}", run.status);
    false
}
