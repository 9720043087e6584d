//! `kubectl` as outside witness: it lists the same pods from the same API server with the same kubeconfig. The program
//! is `POINTSMAN_KUBECTL`, or that of the search path. Without one the test is skipped with a line on stderr.
//! `tests/kubernetes/run` requires it.

use std::path::Path;

use serde_json::{Value, json};
use tokio::process::Command;

use crate::common::directory::Directory;

use super::api_server::ApiServer;
use super::cluster::{TestPod, WatchingGateway, Workers, engines, pool, settings};

/// Output of `kubectl` as JSON; `None` if there is no such program.
async fn kubectl(directory: &Path, arguments: &[&str]) -> Option<Value> {
    let program = std::env::var_os("POINTSMAN_KUBECTL").unwrap_or_else(|| "kubectl".into());
    let mut command = Command::new(&program);
    command.arg("--kubeconfig").arg(directory.join("kubeconfig"));
    command.arg("--cache-dir").arg(directory.join("cache")).args(arguments).args(["--output", "json"]);
    let output = match command.output().await {
        Ok(output) => output,
        Err(error) => {
            eprintln!("SKIPPED: {} cannot be started: {error}", program.to_string_lossy());
            return None;
        }
    };
    let (out, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{arguments:?}: {error}");
    Some(serde_json::from_str(&out).expect("JSON"))
}

/// The endpoints of the pods that `kubectl` lists, by its own selection.
fn endpoints(list: &Value, port: u16) -> Vec<String> {
    let is_endpoint = |pod: &&Value| {
        let conditions = pod["status"]["conditions"].as_array().expect("a list");
        let is_ready = conditions.iter().any(|of| of["type"] == "Ready" && of["status"] == "True");
        is_ready && pod["metadata"]["deletionTimestamp"].is_null()
    };
    let pods = list["items"].as_array().expect("a list").iter().filter(is_endpoint);
    let mut endpoints: Vec<String> =
        pods.map(|pod| format!("http://{}:{port}", pod["status"]["podIP"].as_str().expect("an address"))).collect();
    endpoints.sort_unstable();
    endpoints
}

#[tokio::test]
async fn kubectl_lists_the_same_pods() {
    let (server, port) = (ApiServer::start().await, engines().await);
    let pods = [1, 2, 3, 4, 5].map(|n| TestPod::ready(&format!("engine-{n}"), "1", &format!("127.0.4.{n}")));
    let [mut first, second, mut third, fourth, fifth] = pods;
    first.is_ready = false;
    third.is_terminating = true;
    let pods = [first, second, third, fourth.labelled("app", "other"), fifth.labelled("llm-d.ai/role", "prefill")];
    pods.iter().for_each(|pod| server.put(pod.object()));
    server.put(pool("engine", &[port]));
    let directory = Directory::new();
    directory.kubeconfig(&server.url(), &[], &json!({}));
    let common = "kubeconfig_file = \"kubeconfig\"";
    let models = [
        ("labels", format!("selector = \"app=engine\"\nports = [{port}]\n{common}")),
        ("prefill", format!("selector = \"app=engine\"\nports = [{port}]\nrole = \"prefill\"\n{common}")),
        ("pool", format!("inference_pool = \"pool\"\n{common}")),
    ];
    let gateway = WatchingGateway::start(directory, &settings(&models)).await;
    let directory = gateway.directory.path();
    let Some(pool) = kubectl(directory, &["get", "inferencepools", "pool"]).await else { return };
    let labels = pool["spec"]["selector"]["matchLabels"].as_object().expect("labels");
    let labels: Vec<String> =
        labels.iter().map(|(label, value)| format!("{label}={}", value.as_str().expect("a text"))).collect();
    let selectors = [
        ("labels", "app=engine".to_owned()),
        ("prefill", "app=engine,llm-d.ai/role in (prefill,both)".to_owned()),
        ("pool", labels.join(",")),
    ];
    for (model, selector) in selectors {
        let selected: Workers = match model {
            "prefill" => pods[4].workers(&[port]),
            _ => [&pods[1], &pods[4]].into_iter().flat_map(|pod| pod.workers(&[port])).collect(),
        };
        gateway.until_workers(model, &selected, "before the comparison").await;
        let list = kubectl(directory, &["get", "pods", "--selector", &selector]).await.expect("the program exists");
        let mut found: Vec<String> = gateway.workers(model).await.into_values().collect();
        found.sort_unstable();
        assert_eq!(found, endpoints(&list, port), "{model}");
    }
}
