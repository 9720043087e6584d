//! Checks `docs/configuration.md` against the code: every setting is listed in order, with its type, default and rules.
//!
//! Fields come from the structs through serde, rules from the errors for invalid values. For each difference the test
//! prints the required table row.

use std::collections::BTreeSet;
use std::path::Path;
use std::{fmt, fs};

use pointsman::RouterConfig;
use pointsman::config::{QueueClass, UncachedBucket};
use pointsman::policy::{Policy, PolicyConfig};
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::{Value, json};

const PAGE: &str = "docs/configuration.md";

/// Builds a configuration with one setting from its path and value.
type PlaceValue = Box<dyn Fn(&str, &Value) -> Value>;

/// Settings of one table.
struct Subject {
    /// Heading above the table.
    heading: &'static str,
    /// Paths with defaults.
    fields: Vec<(String, Value)>,
    /// Returns a configuration in which this field, and no other field of the table, has this value.
    place: PlaceValue,
    /// Prefix of the field names in errors.
    prefix: &'static str,
    /// Whether it is a section, whose fields all have defaults, or an element of a list.
    is_section: bool,
}

fn subjects() -> Vec<Subject> {
    let config = RouterConfig::default();
    let mut subjects = vec![
        section("## Router settings", "", &config),
        section("## Index", "index.", &config.index),
        section("## Speculative entries", "index.speculative.", &config.index.speculative),
        section("## KV events", "events.", &config.events),
        section("## Load", "load.", &config.load),
        section("## Engine-reported load", "engine_load.", &config.engine_load),
        section("## Queue", "queue.", &config.queue),
        section("## Overload", "overload.", &config.overload),
        section("## Health", "health.", &config.health),
        section("## Slow start", "slow_start.", &config.slow_start),
        section("## Shared cache", "shared_cache.", &config.shared_cache),
        section("## Sessions", "session.", &config.session),
        section("## Discovery", "discovery.", &config.discovery),
        section("## Supervision", "supervision.", &config.supervision),
        section("## Shadow policies", "shadow.", &config.shadow),
        section("## Recorder", "recorder.", &config.recorder),
    ];
    subjects.extend([("## Settings of `kv`", Policy::Kv), ("## Settings of `latency`", Policy::Latency)].map(
        |(heading, policy)| {
            let settings = fields_in_order(&PolicyConfig::from(policy));
            let settings = settings.into_iter().filter(|(name, _)| name != "name");
            Subject {
                heading,
                fields: settings.map(|(name, value)| (format!("policy.{name}"), value)).collect(),
                place: Box::new(move |path, value| {
                    let mut config = placed(path, value);
                    config["policy"]["name"] = json!(policy.name());
                    config
                }),
                prefix: "",
                is_section: true,
            }
        },
    ));
    let bucket = UncachedBucket { min_tokens: 0, bucket: "short".to_owned() };
    // Two elements with equal values, which also violates the rules between elements.
    subjects.push(Subject {
        heading: "## Queue classes",
        fields: fields_in_order(&QueueClass::named("a")),
        place: Box::new(|field, value| {
            let elements = ["a", "b"].map(|name| changed(json!({ "name": name }), field, value));
            json!({ "queue": { "classes": elements } })
        }),
        prefix: "queue.classes[1].",
        is_section: false,
    });
    subjects.push(Subject {
        heading: "## Buckets of uncached tokens",
        fields: fields_in_order(&bucket),
        place: Box::new(|field, value| {
            let elements =
                [0, 1].map(|min_tokens| changed(json!({ "min_tokens": min_tokens, "bucket": "a" }), field, value));
            json!({ "queue": { "uncached_buckets": elements } })
        }),
        prefix: "queue.uncached_buckets[1].",
        is_section: false,
    });
    subjects
}

/// The fields of a section without nested sections.
fn section(heading: &'static str, path: &str, section: &impl serde::Serialize) -> Subject {
    let fields = fields_in_order(section).into_iter().filter(|(_, value)| !value.is_object());
    Subject {
        heading,
        fields: fields.map(|(name, value)| (format!("{path}{name}"), value)).collect(),
        place: Box::new(placed),
        prefix: "",
        is_section: true,
    }
}

/// `{ "queue": { "order": value } }` for `queue.order`.
fn placed(path: &str, value: &Value) -> Value {
    path.rsplit('.').fold(value.clone(), |value, name| json!({ name: value }))
}

#[test]
fn every_table_lists_its_settings() {
    let page = read(PAGE);
    let sources = rule_sources();
    let wrong: Vec<String> = subjects().iter().flat_map(|subject| differences(subject, &page, &sources)).collect();
    assert!(wrong.is_empty(), "{PAGE} differs from the code:\n\n{}\n", wrong.join("\n\n"));
}

