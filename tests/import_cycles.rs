//! Rejects import cycles: among the files of `src/` and `actors/`, and among the folders of every other crate.
//!
//! The test reads `use` declarations and paths that begin with `crate` or `super`, outside test code. A path refers to
//! the deepest file in it. A name that a module re-exports from a child refers to the child, so such a re-export is no
//! import. An item that the parent itself defines refers to the parent. The path of a visibility is no import.

use std::collections::{BTreeMap, BTreeSet};

use crate::tidy::{code_of, occurrences, sources, without_tests};

/// Sources of the other crates. Files of one folder may import each other there.
const CRATES: [&str; 4] = ["gateway/src/", "benches/trial/src/", "benches/harness/src/", "python/src/"];

#[test]
fn folders_of_other_crates_import_in_one_direction() {
    let sources = sources();
    for root in CRATES {
        let imports = Imports::of(&sources, |path| path.strip_prefix(root));
        assert!(imports.0.len() > 3, "{root}: only {} files found", imports.0.len());
        assert_eq!(imports.of_folders().cycle(), None, "folders of {root}");
        assert_eq!(imports.cycle_across_folders(), None, "files of {root}");
    }
}

#[test]
fn folders_of_the_gateway_import_those_above_them() {
    let sources = sources();
    let (_, lib) = sources.iter().find(|(path, _)| path == "gateway/src/lib.rs").expect("the crate has a root");
    let order: Vec<String> = lib
        .lines()
        .filter_map(|line| line.strip_prefix("pub mod ")?.strip_suffix(';'))
        .map(|folder| format!("crate::{folder}"))
        .collect();
    let at = |folder: &str| order.iter().position(|known| known == folder);
    assert!(order.len() > 10, "{order:?}");
    let folders = Imports::of(&sources, |path| path.strip_prefix("gateway/src/")).of_folders();
    for (folder, imported) in &folders.0 {
        for target in imported {
            let (Some(from), Some(to)) = (at(folder), at(target)) else { continue };
            assert!(to < from, "{folder} imports {target}, which is below it in lib.rs");
        }
    }
}

#[test]
fn files_import_in_one_direction() {
    let imports = Imports::of(&sources(), in_library);
    assert!(imports.0.len() > 200, "only {} files found", imports.0.len());
    assert_eq!(imports.cycle(), None);
}

/// The files that each file imports, named by module path.
struct Imports(BTreeMap<String, BTreeSet<String>>);

/// A path in a file: absolute, and whether a `pub use` contains it.
struct Import {
    is_reexport: bool,
    path: Vec<String>,
}

