//! Checks that every metric on the page of an active gateway is documented.

use pointsman::config::EventMode;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use pointsman::protocol::{LoadSource, WorkerConfig, WorkerId};
use pointsman_gateway::settings::TokenSourceChoice;
use pointsman_trial::mock::{MockConfig, MockEngine};
use serde_json::json;

use crate::common::proxy::{self, get, post, settings};

const PAGES: [&str; 5] =
    ["docs/metrics.md", "docs/tokens.md", "docs/operations.md", "docs/admin.md", "docs/replicas.md"];

/// Metrics in the tables and lists of the documentation.
fn documented() -> BTreeSet<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let read = |page: &str| fs::read_to_string(root.join(page)).expect("documentation page exists");
    let named = |line: &str| {
        let row = line.strip_prefix("| `").or_else(|| line.strip_prefix("- `"))?;
        Some(row.split_once('`')?.0.to_owned())
    };
    let pages: Vec<String> = PAGES.iter().map(|page| read(page)).collect();
    let names = pages.iter().flat_map(|page| page.lines().filter_map(named));
    names.filter(|name| name.starts_with("pointsman_") || name.starts_with("process_")).collect()
}

#[tokio::test]
async fn all_metrics_of_a_busy_gateway_are_documented() {
    let engine = MockEngine::start(MockConfig { time_scale: 0.0, loras: vec!["a".into()], ..MockConfig::default() });
    let engine = engine.await.expect("the engine starts");
    let mut settings = settings(Vec::new());
    settings.models[0].tokens.source = TokenSourceChoice::Engine;
    settings.models[0].router.events.mode = EventMode::On;
    settings.gateway.metrics_public = Some(true);
    let name = settings.models[0].name.clone();
    let upstream_is_mock = settings.models[0].upstream_name() == "mock";
    assert!(upstream_is_mock, "the engine answers for no other model");
    let gateway = proxy::gateway(settings).await;
    let worker = WorkerConfig {
        load: Some(LoadSource::Metrics(format!("{}/metrics", engine.url()))),
        ..proxy::published(&engine)
    };
    gateway
        .router(&name)
        .expect("model is served")
        .upsert_worker(WorkerId(1), worker)
        .await
        .expect("router is running");

    let chat = json!({ "model": name, "messages": [{ "role": "user", "content": "Hello." }], "max_tokens": 2 });
    assert_eq!(post(&gateway, "/v1/chat/completions", &chat).await.status, 200);
    let ids: Vec<u32> = (0..200).collect();
    let completion = json!({ "model": name, "prompt": ids, "max_tokens": 2, "stream": true });
    for _ in 0..3 {
        assert_eq!(post(&gateway, "/v1/completions", &completion).await.status, 200);
    }
    assert_eq!(post(&gateway, "/v1/completions", &json!({ "model": "absent", "prompt": "x" })).await.status, 404);
    let page = get(&gateway, "/metrics").await;

    let documented = documented();
    let types: Vec<&str> = page.text().lines().filter_map(|line| line.strip_prefix("# TYPE ")).collect();
    let shown = types.iter().filter_map(|line| Some(line.split_once(' ')?.0));
    let unknown: Vec<&str> = shown.filter(|name| !documented.contains(*name)).collect();
    assert!(types.len() > 40, "only {} metrics on the page", types.len());
    assert!(unknown.is_empty(), "in no table of {PAGES:?}: {unknown:#?}");
    engine.shutdown().await;
}