#[test]
fn settings_compared_with_dynamo_exist() {
    let mut known: BTreeSet<String> = subjects().into_iter().flat_map(|s| s.fields).map(|(name, _)| name).collect();
    known.insert("policy".to_owned());
    let page = read(PAGE);
    let rows =
        ["## Coming from Dynamo", "## Coming from Dynamo's policy file"].map(|heading| rows_under(&page, heading));
    for row in rows.iter().flatten() {
        let [theirs, ours, reasons @ ..] = &row[..] else { panic!("two cells at least, not {row:?}") };
        assert!(theirs.starts_with('`') && reasons.iter().all(|reason| !reason.is_empty()), "{row:?}");
        let named: Vec<&str> = ours.split('`').skip(1).step_by(2).collect();
        let what = ours.split([' ', ':']).next().expect("a split has a first part");
        let ours = match what {
            "kept" if named.is_empty() => vec![theirs.trim_matches('`')],
            "kept" | "renamed" => named,
            "elsewhere" | "refused" => continue,
            _ => panic!("{theirs} is {ours}, must be kept, renamed, elsewhere or refused"),
        };
        assert!(!ours.is_empty(), "{theirs} is {what} without a name");
        for name in ours {
            assert!(known.contains(name), "{theirs} is {what} as `{name}`, which is no setting");
        }
    }
}

/// Differences of a table: required rows, and rows without a setting.
fn differences(subject: &Subject, page: &str, sources: &str) -> Vec<String> {
    let rows = rows_under(page, subject.heading);
    let mut wrong = Vec::new();
    for (name, default) in &subject.fields {
        let row = rows.iter().find(|row| unquoted(&row[0]) == *name);
        let expected = Row::expected(subject, name, default);
        if !row.is_some_and(|row| expected.agrees(row, sources)) {
            let meaning = row.and_then(|row| row.get(3)).map_or("(what it means)", String::as_str);
            let now = row.map_or("absent".to_owned(), |row| row.join(" | "));
            let heading = subject.heading;
            wrong.push(format!("under {heading:?}, `{name}` is\n  {now}\nmust be\n{}", expected.line(meaning)));
        }
    }
    let listed: Vec<String> = rows.iter().map(|row| unquoted(&row[0])).collect();
    let names: Vec<String> = subject.fields.iter().map(|(name, _)| name.clone()).collect();
    if wrong.is_empty() && listed != names {
        wrong.push(format!("under {:?} stand\n  {listed:?}\nmust be, in this order\n  {names:?}", subject.heading));
    }
    wrong
}

/// The cells defined by the code.
struct Row {
    name: String,
    kind: String,
    default: String,
    rules: BTreeSet<&'static str>,
}

impl Row {
    fn expected(subject: &Subject, name: &str, default: &Value) -> Self {
        let place = |value: &Value| (subject.place)(name, value);
        let (kind, variants) = kind_of(&place(&json!("?")));
        let optional = if default.is_null() { ", optional" } else { "" };
        let is_required = is_required(subject, name);
        let default = match default {
            _ if is_required => "required".to_owned(),
            Value::Null => "none".to_owned(),
            given => format!("`{given}`"),
        };
        let rules = rules_of(&format!("{}{name}", subject.prefix), &variants, place);
        Self { name: format!("`{name}`"), kind: format!("{kind}{optional}"), default, rules }
    }

    /// Whether the row matches. It may state additional rules, as long as the code has them.
    fn agrees(&self, row: &[String], sources: &str) -> bool {
        let [name, kind, default, meaning] = row else { return false };
        let mut parts = kind.split("; ");
        let kind = parts.next().unwrap_or_default();
        let stated: BTreeSet<&str> = parts.collect();
        *name == self.name
            && kind == self.kind
            && *default == self.default
            && self.rules.is_subset(&stated)
            && stated.iter().all(|rule| sources.contains(&format!("\"{rule}\"")))
            && !meaning.is_empty()
    }

    fn line(&self, meaning: &str) -> String {
        let Self { name, kind, default, rules } = self;
        let kind: Vec<&str> = [kind.as_str()].into_iter().chain(rules.iter().copied()).collect();
        format!("| {name} | {} | {default} | {meaning} |", kind.join("; "))
    }
}

/// The field's type in the notation of the page, and its variants if it accepts only some words.
fn kind_of(with_question_mark: &Value) -> (String, Vec<String>) {
    let error = match serde_json::from_value::<RouterConfig>(with_question_mark.clone()) {
        Ok(_) => return ("string".to_owned(), Vec::new()),
        Err(error) => error.to_string(),
    };
    let expected = error.rsplit("expected ").next().expect("serde names the expected fields");
    if error.starts_with("unknown variant") {
        let variants: Vec<String> = expected.split('`').skip(1).step_by(2).map(str::to_owned).collect();
        let quoted: Vec<String> = variants.iter().map(|variant| format!("`{variant}`")).collect();
        return (quoted.join(", "), variants);
    }
    let kind = match expected {
        "a boolean" => "boolean",
        "a sequence" => "list",
        other => other,
    };
    (kind.to_owned(), Vec::new())
}

