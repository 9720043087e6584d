//! Checks that `docs/metrics.md` and `docs/replicas.md` describe exactly the metrics of the gateway's code.

use std::collections::BTreeSet;
use std::path::Path;

use pointsman_gateway::app::metrics;
use pointsman_gateway::observe::metric::Metric;

fn row(metric: &Metric) -> String {
    let labels: String = metric.labels.iter().map(|label| format!(", `{label}`")).collect();
    let Metric { name, help, .. } = metric;
    format!("- `{name}` ({}{labels}): {help}", metric.kind.name())
}

#[test]
fn metrics_and_documented_rows_match() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
    let read = |page| std::fs::read_to_string(docs.join(page)).expect("documentation page exists");
    let pages = ["metrics.md", "replicas.md"].map(read).join("\n");
    let rows = pages.lines().filter(|line| line.starts_with("- `pointsman_gateway_"));
    let documented: BTreeSet<String> = rows.map(str::to_owned).collect();
    let known: BTreeSet<String> = metrics::all().map(row).collect();
    let (missing, unknown): (Vec<_>, Vec<_>) =
        (known.difference(&documented).collect(), documented.difference(&known).collect());
    assert!(missing.is_empty() && unknown.is_empty(), "missing: {missing:#?}\nunknown: {unknown:#?}");
}

#[test]
fn metric_names_contain_kind_and_unit() {
    for Metric { name, kind, help, .. } in metrics::all() {
        assert_eq!(name.ends_with("_total"), kind.name() == "counter", "{name}");
        assert!(kind.name() != "histogram" || name.ends_with("_seconds"), "{name}");
        assert!(help.ends_with('.'), "{name}");
    }
    assert_eq!(metrics::all().map(|metric| metric.name).collect::<BTreeSet<_>>().len(), metrics::all().count());
}
