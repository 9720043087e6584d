//! Consistency of the dashboard in `deploy/grafana` with the metrics: documented names and labels, and a metrics page
//! with all of them. `deploy/check` validates the expressions with promtool.

use std::collections::{BTreeMap, BTreeSet};

use pointsman::internals::config::QueueConfig;
use pointsman_trial::mock::{MockConfig, MockEngine};
use serde_json::{Value, json};

use crate::alerts::{documented, metrics_in, read};
use crate::common::admin::{AdminClient, settings};

/// Labels that Prometheus or Grafana adds.
const OTHER_LABELS: [&str; 4] = ["instance", "job", "le", "namespace"];

/// Metrics whose first series comes with an event that this test does not cause, or with another configuration.
const LATER: [&str; 17] = [
    // Failures.
    "pointsman_kv_events_refused_total",
    "pointsman_kv_findings_total",
    "pointsman_kv_source_heal_seconds_bucket",
    "pointsman_queue_backpressure_total",
    "pointsman_replica_summaries_refused_total",
    // Learned speeds, and audits after an interval.
    "pointsman_kv_audit_blocks_total",
    "pointsman_kv_audits_total",
    "pointsman_shadow_ttft_seconds_count",
    "pointsman_shadow_ttft_seconds_sum",
    // Tenants, prefill pools and replicas.
    "pointsman_gateway_tenant_refusals_total",
    "pointsman_gateway_tenant_requests_total",
    "pointsman_gateway_tenant_tokens_total",
    "pointsman_gateway_prefills_total",
    "pointsman_replica_conflicts_total",
    "pointsman_replica_peers",
    "pointsman_replica_summary_age_seconds",
    "pointsman_replica_summaries_lost_total",
];

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

#[tokio::test]
async fn a_metrics_page_has_every_metric_of_the_dashboard() {
    let engine = MockConfig { time_scale: 0.0, block_size: 4, ..MockConfig::default() };
    let engine = MockEngine::start(engine).await.expect("an engine");
    let mut with_queue = settings();
    let router = &mut with_queue.models[0].router;
    router.queue = QueueConfig { threshold: Some(4.0), unstated_batched_tokens: Some(8_192), ..QueueConfig::default() };
    router.index.bytes_max = Some(64 << 20);
    router.shadow.share = 1.0;
    let client = AdminClient::with(with_queue).await;
    let worker = json!({
        "endpoint": engine.url(),
        "kv_events": { "endpoint": engine.event_endpoint(0), "replay_endpoint": engine.replay_endpoint(0) },
        "load": { "metrics": format!("{}/metrics", engine.url()) },
    });
    let added = client.send("POST", "/admin/models/mock/workers", &worker.to_string()).await;
    assert_eq!(added.status, 201, "{}", String::from_utf8_lossy(&added.body));
    let chat = r#"{"model":"mock","messages":[{"role":"user","content":"hello"}],"max_tokens":4,"stream":true}"#;
    let wanted: BTreeSet<String> = expressions().iter().flat_map(|(_, expr)| metrics_in(expr)).collect();
    let wanted: Vec<&String> = wanted.iter().filter(|metric| !LATER.contains(&metric.as_str())).collect();
    let missing = async || {
        let chatted = client.send_as_client("/v1/chat/completions", chat).await;
        assert_eq!(chatted.status, 200, "{}", String::from_utf8_lossy(&chatted.body));
        let page = client.send("GET", "/metrics", "").await;
        let page = String::from_utf8(page.body).expect("text");
        let has = |metric: &str| {
            page.lines().any(|line| line.strip_prefix(metric).is_some_and(|rest| rest.starts_with(['{', ' '])))
        };
        wanted.iter().filter(|metric| !has(metric)).map(|metric| (*metric).clone()).collect::<Vec<_>>()
    };
    // Gauges are set once per second, and the load of the engine is polled.
    let started = tokio::time::Instant::now();
    loop {
        let missing = missing().await;
        if missing.is_empty() {
            break;
        }
        assert!(started.elapsed() < crate::common::proxy::PATIENCE, "missing on the page: {missing:#?}");
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
}
