//! Consistency of the dashboard in `deploy/grafana` with the metrics: documented names and labels.
//! `deploy/check` validates the expressions with promtool.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::alerts::{documented, metrics_in, read};

/// Labels that Prometheus or Grafana adds.
const OTHER_LABELS: [&str; 4] = ["instance", "job", "le", "namespace"];

/// All expressions with the panels that have them.
fn expressions() -> Vec<(String, String)> {
    let dashboard: Value = serde_json::from_str(&read("deploy/grafana/pointsman.json")).expect("JSON");
    let panels = dashboard["panels"].as_array().expect("panels");
    let of_panel = |panel: &Value| {
        let title = panel["title"].as_str().expect("a title").to_owned();
        let targets = panel["targets"].as_array().cloned().unwrap_or_default();
        targets
            .into_iter()
            .map(move |target| (title.clone(), target["expr"].as_str().expect("an expression").to_owned()))
            .collect::<Vec<_>>()
    };
    panels.iter().flat_map(of_panel).collect()
}

/// Labels of the documented metrics.
fn documented_labels() -> BTreeMap<String, BTreeSet<String>> {
    let pages = ["docs/metrics.md", "docs/operations.md", "docs/replicas.md"].map(read).join("\n");
    let named = |text: &str| text.split('`').skip(1).step_by(2).map(str::to_owned).collect::<BTreeSet<_>>();
    let row = |line: &str| {
        let (name, entry) = line.strip_prefix("- `")?.split_once("` (")?;
        let mut labels = named(entry.split_once("): ")?.0);
        if name.starts_with("pointsman_") && !name.starts_with("pointsman_gateway_") {
            labels.insert("pool".to_owned());
        }
        Some((name.to_owned(), labels))
    };
    pages.lines().filter_map(row).collect()
}

/// Names in the groups `by (...)` and in the matchers of an expression.
fn labels_in(expr: &str) -> BTreeSet<String> {
    let groups = expr.split("by (").skip(1).filter_map(|rest| rest.split(')').next());
    let matchers = expr.split('{').skip(1).filter_map(|rest| rest.split('}').next());
    let names = groups.chain(matchers).flat_map(|group| group.split(','));
    let bare =
        |name: &str| name.trim().chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect::<String>();
    names.map(bare).filter(|name| !name.is_empty()).collect()
}

#[test]
fn every_panel_has_a_title_a_description_and_expressions() {
    let dashboard: Value = serde_json::from_str(&read("deploy/grafana/pointsman.json")).expect("JSON");
    let panels = dashboard["panels"].as_array().expect("panels");
    let ids: BTreeSet<u64> = panels.iter().filter_map(|panel| panel["id"].as_u64()).collect();
    assert_eq!(ids.len(), panels.len(), "ids are unique");
    for panel in panels.iter().filter(|panel| panel["type"] != "row") {
        let (title, description) = (&panel["title"], panel["description"].as_str().unwrap_or_default());
        assert!(
            description.ends_with('.') && panel["targets"].as_array().is_some_and(|all| !all.is_empty()),
            "{title}"
        );
    }
}

#[test]
fn every_metric_and_label_of_the_dashboard_is_documented() {
    let (metrics, labels) = (documented(), documented_labels());
    for (panel, expr) in expressions() {
        let used = metrics_in(&expr);
        assert!(!used.is_empty(), "{panel}: {expr}");
        let mut known: BTreeSet<String> = OTHER_LABELS.map(str::to_owned).into();
        for metric in &used {
            assert!(metrics.contains(metric), "{panel}: {metric} is not documented");
            let base = ["_bucket", "_sum", "_count"].iter().find_map(|suffix| metric.strip_suffix(suffix));
            let base = base.unwrap_or(metric);
            known.extend(labels.get(base).cloned().unwrap_or_default());
        }
        let unknown: Vec<String> = labels_in(&expr).difference(&known).cloned().collect();
        assert!(unknown.is_empty(), "{panel}: labels {unknown:?} of {used:?} are not documented");
    }
}
