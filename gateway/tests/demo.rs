//! The demo on a small scale: full speed, few clients, no assertions on times.

use pointsman_gateway::app::top::{self, TopArgs};
use pointsman_trial::demo::{Demo, DemoConfig, Progress, Report};
use tokio::time::timeout;

use crate::common::proxy::PATIENCE;
use crate::demo_gateway::OneModel;

fn config() -> DemoConfig {
    DemoConfig { seed: 5, requests: 12, clients: 2, time_scale: 0.0, ..DemoConfig::default() }
}

async fn report(config: &DemoConfig) -> Report {
    let demo = Demo::<OneModel>::run(config, Progress::Silent).await.expect("the engine runs");
    let report = demo.report().clone();
    let addresses = demo.addresses();
    assert!(addresses.contains("http://127.0.0.1:") && addresses.contains("curl "), "{addresses}");
    demo.shutdown().await;
    report
}

#[tokio::test]
async fn invalid_settings_are_rejected() {
    let refused = Demo::<OneModel>::run(&DemoConfig { time_scale: -1.0, ..config() }, Progress::Silent).await;
    assert_eq!(refused.err().map(|error| error.to_string()), Some("time_scale is -1, not within 0 to 100".to_owned()));
    let few = DemoConfig { requests: 5, clients: 64, ..config() };
    let refused = Demo::<OneModel>::run(&few, Progress::Silent).await.err().expect("refused").to_string();
    assert!(refused.starts_with("5 requests are too few for 64 clients: at least 192"), "{refused}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_demo_that_stays_has_a_live_page_and_load() {
    let config = DemoConfig { stay: true, ..config() };
    let demo = Demo::<OneModel>::run(&config, Progress::Silent).await.expect("the engines run");
    let text = demo.addresses();
    let after = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_else(|| panic!("{name}: {text}"));
        line.trim().to_owned()
    };
    let (page, token) = (after("Live page "), after("Token "));
    assert!(page.starts_with("http://127.0.0.1:") && page.ends_with("/admin/page") && token.len() >= 16, "{text}");
    let (_, file) = text.split_once("--token-file ").expect("the command of a terminal");
    let file = file.lines().next().expect("a path").to_owned();
    assert_eq!(std::fs::read_to_string(&file).expect("readable"), token);
    let args = TopArgs { admin: page, token_file: file.clone().into(), model: None, ranks: 9 };
    let frames = async {
        loop {
            let page = top::page(&args, &token, 80).await.expect("a page");
            // The list has decisions after those of the table.
            if page.contains("tokens cached") && !page.contains(" 0.0 requests/s") {
                return;
            }
        }
    };
    tokio::select! {
        biased;
        () = demo.keep_busy() => unreachable!("it has no end"),
        shown = timeout(PATIENCE, frames) => shown.expect("a busy frame"),
    }
    demo.shutdown().await;
    assert!(!std::path::Path::new(&file).exists(), "the token is removed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn disaggregated_engines_answer_the_same_requests() {
    let report = report(&DemoConfig { disaggregated: true, ..config() }).await;
    assert!(report.is_clean() && report.same_requests, "{report}");
    assert_eq!((report.baseline.policy.as_str(), report.routed.policy.as_str()), ("aggregated", "disaggregated"));
    assert_eq!(report.baseline.prompt_tokens, report.routed.prompt_tokens);
    assert!(report.routed.cached_tokens > 0, "the prefill pool has a cache: {report}");
}
