//! Checks `docs/gateway.md` against the code: every setting is listed in order, with its type, default and range.
//!
//! Names and defaults come from loaded settings, types and ranges from the errors for invalid values. For each
//! difference the test prints the required table row.

use std::fs;
use std::path::Path;

use pointsman_gateway::settings::{ConfigFile, LoadError, LoadErrors, Loaded, Sources};

const PAGE: &str = "docs/gateway.md";

/// Tables of the page: heading, section header in the printed settings, and path prefix in errors.
const TABLES: [(&str, &str, &str); 9] = [
    ("## Gateway settings", "[gateway]", "gateway"),
    ("## Admin settings", "[admin]", "admin"),
    ("## Picker settings", "[picker]", "picker"),
    ("## Replica settings", "[replicas]", "replicas"),
    ("## Model settings", "[[models]]", "models[0]"),
    ("## Kubernetes settings", "[models.kubernetes]", "models[0].kubernetes"),
    ("## Disaggregation settings", "[models.disaggregation]", "models[0].disaggregation"),
    ("## Token settings", "[models.tokens]", "models[0].tokens"),
    ("## Tenant settings", "[[tenants]]", "tenants[0]"),
];

/// Loads the minimal valid settings, with `line` in the section `header`.
fn load(header: &str, line: &str) -> Result<Loaded, LoadErrors> {
    let key = line.split(' ').next().unwrap_or_default();
    let is_tenants = header == "[[tenants]]";
    let mut text = String::new();
    for (_, printed, _) in TABLES {
        let least: &[(&str, &str)] = match printed {
            "[gateway]" if is_tenants => &[("salt_secret_file", "\"s\"")],
            "[admin]" => &[("token_file", "\"t\"")],
            "[replicas]" if header == "[replicas]" => &[("listen", "\"127.0.0.1:9\""), ("peers", "[\"localhost:9\"]")],
            "[replicas]" => continue,
            "[[models]]" => &[("name", "\"m\"")],
            "[models.kubernetes]" if printed == header => &[("selector", "\"app=e\""), ("ports", "[8000]")],
            "[models.kubernetes]" => continue,
            "[models.disaggregation]" if printed == header => &[("prefill", "\"p\"")],
            "[models.disaggregation]" => continue,
            "[[tenants]]" if !is_tenants => continue,
            "[[tenants]]" => &[("name", "\"t\""), ("keys_file", "\"k\"")],
            _ => &[],
        };
        text.push_str(&format!("{printed}\n"));
        for (name, value) in least {
            if printed != header || *name != key {
                text.push_str(&format!("{name} = {value}\n"));
            }
        }
        if printed == header {
            text.push_str(&format!("{line}\n"));
        }
    }
    if header == "[models.disaggregation]" {
        text.push_str("[[models]]\nname = \"p\"\n");
    }
    let file = Some(ConfigFile { text, directory: "/etc".into() });
    Sources { file, ..Sources::default() }.load()
}

/// Name and default of each setting in the section `header`, as printed: required, none, or a value.
fn settings_under(header: &str) -> Vec<(String, String)> {
    let printed = load(header, "").expect("minimal settings load").to_string();
    let lines = printed.lines().skip_while(|line| *line != header).skip(1).take_while(|line| !line.is_empty());
    let setting = |line: &str| {
        let (setting, origin) = line.rsplit_once(" # ").expect("an origin");
        match setting.trim().strip_prefix("# ").and_then(|line| line.strip_suffix(" is not set")) {
            Some(name) => (name.to_owned(), "none".to_owned()),
            None => {
                let (name, value) = setting.trim().split_once(" = ").expect("a value");
                let default = if origin == "file" { "required".to_owned() } else { format!("`{value}`") };
                (name.to_owned(), default)
            }
        }
    };
    lines.map(setting).collect()
}

/// The rule in the error for exactly this setting.
fn rule_of(header: &str, setting: &str, line: &str) -> Option<String> {
    let problems = load(header, line).err()?.0;
    problems.into_iter().find_map(|problem| match problem {
        LoadError::Value { setting: told, rule, .. } if told == setting => Some(rule),
        LoadError::Structure { setting: told, .. } if told.starts_with(setting) => Some("list".to_owned()),
        _ => None,
    })
}

