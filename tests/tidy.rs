//! Checks the rules of ARCHITECTURE.md that the compiler cannot check.
//!
//! The test reads the repository's files as text. Comments, strings and test code do not count as code, and every rule
//! has an example that violates it. The check is lexical: it prevents accidents, not deliberate circumvention.

use std::fs;
use std::ops::Range;
use std::path::Path;

/// Longer files are split.
const FILE_LINES_MAX: usize = 600;

/// Maximum lines of code of a function outside tests: one screen.
const FUNCTION_LINES_MAX: usize = 70;

/// Directories with code.
const SOURCES: &[&str] = &["src", "actors", "gateway", "benches", "python", "tests"];

/// Manifests whose dependencies need a stated reason.
const MANIFESTS: &[&str] = &[
    "Cargo.toml",
    "gateway/Cargo.toml",
    "benches/harness/Cargo.toml",
    "benches/trial/Cargo.toml",
    "python/Cargo.toml",
];

/// Names forbidden in the pure core: waiting, I/O, clocks and randomness.
const IMPURE: &[&str] = &["tokio", "ractor", "SystemTime", "Instant::now", "rand", "fastrand", "getrandom", ".await"];

/// Modules of the standard library forbidden in the pure core.
const IMPURE_STD: &[&str] = &["env", "fs", "io", "net", "process"];

/// Calls that block an actor on another actor's response.
const CALLS: &[&str] = &[".call(", ".call::<", "call!", "call_t!", "multi_call"];

/// Forbidden left-overs.
const LEFT_OVERS: &[&str] = &["todo!", "unimplemented!", "dbg!", "#[ignore"];

#[test]
fn the_sources_follow_the_rules() {
    let sources = sources();
    assert!(sources.len() > 60, "only {} files found", sources.len());
    let broken: Vec<String> = sources.iter().flat_map(|(path, text)| broken_rules(path, text)).collect();
    assert!(broken.is_empty(), "\n{}\n", broken.join("\n"));
}

/// Cargo does not discover test files if `main.rs` lists them, so a file without a `mod` line would never run.
#[test]
fn every_test_file_is_a_module_of_a_test_binary() {
    let sources = sources();
    let is_root = |path: &str| path.starts_with("tests/") || path.contains("/tests/");
    let mains: Vec<_> = sources.iter().filter(|(path, _)| is_root(path) && path.ends_with("/main.rs")).collect();
    assert!(mains.len() > 3, "{} test binaries found", mains.len());
    for (main, text) in mains {
        let directory = main.trim_end_matches("main.rs");
        let beside = sources.iter().filter_map(|(path, _)| path.strip_prefix(directory));
        for file in beside.filter(|file| !file.contains('/') && *file != "main.rs") {
            let module = file.trim_end_matches(".rs");
            assert!(text.lines().any(|line| line == format!("mod {module};")), "{main} lacks `mod {module};`");
        }
    }
}