impl Imports {
    /// `inner` is the path in the crate, `None` outside it.
    fn of<'a>(sources: &'a [(String, String)], inner: impl Fn(&'a str) -> Option<&'a str>) -> Self {
        let code = |(path, text): &'a (String, String)| {
            let code = without_tests(&code_of(text)).replace("pub(in crate", "pub(in ");
            Some((module_of(inner(path)?)?, code))
        };
        let code: BTreeMap<String, String> = sources.iter().filter_map(code).collect();
        let paths = |(file, code_of_file): (&String, &String)| (file.clone(), imports_of(file, code_of_file, &code));
        let paths: BTreeMap<String, Vec<Import>> = code.iter().map(paths).collect();
        let imported = |(file, imports): (&String, &Vec<Import>)| {
            let own_child = format!("{file}::");
            let targets = imports.iter().filter_map(|import| {
                let target = file_of(&import.path, &paths, 0)?;
                (target != *file && !(import.is_reexport && target.starts_with(&own_child))).then_some(target)
            });
            (file.clone(), targets.collect())
        };
        Self(paths.iter().map(imported).collect())
    }

    /// The imports between the folders of the crate.
    fn of_folders(&self) -> Self {
        let folder = |module: &String| module.split("::").take(2).collect::<Vec<_>>().join("::");
        let mut folders: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for (file, targets) in &self.0 {
            let own = folder(file);
            let others = targets.iter().map(folder).filter(|target| *target != own && target != "crate");
            folders.entry(own.clone()).or_default().extend(others);
        }
        Self(folders)
    }

    /// Two files that reach each other, in folders of which none contains the other.
    fn cycle_across_folders(&self) -> Option<(&str, &str)> {
        let parent = |module: &str| module.rsplit_once("::").map_or(String::new(), |(parent, _)| format!("{parent}::"));
        let are_apart =
            |a: &str, b: &str| !format!("{b}::").starts_with(&parent(a)) && !format!("{a}::").starts_with(&parent(b));
        let reached: BTreeMap<&str, BTreeSet<&str>> =
            self.0.keys().map(|file| (file.as_str(), self.reached(file))).collect();
        let pairs = reached.iter().flat_map(|(a, all)| all.iter().map(move |b| (*a, *b)));
        pairs.into_iter().find(|(a, b)| are_apart(a, b) && reached.get(b).is_some_and(|back| back.contains(a)))
    }

    /// The files that a file imports, directly or not.
    fn reached<'a>(&'a self, file: &'a str) -> BTreeSet<&'a str> {
        let (mut reached, mut rest) = (BTreeSet::new(), vec![file]);
        while let Some(next) = rest.pop() {
            let targets = self.0.get(next).into_iter().flatten().map(String::as_str);
            rest.extend(targets.filter(|target| reached.insert(*target)));
        }
        reached
    }

    /// One cycle, if any: each module imports the next, and the last one the first.
    fn cycle(&self) -> Option<Vec<&str>> {
        let mut finished = BTreeSet::new();
        self.0.keys().find_map(|start| self.cycle_from(start, &mut Vec::new(), &mut finished))
    }

    fn cycle_from<'a>(
        &'a self,
        at: &'a str,
        path: &mut Vec<&'a str>,
        finished: &mut BTreeSet<&'a str>,
    ) -> Option<Vec<&'a str>> {
        if let Some(first) = path.iter().position(|on_path| *on_path == at) {
            return Some(path[first..].to_vec());
        }
        if !finished.contains(at) {
            path.push(at);
            let targets = self.0.get(at).into_iter().flatten();
            let found = targets.into_iter().find_map(|target| self.cycle_from(target, path, finished));
            if found.is_some() {
                return found;
            }
            path.pop();
            finished.insert(at);
        }
        None
    }
}

/// The path of a source file in the library, whose actors are a module.
fn in_library(path: &str) -> Option<&str> {
    path.strip_prefix("src/").or_else(|| path.starts_with("actors/").then_some(path))
}

/// The module path of a source file; `None` for test files.
fn module_of(inner: &str) -> Option<String> {
    let module = inner.strip_suffix(".rs")?;
    let segments = module.split('/').filter(|segment| !matches!(*segment, "mod" | "lib"));
    let is_test = module.ends_with("/tests") || module.contains("/tests/");
    (!is_test).then(|| std::iter::once("crate").chain(segments).collect::<Vec<_>>().join("::"))
}

/// Every path in a file, absolute.
fn imports_of(file: &str, code: &str, files: &BTreeMap<String, String>) -> Vec<Import> {
    let mut imports = Vec::new();
    let mut rest = code.as_bytes().to_vec();
    for at in occurrences(code, "use") {
        let Some(length) = code[at..].find(';').filter(|_| code[at + 3..].starts_with(char::is_whitespace)) else {
            continue; // a `use<..>` bound
        };
        let before = code[..at].trim_end();
        let is_reexport = before.ends_with("pub") || before.ends_with(')') && before.rfind("pub(") > before.rfind(';');
        let mut paths = Vec::new();
        expand(&code[at + 3..at + length], "", &mut paths);
        let absolute = paths.iter().filter_map(|path| absolute(file, path, files));
        imports.extend(absolute.map(|path| Import { is_reexport, path }));
        rest[at..at + length].fill(b' ');
    }
    let rest = String::from_utf8(rest).expect("declarations are blanked whole");
    for at in occurrences(&rest, "crate").chain(occurrences(&rest, "super")) {
        let path = rest[at..].split(|c: char| !c.is_alphanumeric() && c != '_' && c != ':').next().unwrap_or_default();
        let is_path = path.contains("::") && !rest[..at].ends_with("::") && !rest[..at].ends_with("(in ");
        imports.extend(absolute(file, path, files).filter(|_| is_path).map(|path| Import { is_reexport: false, path }));
    }
    imports
}

