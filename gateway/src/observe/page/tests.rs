use std::path::Path;

use super::METRICS;
use crate::observe::metric::Metric;
use crate::observe::process;

/// Page that lists the metrics of this module.
const PAGE: &str = "../docs/operations.md";

#[test]
fn the_page_lists_exactly_these_metrics() {
    let page =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(PAGE)).expect("documentation page exists");
    let own = METRICS.iter().map(|Metric { name, kind, labels, help }| {
        let kind = kind.name();
        let labels: String = labels.iter().map(|label| format!(", `{label}`")).collect();
        format!("- `{name}` ({kind}{labels}): {help}")
    });
    let process = process::METRICS.iter().map(|(name, kind, help)| format!("- `{name}` ({kind}): {help}"));
    let expected: Vec<String> = own.chain(process).collect();
    let is_row = |line: &&str| line.starts_with("- `pointsman_") || line.starts_with("- `process_");
    let listed: Vec<&str> = page.lines().filter(is_row).collect();
    assert!(listed == expected, "{PAGE} must list\n{}\n", expected.join("\n"));
}