#[test]
fn every_dependency_has_its_reason() {
    let unreasoned = |manifest: &&str| {
        let text = fs::read_to_string(root().join(manifest)).expect("manifest is readable");
        dependencies_without_reason(&text).into_iter().map(|line| format!("{manifest}: {line}")).collect::<Vec<_>>()
    };
    let broken: Vec<String> = MANIFESTS.iter().flat_map(unreasoned).collect();
    assert!(broken.is_empty(), "no comment gives the reason above\n{}\n", broken.join("\n"));
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Every Rust file with its path from the root, in order.
pub(crate) fn sources() -> Vec<(String, String)> {
    let mut found = Vec::new();
    for directory in SOURCES {
        collect(directory, &mut found);
    }
    found.sort();
    found
}

fn collect(directory: &str, found: &mut Vec<(String, String)>) {
    for entry in fs::read_dir(root().join(directory)).expect("directory exists") {
        let entry = entry.expect("the directory can be read");
        let name = entry.file_name().into_string().expect("names are plain");
        let path = format!("{directory}/{name}");
        if entry.file_type().expect("the file's type can be read").is_dir() {
            if name != "target" {
                collect(&path, found);
            }
        } else if name.ends_with(".rs") {
            found.push((path, fs::read_to_string(entry.path()).expect("sources are UTF-8")));
        }
    }
}

/// Every rule that a file violates, with the line.
fn broken_rules(path: &str, text: &str) -> Vec<String> {
    let code = code_of(text);
    let shipped = if is_test_file(path) { String::new() } else { without_tests(&code) };
    let mut broken = Vec::new();
    let mut report = |at: usize, what: &str| {
        let line = text.bytes().take(at).filter(|byte| *byte == b'\n').count() + 1;
        broken.push(format!("{path}:{line}: {what}"));
    };
    if path.starts_with("src/") {
        for word in IMPURE {
            occurrences(&shipped, word).for_each(|at| report(at, &format!("`{word}` in code that decides")));
        }
        for (at, module) in std_modules(&shipped, IMPURE_STD) {
            report(at, &format!("`std::{module}` in code that decides"));
        }
    }
    if path.starts_with("actors/") {
        for word in CALLS {
            occurrences(&code, word).for_each(|at| report(at, &format!("`{word}`: no actor awaits another")));
        }
    }
    if path.starts_with("src/") || path.starts_with("actors/") {
        occurrences(&shipped, ".unwrap()").for_each(|at| report(at, "`.unwrap()` outside tests"));
    }
    for word in LEFT_OVERS {
        occurrences(&code, word).for_each(|at| report(at, &format!("`{word}` left over")));
    }
    for at in occurrences(&code, "select!") {
        let arms = code[at + "select!".len()..].trim_start_matches(|c: char| c.is_whitespace() || "({[".contains(c));
        if !arms.strip_prefix("biased").is_some_and(|rest| rest.trim_start().starts_with(';')) {
            report(at, "`select!` without `biased` draws at random");
        }
    }
    if !is_test_file(path) && !text.trim_start().starts_with("//!") {
        report(0, "no `//!` head says what the module owns");
    }
    if !is_below_tests(path) {
        for (at, lines) in functions(&shipped).filter(|(_, lines)| *lines > FUNCTION_LINES_MAX) {
            report(at, &format!("a function of {lines} lines, must have at most {FUNCTION_LINES_MAX}"));
        }
    }
    let lines = text.lines().count();
    if lines > FILE_LINES_MAX {
        report(0, &format!("{lines} lines, must be at most {FILE_LINES_MAX}"));
    }
    broken
}

/// A file of a test binary, or of the tests of a module.
fn is_below_tests(path: &str) -> bool {
    path.starts_with("tests/") || path.contains("/tests/")
}

/// Each function with a body: its position, and its lines of code.
fn functions(code: &str) -> impl Iterator<Item = (usize, usize)> + '_ {
    // A type `fn(..)` has no name.
    let named = occurrences(code, "fn").filter(|at| code[at + 2..].starts_with(' '));
    named.filter_map(|at| {
        let mut depth = 0;
        let opens = code[at..].bytes().position(|byte| {
            match byte {
                b'(' | b'[' => depth += 1,
                b')' | b']' => depth -= 1,
                _ => {}
            }
            depth == 0 && matches!(byte, b'{' | b';')
        })?;
        let body = &code[at + opens..];
        let end = at + opens + block_length(body);
        body.starts_with('{').then(|| (at, code[at..end].lines().filter(|line| !line.trim().is_empty()).count()))
    })
}

/// Tests of a module in a separate file: the module beside it carries the head comment.
fn is_test_file(path: &str) -> bool {
    path.ends_with("/tests.rs")
}