/// Every rule of a field that some value violates, alone or with every boolean default inverted.
fn rules_of(field: &str, variants: &[String], place: impl Fn(&Value) -> Value) -> BTreeSet<&'static str> {
    let numbers = [json!(0), json!(1), json!(-1.0), json!(0.5), json!(1e300), json!(u32::MAX)];
    let words = ["a", "a b"].map(Value::from);
    let probes = numbers.into_iter().chain(words).chain(variants.iter().map(|variant| json!(variant)));
    let config = serde_json::to_value(RouterConfig::default()).expect("settings serialize");
    let mut opposite = json!({});
    for (section, value) in config.as_object().expect("a map") {
        if let Some(value) = value.as_bool() {
            opposite[section] = json!(!value);
        }
        for (name, value) in value.as_object().into_iter().flatten() {
            if let Some(value) = value.as_bool() {
                opposite[section][name] = json!(!value);
            }
        }
    }
    let bases = [json!({}), opposite];
    let configs = probes.flat_map(|probe| {
        let placed = place(&probe);
        bases.clone().map(|mut base| {
            merge(&mut base, &placed);
            base
        })
    });
    let readable = configs.filter_map(|config| serde_json::from_value::<RouterConfig>(config).ok());
    let errors = readable.filter_map(|config| config.validate().err()).flat_map(|errors| errors.0);
    errors.filter(|error| error.field == field).map(|error| error.rule).collect()
}

/// Overrides the settings of `base` with those of `over`, section by section.
fn merge(base: &mut Value, over: &Value) {
    match (base.as_object_mut(), over.as_object()) {
        (Some(base), Some(over)) => {
            for (name, value) in over {
                merge(base.entry(name.clone()).or_insert(Value::Null), value);
            }
        }
        _ => *base = over.clone(),
    }
}

/// Whether deserialization fails without the field.
fn is_required(subject: &Subject, name: &str) -> bool {
    if subject.is_section {
        return false;
    }
    let some_other = subject.fields.iter().find(|(other, _)| other != name).expect("more than one field");
    let mut config = (subject.place)(&some_other.0, &some_other.1);
    let queue = config["queue"].as_object_mut().expect("a map");
    let elements = queue.values_mut().filter_map(Value::as_array_mut).flatten();
    elements.for_each(|element| drop(element.as_object_mut().expect("a map").remove(name)));
    serde_json::from_value::<RouterConfig>(config).is_err()
}

fn changed(mut element: Value, field: &str, value: &Value) -> Value {
    element[field] = value.clone();
    element
}

/// The rows of the first table after a heading, as cells, without its header.
fn rows_under(page: &str, heading: &str) -> Vec<Vec<String>> {
    let mut lines = page.lines().skip_while(|line| *line != heading).skip(1);
    let in_section = lines.by_ref().take_while(|line| !line.starts_with("## "));
    let table = in_section.skip_while(|line| !line.starts_with('|')).take_while(|line| line.starts_with('|'));
    let cells = |line: &str| line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect();
    let rows: Vec<Vec<String>> = table.skip(2).map(cells).collect();
    assert!(!rows.is_empty(), "{PAGE} has no table under {heading:?}");
    rows
}

fn unquoted(cell: &str) -> String {
    cell.trim_matches('`').to_owned()
}

/// A struct's fields and values in declaration order.
fn fields_in_order(value: &impl serde::Serialize) -> Vec<(String, Value)> {
    let text = serde_json::to_string(value).expect("settings serialize");
    serde_json::from_str::<InOrder>(&text).expect("settings parse").0
}

/// A map that keeps its order.
struct InOrder(Vec<(String, Value)>);

impl<'de> Deserialize<'de> for InOrder {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;

        impl<'de> Visitor<'de> for Entries {
            type Value = InOrder;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<InOrder, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(InOrder(entries))
            }
        }

        deserializer.deserialize_map(Entries)
    }
}

/// The sources that contain the rule texts.
fn rule_sources() -> String {
    let validation = fs::read_to_string(root().join("src/validation.rs")).expect("sources are UTF-8");
    let directories = ["src/config", "src/policy"].map(|directory| root().join(directory));
    let files = directories.into_iter().flat_map(|directory| fs::read_dir(directory).expect("directory exists"));
    let files = files.map(|entry| entry.expect("readable").path());
    files.map(|path| fs::read_to_string(path).expect("sources are UTF-8")).chain([validation]).collect()
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}
