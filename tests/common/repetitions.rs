//! Number of repetitions of a test, from the environment.

/// Repetitions of a test: the environment variable, by default `otherwise`.
#[expect(clippy::disallowed_methods, reason = "test effort is not router configuration")]
pub(crate) fn repetitions(variable: &str, otherwise: u64) -> u64 {
    std::env::var(variable).ok().and_then(|number| number.parse().ok()).unwrap_or(otherwise)
}