/// Positions of `word` as a complete token, not as a part of an identifier.
pub(crate) fn occurrences<'a>(code: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    let identifier = |c: char| c.is_alphanumeric() || c == '_';
    code.match_indices(word).map(|(at, _)| at).filter(move |at| {
        let begins = !word.starts_with(identifier) || !code[..*at].ends_with(identifier);
        let ends = !word.ends_with(identifier) || !code[at + word.len()..].starts_with(identifier);
        begins && ends
    })
}

/// Uses of modules of `std`, by path or in a braced import.
fn std_modules<'a>(code: &'a str, modules: &'a [&'a str]) -> Vec<(usize, &'a str)> {
    let mut found = Vec::new();
    for at in occurrences(code, "std::") {
        let rest = &code[at + "std::".len()..];
        let reach = if rest.starts_with('{') { rest.find(';').unwrap_or(rest.len()) } else { word_end(rest) };
        found.extend(modules.iter().filter(|m| occurrences(&rest[..reach], m).next().is_some()).map(|m| (at, *m)));
    }
    found
}

fn word_end(text: &str) -> usize {
    text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len())
}

/// The text with comments, strings and characters blanked. Lines and offsets stay the same.
pub(crate) fn code_of(text: &str) -> String {
    let mut code = text.as_bytes().to_vec();
    let mut at = 0;
    while at < code.len() {
        let end = literal_end(text.as_bytes(), at);
        if end > at {
            blank(&mut code, at..end);
            at = end;
        } else {
            at += 1;
        }
    }
    String::from_utf8(code).expect("literals are blanked whole")
}

/// The end of the comment, string or character that begins at `at`, or `at` if none begins there.
fn literal_end(text: &[u8], at: usize) -> usize {
    let rest = &text[at..];
    let joined = at > 0 && (text[at - 1].is_ascii_alphanumeric() || text[at - 1] == b'_');
    let find = |from: usize, what: &[u8]| rest[from..].windows(what.len()).position(|w| w == what).map(|n| from + n);
    let length = match rest {
        [b'/', b'/', ..] => find(0, b"\n").unwrap_or(rest.len()),
        [b'/', b'*', ..] => block_comment_length(rest),
        [b'"', ..] => quoted_length(rest, b'"'),
        [b'r', b'"' | b'#', ..] if !joined => raw_string_length(rest),
        [b'b', b'r', b'"' | b'#', ..] if !joined => 1 + raw_string_length(&rest[1..]),
        [b'\'', b'\\', ..] => quoted_length(rest, b'\''),
        // A quote that closes after one character. Any other quote begins a lifetime or a label.
        [b'\'', first, ..] => match first {
            0x00..=0x7f if rest.get(2) == Some(&b'\'') => 3,
            0xc0.. => find(1, b"'").filter(|end| *end <= 5).map_or(0, |end| end + 1),
            _ => 0,
        },
        _ => 0,
    };
    at + length
}

fn block_comment_length(text: &[u8]) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < text.len() {
        match &text[at..] {
            [b'/', b'*', ..] => (depth, at) = (depth + 1, at + 2),
            [b'*', b'/', ..] => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            break;
        }
    }
    at
}

fn quoted_length(text: &[u8], quote: u8) -> usize {
    let mut at = 1;
    while at < text.len() && text[at] != quote {
        at += if text[at] == b'\\' { 2 } else { 1 };
    }
    (at + 1).min(text.len())
}

/// Length of `r"..."` and `r#"..."#`; 0 for a raw identifier.
fn raw_string_length(text: &[u8]) -> usize {
    let hashes = text[1..].iter().take_while(|byte| **byte == b'#').count();
    if text.get(1 + hashes) != Some(&b'"') {
        return 0;
    }
    let end: Vec<u8> = std::iter::once(b'"').chain(std::iter::repeat_n(b'#', hashes)).collect();
    let from = hashes + 2;
    text[from..].windows(end.len()).position(|w| w == end).map_or(text.len(), |n| from + n + end.len())
}

