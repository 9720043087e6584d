//! Number of cases of the property tests, and the files for their failures.

use proptest::test_runner::{Config, FileFailurePersistence};

/// `PROPTEST_CASES` cases, by default `cases`. Failures are stored in `seeds`.
#[expect(clippy::disallowed_methods, reason = "test effort is not router configuration")]
pub(crate) fn effort(cases: u32, seeds: &'static str) -> Config {
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(cases);
    let failure_persistence = Some(Box::new(FileFailurePersistence::Direct(seeds)) as _);
    Config { cases, failure_persistence, ..Config::default() }
}
