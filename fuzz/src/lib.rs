//! Valid inputs of the fuzz targets, from which libFuzzer starts.

use std::fs;
use std::path::Path;

use pointsman::test_support::hostile::TARGETS;

/// Writes the valid inputs of a target to its corpus.
///
/// # Panics
/// There is no such target, or its corpus cannot be written.
pub fn write_seeds(name: &str) {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(name);
    fs::create_dir_all(&corpus).expect("the corpus is writable");
    let target = TARGETS.iter().find(|target| target.name == name).expect("a target of the library");
    for (number, seed) in (target.seeds)().into_iter().enumerate() {
        fs::write(corpus.join(format!("seed-{number}")), seed).expect("the corpus is writable");
    }
}