/// The code with every item under `#[cfg(test)]` blanked.
pub(crate) fn without_tests(code: &str) -> String {
    const MARK: &str = "#[cfg(test)]";
    let mut shipped = code.as_bytes().to_vec();
    for (at, _) in code.match_indices(MARK) {
        let body = at + MARK.len();
        let opens = code[body..].find(['{', ';']).map_or(code.len(), |n| body + n);
        let end = if code[opens..].starts_with('{') { opens + block_length(&code[opens..]) } else { opens };
        blank(&mut shipped, at..end);
    }
    String::from_utf8(shipped).expect("items are blanked whole")
}

/// Length of a block that begins with its brace.
fn block_length(code: &str) -> usize {
    let mut depth = 0;
    for (at, byte) in code.bytes().enumerate() {
        match byte {
            b'{' => depth += 1,
            b'}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return at + 1;
        }
    }
    code.len()
}

fn blank(text: &mut [u8], range: Range<usize>) {
    for byte in text[range].iter_mut().filter(|byte| **byte != b'\n') {
        *byte = b' ';
    }
}

/// Dependencies without a comment above them.
fn dependencies_without_reason(manifest: &str) -> Vec<String> {
    let (mut in_table, mut above, mut missing) = (false, "", Vec::new());
    for line in manifest.lines().map(str::trim) {
        let reasoned = above.starts_with('#');
        if let Some(table) = line.strip_prefix('[') {
            let table = table.trim_end_matches(']');
            in_table = table.ends_with("dependencies");
            let of_one = ["dependencies.", "-dependencies."].iter().any(|part| table.contains(part));
            if of_one && !in_table && !reasoned {
                missing.push(line.to_owned());
            }
        } else if in_table && !line.starts_with('#') && line.contains('=') && !reasoned && !is_continued(above) {
            missing.push(line.to_owned());
        }
        above = line;
    }
    missing
}

/// Whether a list continues after this line.
fn is_continued(line: &str) -> bool {
    line.ends_with(['[', '{', ','])
}

mod checked_itself {
    //! Each rule on a text that violates it, and on one that only resembles a violation.

    use super::{broken_rules, code_of, dependencies_without_reason, without_tests};

    fn broken(path: &str, body: &str) -> Vec<String> {
        broken_rules(path, &format!("//! A head.\n{body}\n"))
    }

