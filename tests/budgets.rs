//! Budgets of size: lines of product code per package, words of all documents, public names of the library.
//!
//! Lines are those with code: blank lines, comments, strings and tests do not count. A change that exceeds a budget
//! deletes something else, or raises the budget with a reason in its commit.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::tidy::{code_of, sources, without_tests};

/// Packages by the prefixes of their paths, with the most lines of product code; the target of all is 88,000. The gateway
/// has grown from 24,600 by the tokens and sessions of agents, conversions of Messages and Responses, errors and
/// heartbeats in streams, further endpoints, the control of engines, the budget of requests, drains of HTTP/2, dates of
/// certificates, a fast form of tokenizers, hints to engines, and a runtime per core. Its target is 22,000. The library has
/// grown from 42,605 by the contexts and holds of programs. All keep their present size, so that they can only shrink.
const PACKAGES: &[(&[&str], usize)] =
    &[(&["src/", "actors/"], 42_810), (&["gateway/src/"], 27_278), (&["benches/"], 15_619), (&["python/"], 1_646)];

/// Lines of test code of all packages.
const TEST_LINES_MAX: usize = 55_000;

/// Public names of the library: the root and its public modules.
const PUBLIC_NAMES_MAX: usize = 128;

/// Words of all documents.
const WORDS_MAX: usize = 50_000;

/// Words of ARCHITECTURE.md.
const ARCHITECTURE_WORDS_MAX: usize = 2_000;

#[test]
fn packages_keep_their_budgets_of_lines() {
    let sources = sources();
    let mut lines = vec![0; PACKAGES.len()];
    let mut test_lines = 0;
    for (path, text) in &sources {
        let code = code_of(text);
        let product = if is_test(path) { 0 } else { code_lines(&without_tests(&code)) };
        test_lines += code_lines(&code) - product;
        if let Some(package) = PACKAGES.iter().position(|(prefixes, _)| prefixes.iter().any(|p| path.starts_with(p))) {
            lines[package] += product;
        }
    }
    println!("product lines: {lines:?}, test lines: {test_lines}");
    for ((package, max), lines) in PACKAGES.iter().zip(&lines) {
        assert!(lines <= max, "{package:?} has {lines} lines of product code, over its budget of {max}");
    }
    assert!(test_lines <= TEST_LINES_MAX, "{test_lines} lines of tests, over the budget of {TEST_LINES_MAX}");
}

#[test]
fn documents_keep_their_budget_of_words() {
    let mut words = BTreeMap::new();
    collect_words(Path::new(env!("CARGO_MANIFEST_DIR")), &mut words);
    let architecture = words.iter().find(|(path, _)| path.ends_with("ARCHITECTURE.md")).map_or(0, |(_, words)| *words);
    assert!((1..=ARCHITECTURE_WORDS_MAX).contains(&architecture), "ARCHITECTURE.md has {architecture} words");
    let all: usize = words.values().sum();
    assert!(all <= WORDS_MAX, "{all} words in {} documents, over the budget of {WORDS_MAX}", words.len());
}

#[test]
fn the_library_keeps_its_budget_of_public_names() {
    let sources: BTreeMap<String, String> = sources().into_iter().collect();
    let root = code_of(&sources["src/lib.rs"]);
    let root = root.split("pub mod internals").next().unwrap_or_default();
    let modules = root.lines().filter_map(|line| line.strip_prefix("pub mod ")?.strip_suffix(';'));
    let of_modules = modules.filter(|module| *module != "test_support").map(|module| {
        let file = sources.get(&format!("src/{module}.rs")).or_else(|| sources.get(&format!("src/{module}/mod.rs")));
        let code = code_of(file.expect("public modules have files"));
        let is_uncounted = |line: &&str| {
            line.starts_with("pub mod ")
                || line.starts_with("pub use ") && line.ends_with("::*;")
                || *line == "#[macro_export]"
        };
        assert_eq!(code.lines().find(is_uncounted), None, "{module} exports names that are not counted");
        public_names(&code)
    });
    let names = public_names(root) + of_modules.sum::<usize>();
    assert!((100..=PUBLIC_NAMES_MAX).contains(&names), "{names} public names, over the budget of {PUBLIC_NAMES_MAX}");
}

fn is_test(path: &str) -> bool {
    path.contains("/tests/") || path.starts_with("tests/") || path.ends_with("/tests.rs")
}

fn code_lines(code: &str) -> usize {
    code.lines().filter(|line| !line.trim().is_empty()).count()
}

/// Names that `pub use` exports, and that `pub` items define, at the top level of a module.
fn public_names(code: &str) -> usize {
    let uses = code.match_indices("\npub use ").map(|(at, _)| {
        let tree = &code[at..at + code[at..].find(';').unwrap_or(0)];
        let leaves = tree.split(['{', ',', '}']).map(str::trim);
        leaves.filter(|leaf| !leaf.is_empty() && !leaf.ends_with("::")).count().max(1)
    });
    let kinds = ["struct", "enum", "fn", "const", "type", "trait", "static"];
    let items = kinds.iter().map(|kind| code.matches(&format!("\npub {kind} ")).count());
    uses.sum::<usize>() + items.sum::<usize>()
}

/// Words of every Markdown file below a directory, build output left out.
fn collect_words(directory: &Path, words: &mut BTreeMap<String, usize>) {
    for entry in fs::read_dir(directory).expect("directory is readable") {
        let path = entry.expect("directory is readable").path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() && !name.starts_with('.') && !name.contains("target") && name != "node_modules" {
            collect_words(&path, words);
        } else if name.ends_with(".md") {
            let text = fs::read_to_string(&path).expect("documents are UTF-8");
            words.insert(path.to_string_lossy().into_owned(), text.split_whitespace().count());
        }
    }
}

mod checked_itself {
    //! The rules on small examples.

    use super::{code_lines, public_names};

    #[test]
    fn public_names_are_counted() {
        let code = "\npub use a::b;\npub use a::{B, C,\n    D};\npub(crate) use a::E;\nuse a::F;\npub struct G;\n    pub fn h() {}\n";
        assert_eq!(public_names(code), 5);
    }

    #[test]
    fn blank_lines_do_not_count() {
        assert_eq!(code_lines("a\n\n   \nb\n"), 2);
    }
}
