//! Reader of result files.
//!
//! Detects the kind of each JSON object. Single runs of one workload are grouped into a comparison; existing
//! comparisons are unchanged.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;

use crate::compare::Comparison;
use crate::results::{SCHEMA_VERSION, Summary};
use crate::suite::{Row, Suite};
use crate::{Failed, unusable};

/// Maximum size of a file in bytes, far above any suite and far below the memory of a machine.
const FILE_BYTES_MAX: u64 = 256 << 20;

/// Sections of all files, in the given order. A file contains any number of JSON objects.
pub(super) fn read(paths: &[PathBuf]) -> Result<Vec<Row>, Failed> {
    let mut sections = Vec::new();
    let mut single = Vec::new();
    for path in paths {
        for value in serde_json::Deserializer::from_str(&text(path)?).into_iter::<Value>() {
            let no_results = |source| format!("{} contains no results: {source}", path.display());
            let value = value.map_err(no_results)?;
            check_version(path, &value)?;
            if value.get("rows").is_some() {
                sections.extend(Suite::deserialize(value).map_err(no_results)?.rows);
            } else if value.get("contenders").is_some() {
                sections.push(section(Comparison::deserialize(value).map_err(no_results)?));
            } else {
                single.push(Summary::deserialize(value).map_err(no_results)?);
            }
        }
    }
    sections.extend(together(single).into_iter().map(section));
    if sections.is_empty() { Err("no results in the files given".into()) } else { Ok(sections) }
}

fn section(comparison: Comparison) -> Row {
    let first = comparison.contenders.first().and_then(|first| first.runs.first());
    let name = first.map_or_else(String::new, |run| {
        let ranks = u64::from(run.workers) * u64::from(run.dp_size);
        if ranks > 0 { format!("{}, {ranks} ranks", run.workload) } else { run.workload.clone() }
    });
    Row { name, why: String::new(), comparison }
}

fn text(path: &Path) -> Result<String, Failed> {
    let mut text = String::new();
    let read = File::open(path).and_then(|file| file.take(FILE_BYTES_MAX + 1).read_to_string(&mut text));
    if read.map_err(unusable("read", path))? as u64 > FILE_BYTES_MAX {
        return Err(format!("{} is larger than {FILE_BYTES_MAX} bytes", path.display()).into());
    }
    Ok(text)
}

fn check_version(path: &Path, value: &Value) -> Result<(), Failed> {
    let found = value["schema_version"].as_u64().unwrap_or_default();
    if found == u64::from(SCHEMA_VERSION) {
        return Ok(());
    }
    let path = path.display();
    Err(format!("{path}: schema_version is {found}, this program reads {SCHEMA_VERSION}").into())
}

/// Groups runs of the same workload and fleet into comparisons; the first policy of a group is the reference. The name
/// of a generated workload contains its seed, so names are compared without it.
fn together(runs: Vec<Summary>) -> Vec<Comparison> {
    type Contenders = Vec<(String, Vec<Summary>)>;
    let mut groups: Vec<Contenders> = Vec::new();
    for run in runs {
        let same = |group: &&mut Contenders| group.iter().any(|(_, runs)| runs.iter().any(|other| alike(other, &run)));
        let group = match groups.iter_mut().find(same) {
            Some(group) => group,
            None => {
                groups.push(Vec::new());
                groups.last_mut().expect("just pushed")
            }
        };
        match group.iter_mut().find(|(name, _)| *name == run.policy) {
            Some((_, runs)) => runs.push(run),
            None => group.push((run.policy.clone(), vec![run])),
        }
    }
    for (_, runs) in groups.iter_mut().flatten() {
        runs.sort_by_key(|run| run.seed);
    }
    groups.into_iter().map(Comparison::of_runs).collect()
}

fn alike(one: &Summary, other: &Summary) -> bool {
    let of = |run: &Summary| {
        let name = run.workload.split(", seed ").next().unwrap_or_default().to_owned();
        (name, run.trace_checksum.clone(), run.workers, run.dp_size, run.requests + run.warmup_requests)
    };
    let shape = |run: &Summary| (run.workload.clone(), of(run).1, run.workers, run.dp_size);
    of(one) == of(other) || shape(one) == shape(other)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::tests::summary;

    fn file(name: &str, text: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("pointsman-page-{}-{name}", std::process::id()));
        std::fs::write(&path, text).expect("written");
        path
    }

    #[test]
    fn runs_of_one_workload_are_grouped() {
        let other = Summary { workload: "agents".into(), ..summary("kv", 1, 1.0) };
        let runs = [summary("kv", 2, 1.0), other, summary("latency", 1, 0.5), summary("kv", 1, 1.0)];
        let lines: Vec<_> = runs.iter().map(|run| serde_json::to_string(run).expect("json")).collect();
        let (first, second) = (file("a", &lines[..2].join("\n")), file("b", &lines[2..].join("\n")));
        let sections = read(&[first.clone(), second.clone()]).expect("read");
        let of = |section: &Row| {
            let names = section.comparison.contenders.iter().map(|contender| contender.name.clone());
            (section.name.clone(), names.collect::<Vec<_>>(), section.comparison.seeds.clone())
        };
        assert_eq!(
            of(&sections[0]),
            ("chat, 2 ranks".to_owned(), vec!["kv".to_owned(), "latency".to_owned()], vec![1, 2])
        );
        assert_eq!(of(&sections[1]).0, "agents, 2 ranks");
        for path in [first, second] {
            std::fs::remove_file(path).expect("removed");
        }
    }

    #[test]
    fn files_without_results_are_rejected_by_name() {
        for (name, text, words) in [
            ("d", "{}", "schema_version is 0"),
            ("e", "nothing", "contains no results"),
            ("f", r#"{"schema_version":1}"#, "contains no results"),
            ("g", "", "no results in the files"),
        ] {
            let path = file(name, text);
            let error = read(std::slice::from_ref(&path)).expect_err("refused").to_string();
            assert!(error.contains(words), "{error}");
            std::fs::remove_file(path).expect("removed");
        }
    }
}
