use std::path::Path;

use super::{METRICS, WorkerSeries};
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

#[test]
fn omitted_workers_have_no_series_of_the_recorder() {
    let recorded = "# TYPE held gauge\nheld{pool=\"p\",worker=\"1\",rank=\"0\"} 1\nheld{pool=\"p\",worker=\"12\"} 2\nleases{pool=\"p\"} 3\n";
    let page = |workers_max, render| WorkerSeries { workers_max, render }.page(recorded.to_owned());
    let some = page(1, |workers_max| (format!("own {workers_max}\n"), Some(["12".to_owned()].into())));
    assert_eq!(some, "# TYPE held gauge\nheld{pool=\"p\",worker=\"12\"} 2\nleases{pool=\"p\"} 3\nown 1\n");
    assert_eq!(page(1, |_| (String::new(), None)), recorded);
    assert_eq!(page(0, |_| ("own".to_owned(), None)), recorded, "no series of workers");
}