    /// Bodies that break a rule in their first line, and bodies that break none.
    #[test]
    fn rules_are_enforced() {
        let long =
            |lines: usize| format!("fn f(a: [u8; 2]) {{\n{}}}", "    a();\n\n    // A word.\n".repeat(lines - 2));
        let (pure, actors) = ("src/select/pick.rs", "actors/router.rs");
        for (path, body) in [
            (pure, "use tokio::sync::oneshot;"),
            (pure, "fn f(a: ractor::ActorId) {}"),
            (pure, "let now = Instant::now();"),
            (pure, "use std::time::SystemTime;"),
            (pure, "let x = rand::random();"),
            (pure, "let x = future.await;"),
            (pure, "let text = std::fs::read(path);"),
            (pure, "use std::{cmp, fs::File};"),
            (pure, "let home = std::env::var(name);"),
            ("gateway/src/a.rs", &long(71)),
            (actors, "a.call(msg, None);"),
            (actors, "ractor::call_t!(a, Msg, 10)?;"),
            (actors, "multi_call(&all);"),
            (actors, "tokio::select! { a = b => c }"),
            ("gateway/src/main.rs", "select! { biased_arm = b => c }"),
            ("tests/router.rs", "fn f() { todo!() }"),
            ("tests/router.rs", "dbg!(x);"),
            ("tests/router.rs", "#[ignore = \"slow\"] fn f() {}"),
            (actors, "let x = y.unwrap();"),
        ] {
            let broken = broken(path, body);
            assert!(!broken.is_empty(), "{path} passes with\n{body}");
            assert!(broken.iter().all(|rule| rule.starts_with(&format!("{path}:2: "))), "{broken:?}");
        }
        for (path, body) in [
            (pure, "// tokio's clock, and what rand would do with std::fs"),
            (pure, "/* ractor /* nested */ .await */ fn quiet() {}"),
            (pure, "const TEXT: &str = \"tokio \\\" .await\";"),
            (pure, "const RAW: &str = r#\"ractor \" std::net\"#;"),
            (pure, "fn operand(brand: u32, is_random: bool) {}"),
            (pure, "use std::{cmp, fmt::Write, mem};"),
            (pure, "#[cfg(test)]\nmod tests { fn f() { std::fs::read(x).unwrap(); } }"),
            (actors, "fn now() { tokio::time::Instant::now() }"),
            ("gateway/src/a.rs", &long(70)),
            ("gateway/tests/a.rs", &long(71)),
            ("src/a.rs", &format!("type F = fn(u8);\n#[cfg(test)]\nmod tests {{ {} }}", long(80))),
            (actors, "let recall = a.callback(msg); // never .call("),
            ("benches/harness/src/engine.rs", "a.call(msg);"),
            (actors, "tokio::select! {\n    biased;\n    a = b => c,\n}"),
            (actors, "let x = y.unwrap_or_default();"),
            ("tests/router.rs", "let x = y.unwrap(); // todo!() stood here"),
        ] {
            assert_eq!(broken(path, body), Vec::<String>::new(), "{path}\n{body}");
        }
        let body = "#[cfg(test)]\nmod tests { fn brace() { let _ = '{'; } }\nfn f() { x.unwrap() }";
        assert_eq!(broken("src/a.rs", body), ["src/a.rs:4: `.unwrap()` outside tests"]);
    }

    #[test]
    fn missing_heads_and_long_files_are_found() {
        assert_eq!(broken_rules("src/a.rs", "use std::mem;\n").len(), 1);
        assert!(broken_rules("src/a/tests.rs", "use super::*;\n").is_empty(), "tests beside their module");
        let long = format!("//! A head.\n{}", "\n".repeat(600));
        assert_eq!(broken_rules("src/a.rs", &long).len(), 1);
    }

    #[test]
    fn blanking_keeps_positions() {
        let text = "let a = 'x'; let b: &'a str = \"é{\"; let c = '\\''; let d = 'é'; br\"}\"; // {";
        let code = code_of(text);
        assert_eq!(code.len(), text.len());
        assert!(!code.contains(['{', '}', '"', '\\']), "{code}");
        assert!(code.contains("&'a str") && code.contains("let d ="), "{code}");
        assert_eq!(without_tests("a #[cfg(test)] mod t { {} } b").split_whitespace().collect::<Vec<_>>(), ["a", "b"]);
    }

    #[test]
    fn dependencies_without_a_reason_are_found() {
        let missing = |text| dependencies_without_reason(text);
        assert_eq!(missing("[dependencies]\na = \"1\"\n"), ["a = \"1\""]);
        assert_eq!(missing("[dev-dependencies]\n# Why a.\na = \"1\"\nb = \"1\"\n"), ["b = \"1\""]);
        assert_eq!(missing("[target.'cfg(unix)'.dependencies]\na = \"1\"\n"), ["a = \"1\""]);
        assert_eq!(missing("[dependencies.a]\nversion = \"1\"\n"), ["[dependencies.a]"]);
        assert!(
            missing("[package]\nname = \"a\"\n[dependencies]\n# Why.\na = \"1\"\n\n[features]\nb = []\n").is_empty()
        );
        assert!(
            missing("[dependencies]\n# Why.\na = { version = \"1\", features = [\n\"b\", \"c=d\",\n] }\n").is_empty()
        );
        assert!(missing("# Why.\n[dependencies.a]\nversion = \"1\"\n").is_empty());
    }
}