/// The paths of a `use` tree.
fn expand(tree: &str, prefix: &str, paths: &mut Vec<String>) {
    let tree = tree.trim();
    let Some(open) = tree.find('{') else {
        let name = tree.split_whitespace().next().unwrap_or_default();
        return paths.push(format!("{prefix}{name}"));
    };
    let prefix = format!("{prefix}{}", tree[..open].trim());
    let inner = &tree[open + 1..tree.rfind('}').unwrap_or(tree.len())];
    let (mut depth, mut from) = (0, 0);
    for (at, c) in inner.char_indices().chain(std::iter::once((inner.len(), ','))) {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                if !inner[from..at].trim().is_empty() {
                    expand(&inner[from..at], &prefix, paths);
                }
                from = at + 1;
            }
            _ => {}
        }
    }
}

/// A path from the crate's root; `None` for another crate's.
fn absolute(file: &str, path: &str, files: &BTreeMap<String, String>) -> Option<Vec<String>> {
    let mut segments = path.split("::").filter(|segment| !segment.is_empty()).peekable();
    let own = || file.split("::").map(str::to_owned).collect::<Vec<_>>();
    let mut base = match *segments.peek()? {
        "crate" => Vec::new(),
        "self" => {
            segments.next();
            own()
        }
        "super" => own(),
        child => files.contains_key(&format!("{file}::{child}")).then(own)?,
    };
    while segments.next_if_eq(&"super").is_some() {
        base.pop();
    }
    base.extend(segments.filter(|segment| !matches!(*segment, "self" | "*")).map(str::to_owned));
    Some(base)
}

/// The file that defines the target of a path, after resolving re-exports.
fn file_of(path: &[String], files: &BTreeMap<String, Vec<Import>>, depth: u32) -> Option<String> {
    let known = (1..=path.len()).rev().find(|n| files.contains_key(&path[..*n].join("::")))?;
    let (module, rest) = (path[..known].join("::"), &path[known..]);
    let reexported = rest
        .first()
        .and_then(|name| files[&module].iter().find(|import| import.is_reexport && import.path.last() == Some(name)));
    match reexported {
        Some(import) if depth < 8 => file_of(&[&import.path[..], &rest[1..]].concat(), files, depth + 1),
        _ => Some(module),
    }
}

mod checked_itself {
    //! The check on small examples.

    use super::{Imports, in_library};

    fn cycle(files: &[(&str, &str)]) -> Option<Vec<String>> {
        let sources: Vec<_> = files.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned())).collect();
        Imports::of(&sources, in_library).cycle().map(|cycle| cycle.into_iter().map(str::to_owned).collect())
    }

    #[test]
    fn a_cycle_is_found() {
        let files = [
            ("actors/mod.rs", "mod a;\nmod b;\nmod c;"),
            ("actors/a.rs", "use super::{c::Unused, b::{Message, State as Other}};"),
            ("actors/b.rs", "fn f() { crate::actors::c::run() }"),
            ("actors/c.rs", "use crate::actors::a::Actor;"),
        ];
        let found = cycle(&files).expect("a, b and c import each other");
        assert_eq!(found, ["crate::actors::a", "crate::actors::b", "crate::actors::c"]);
    }

    #[test]
    fn reexports_and_tests_do_not_count_as_imports() {
        let files = [
            ("actors/handle/mod.rs", "mod router;\nmod route;\npub use router::Router;\npub(crate) use route::route;"),
            ("actors/handle/router.rs", "pub struct Router;\n#[cfg(test)]\nmod tests { use super::super::route; }"),
            ("actors/handle/route.rs", "use super::Router;\n// use crate::actors::handle::router::Router;"),
            ("actors/handle/router/tests.rs", "use crate::actors::handle::route::route;"),
        ];
        assert_eq!(cycle(&files), None);
    }
}
