//! Consistency of the alert rules in `deploy/alerts.yml` with metrics, runbooks and rule tests.
//!
//! The rules are read as text. Every alert uses documented metrics only, and every alert links to an existing runbook
//! section. `deploy/check` validates the expressions with promtool.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Metrics that Prometheus itself adds to each scrape.
const PROMETHEUS_OWN: &[&str] = &["up"];

/// Functions and keywords of PromQL that the rules use.
const PROMQL: &[&str] = &[
    "absent",
    "and",
    "avg",
    "by",
    "count",
    "group_left",
    "histogram_quantile",
    "increase",
    "max",
    "on",
    "or",
    "rate",
    "sum",
    "unless",
    "vector",
];

pub(crate) fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The value of `key:` in each rule, with folded lines joined.
fn values(rules: &str, key: &str) -> Vec<String> {
    let lines: Vec<&str> = rules.lines().collect();
    let mut values = Vec::new();
    for (n, line) in lines.iter().enumerate() {
        let bare = line.trim_start().trim_start_matches("- ");
        let Some(value) = bare.strip_prefix(key).and_then(|rest| rest.strip_prefix(':')) else { continue };
        let indent = line.len() - line.trim_start().len();
        let deeper = |line: &&&str| line.len() - line.trim_start().len() > indent;
        let folded: Vec<&str> = lines[n + 1..].iter().take_while(deeper).map(|line| line.trim()).collect();
        let value = value.trim();
        values.push(if value == ">-" { folded.join(" ") } else { value.to_owned() });
    }
    values
}

/// Metric names in an expression, without labels, label values, ranges and PromQL keywords.
pub(crate) fn metrics_in(expr: &str) -> Vec<String> {
    let mut bare = String::new();
    let mut depth = 0_u32;
    for c in expr.chars() {
        match c {
            '{' | '[' => depth += 1,
            '}' | ']' => depth -= 1,
            c if depth == 0 => bare.push(c),
            _ => {}
        }
    }
    for grouping in ["by (", "on ("] {
        while let Some(at) = bare.find(grouping) {
            let end = at + bare[at..].find(')').expect("brackets are closed");
            bare.replace_range(at..=end, "");
        }
    }
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    let words = bare.split(|c| !is_name(c)).filter(|word| word.starts_with(|c: char| c.is_ascii_alphabetic()));
    words.filter(|word| !PROMQL.contains(word)).map(str::to_owned).collect()
}

/// Metrics in the lists of the documentation.
pub(crate) fn documented() -> BTreeSet<String> {
    let pages = ["docs/metrics.md", "docs/operations.md"].map(read).join("\n");
    let names = pages.lines().filter_map(|line| line.strip_prefix("- `")?.split('`').next());
    names.flat_map(|name| ["", "_bucket", "_sum", "_count"].map(|suffix| format!("{name}{suffix}"))).collect()
}

/// Anchors of a page, derived from its headings.
fn anchors(page: &str) -> BTreeSet<String> {
    let headings =
        page.lines().filter_map(|line| line.strip_prefix('#')).map(|line| line.trim_start_matches('#').trim());
    let anchor = |heading: &str| {
        let kept = heading.to_lowercase();
        kept.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c)).collect::<String>().replace(' ', "-")
    };
    headings.map(anchor).collect()
}

#[test]
fn every_metric_of_an_alert_is_documented() {
    let known = documented();
    let expressions = values(&read("deploy/alerts.yml"), "expr");
    assert!(expressions.len() > 10, "only {} rules found", expressions.len());
    for expr in expressions {
        let metrics = metrics_in(&expr);
        assert!(!metrics.is_empty(), "no metric in {expr}");
        for metric in metrics {
            let is_known = known.contains(&metric) || PROMETHEUS_OWN.contains(&metric.as_str());
            assert!(is_known, "{metric} is neither in docs/metrics.md nor in docs/operations.md: {expr}");
        }
    }
}

#[test]
fn every_alert_has_a_runbook_and_both_tests() {
    let rules = read("deploy/alerts.yml");
    let (alerts, runbooks) = (values(&rules, "alert"), values(&rules, "runbook_url"));
    assert_eq!(alerts.len(), runbooks.len(), "one runbook per alert");
    assert_eq!(alerts.len(), values(&rules, "summary").len(), "one summary per alert");
    assert_eq!(alerts.len(), values(&rules, "description").len(), "one description per alert");
    for runbook in runbooks {
        let (page, anchor) = runbook.split_once('#').expect("runbook has an anchor");
        assert!(anchors(&read(page)).contains(anchor), "{page} has no heading for #{anchor}");
    }
    let tests = read("deploy/alerts_test.yml");
    for alert in alerts {
        assert!(tests.contains(&format!("alertname: {alert}\n        exp_alerts:\n")), "{alert} has no firing test");
        assert!(tests.contains(&format!("alertname: {alert}, exp_alerts: []")), "{alert} has no test without an alert");
    }
}

#[test]
fn names_are_found_in_expressions() {
    let expr = r#"sum by (model) (rate(a_total{status=~"5.."}[5m])) / on () group_left () sum(b) > 0.05 or absent(c)"#;
    assert_eq!(metrics_in(expr), ["a_total", "b", "c"]);
    assert!(anchors("## Answers are 502, 503 or 504").contains("answers-are-502-503-or-504"));
}