/// The type, in the notation of the page.
fn kind_of(header: &str, path: &str, name: &str) -> String {
    let rule =
        rule_of(header, &format!("{path}.{name}"), &format!("{name} = [1.5]")).expect("no setting accepts this value");
    match rule.as_str() {
        "an integer from 0 to 4294967295" => "u32".to_owned(),
        "an integer from 0 to 9223372036854775807" => "u64".to_owned(),
        "a number" => "f64".to_owned(),
        "true or false" => "boolean".to_owned(),
        "a text, not empty" => "string".to_owned(),
        "the path of a file" => "path".to_owned(),
        "list" => "list".to_owned(),
        rule if rule.starts_with("an IP address") => "address".to_owned(),
        rule => {
            let words = rule.strip_prefix("one of ").unwrap_or_else(|| panic!("{name}: {rule}"));
            words.split(", ").map(|word| format!("`{word}`")).collect::<Vec<_>>().join(", ")
        }
    }
}

/// The range of a number, if it has one.
fn range_of(header: &str, path: &str, name: &str, kind: &str) -> Option<String> {
    let probes = match kind {
        "u32" => ["0", "4294967295"],
        "u64" => ["0", "9223372036854775807"],
        "f64" => ["-1.0", "1e300"],
        _ => return None,
    };
    probes.iter().find_map(|probe| rule_of(header, &format!("{path}.{name}"), &format!("{name} = {probe}")))
}

#[test]
fn every_table_lists_its_settings() {
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(PAGE)).expect("the page");
    let mut wrong = Vec::new();
    for (heading, header, path) in TABLES {
        let rows = rows_under(&page, heading);
        let settings = settings_under(header);
        for (name, default) in &settings {
            let kind = kind_of(header, path, name);
            let range = range_of(header, path, name, &kind);
            let optional = if default == "none" { ", optional" } else { "" };
            let kind = format!("{kind}{optional}");
            let row = rows.iter().find(|row| row[0].trim_matches('`') == name);
            let agrees = row.is_some_and(|row| {
                let (stated, rule) = row[1].split_once("; ").unwrap_or((row[1].as_str(), ""));
                let is_ranged = range.as_ref().is_none_or(|range| rule == range);
                stated == kind && is_ranged && row[2] == *default && row.get(3).is_some_and(|cell| !cell.is_empty())
            });
            if !agrees {
                let rule = range.map_or(String::new(), |range| format!("; {range}"));
                let now = row.map(|row| row.join(" | "));
                wrong.push(format!("under {heading:?} {now:?} must be\n| `{name}` | {kind}{rule} | {default} | ... |"));
            }
        }
        let listed: Vec<&str> = rows.iter().map(|row| row[0].trim_matches('`')).collect();
        let names: Vec<&str> = settings.iter().map(|(name, _)| name.as_str()).collect();
        if listed != names {
            wrong.push(format!("under {heading:?} stand\n  {listed:?}\nmust be, in this order\n  {names:?}"));
        }
    }
    assert!(wrong.is_empty(), "{PAGE} differs from the code:\n\n{}\n", wrong.join("\n\n"));
}

/// Settings in the tables of `docs/kubernetes.md` that map those of other products. `router.` settings are compared with
/// `docs/configuration.md`, which a test of the library compares with the code.
#[test]
fn settings_compared_with_other_products_exist() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
    let read = |page: &str| fs::read_to_string(docs.join(page)).expect("the page");
    let (page, configuration) = (read("kubernetes.md"), read("configuration.md"));
    let mut known: Vec<String> = vec!["router.policy".to_owned()];
    for (_, header, path) in TABLES {
        let path = path.replace("[0]", "");
        known.extend(settings_under(header).into_iter().map(|(name, _)| format!("{path}.{name}")));
    }
    let first_cells = configuration.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
    known.extend(first_cells.map(|name| format!("router.{name}")));
    let mut compared = 0;
    for heading in ["## Coming from llm-d", "## Coming from Dynamo"] {
        for row in rows_under(&page, heading) {
            for setting in row[1].split('`').skip(1).step_by(2) {
                let name = setting.split(' ').next().unwrap_or_default();
                let prefixes = ["gateway.", "admin.", "picker.", "replicas.", "models.", "router."];
                if prefixes.iter().any(|prefix| name.starts_with(prefix)) {
                    assert!(known.iter().any(|known| known == name), "{}: {name} is no setting", row[0]);
                    compared += 1;
                }
            }
        }
    }
    assert!(compared > 40, "{compared} settings");
}

/// The rows of the first table after a heading, as cells, without its header.
fn rows_under(page: &str, heading: &str) -> Vec<Vec<String>> {
    let lines = page.lines().skip_while(|line| *line != heading).skip(1);
    let in_section = lines.take_while(|line| !line.starts_with("## "));
    let table = in_section.skip_while(|line| !line.starts_with('|')).take_while(|line| line.starts_with('|'));
    let cells = |line: &str| line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect();
    let rows: Vec<Vec<String>> = table.skip(2).map(cells).collect();
    assert!(!rows.is_empty(), "{PAGE} has no table under {heading:?}");
    rows
}
