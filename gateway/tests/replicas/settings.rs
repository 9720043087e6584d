//! Rules of `[replicas]`, and gateways that follow them.

use std::net::SocketAddr;

use pointsman::{NamedWorker, Prompt, RouteRequest};
use pointsman_gateway::app::Gateway;
use pointsman_gateway::settings::{ConfigFile, LoadErrors, Loaded, Sources};

use super::conformance::{members_until, within};
use crate::common::proxy::{Act, EVENT, Scripted, at_rest, eventually, gateway, send, settings, stream, worker};

fn load(replicas: &str) -> Result<Loaded, LoadErrors> {
    let model = "[[models]]\nname = \"m\"\nworker_urls = [\"http://e:8000\"]\n";
    let file = ConfigFile { text: format!("[replicas]\n{replicas}\n{model}"), directory: "/etc".into() };
    Sources { file: Some(file), ..Sources::default() }.load()
}

pub(super) fn loaded(replicas: &str) -> Loaded {
    load(replicas).expect("valid")
}

fn problems(replicas: &str) -> Vec<String> {
    load(replicas).expect_err("invalid").0.iter().map(ToString::to_string).collect()
}

#[test]
fn sufficient_settings_are_accepted() {
    let cases = [
        "listen = \"127.0.0.1:7\"\npeers = [\"localhost:8\", \"[::1]:9\"]",
        "listen = \"0.0.0.0:7\"\npeers = [\"gateway-1:8\"]\nkey_file = \"key\"",
        "listen = \"0.0.0.0:7\"\ndns = \"gateways.llm:7\"\ninsecure = true\nid = \"a\"",
        "listen = \"0.0.0.0:7\"\ndns = \"g:7\"\ntls_certificate_file = \"a\"\ntls_key_file = \"b\"\ntls_ca_file = \"c\"",
    ];
    for case in cases {
        assert!(load(case).is_ok(), "{case}: {:?}", load(case));
    }
    let loaded = load("listen = \"127.0.0.1:7\"\npeers = [\"localhost:8\"]\nkey_file = \"key\"").expect("valid");
    let replicas = loaded.settings.replicas.expect("given");
    assert_eq!(replicas.key_file, Some("/etc/key".into()), "paths are relative to the file");
}

const VIOLATED: &str = r#"
insecure = true => replicas.listen is absent, must be an IP address with a port (default)
listen = "127.0.0.1:7" => replicas is without peers, must be given peers, dns or nats (default)
listen = "0.0.0.0:7"; peers = ["localhost:7"] => $INSECURE
listen = "127.0.0.1:7"; peers = ["gateway-1:7"] => $INSECURE
listen = "127.0.0.1:7"; dns = "gateways:7" => $INSECURE
listen = "127.0.0.1:8080"; peers = ["localhost:7"] => replicas.listen is 127.0.0.1:8080, must be an address other than gateway.listen, admin.listen and picker.listen (file)
listen = "127.0.0.1:7"; peers = ["localhost"] => replicas.peers[0] is "localhost", must be HOST:PORT (file)
listen = "127.0.0.1:7"; peers = ["localhost:1"]; dns = "localhost:2" => replicas.dns is "localhost:2", must be absent with peers (file)
listen = "127.0.0.1:7"; peers = ["localhost:1"]; tls_key_file = "k" => replicas.tls_key_file is "/etc/k", must be absent unless tls_certificate_file, tls_key_file and tls_ca_file are given (file)
"#;

#[test]
fn violated_rules_are_named() {
    let insecure = "replicas.key_file is absent, must be given beyond loopback, unless there are \
                    tls_certificate_file, tls_key_file and tls_ca_file, or insecure is true (default)";
    for line in VIOLATED.trim().lines() {
        let (given, problem) = line.split_once(" => ").expect("a problem");
        let problem = problem.replace("$INSECURE", insecure);
        let problems = problems(&given.replace("; ", "\n"));
        assert!(problems.contains(&problem), "{given}: {problems:#?}");
    }
}

/// A gateway that listens for replicas at `address` and dials `peer`.
async fn replica(address: SocketAddr, peer: SocketAddr, workers: Vec<NamedWorker>) -> Gateway {
    let mut settings = settings(workers);
    settings.models[0].router.min_initial_workers = 0;
    settings.replicas = loaded(&format!("listen = \"{address}\"\npeers = [\"{peer}\"]")).settings.replicas;
    gateway(settings).await
}

/// Addresses of this process and test.
pub(super) fn address(test: u8, n: u8) -> SocketAddr {
    let [.., a, b] = std::process::id().to_be_bytes();
    SocketAddr::from(([127, 64 + 2 * test + n, a, b], 7080))
}

#[tokio::test]
async fn gateways_connect_and_leave_at_shutdown() {
    let one = replica(address(0, 0), address(0, 1), Vec::new()).await;
    assert_eq!(one.replicas_address(), Some(address(0, 0)));
    let two = replica(address(0, 1), address(0, 0), Vec::new()).await;
    let bus = one.replicas().expect("a bus");
    let life = two.replicas().expect("a bus").life();
    members_until(&*bus, "the other gateway", |members| members.iter().any(|member| member.life == life)).await;
    at_rest(&two).await;
    within("the end of a gateway", two.shutdown(std::time::Duration::from_secs(5))).await;
    members_until(&*bus, "the end of the other gateway", |members| members.is_empty()).await;
}

/// Requests of the only worker, as a decision of the gateway counts them.
async fn requests(gateway: &Gateway) -> u32 {
    let router = gateway.router("mock").expect("served");
    let loads = router.potential_loads(RouteRequest::query(Prompt::Tokens(&[]))).await.expect("loads");
    loads.iter().map(|load| load.active_requests).sum()
}

async fn requests_until(gateway: &Gateway, count: u32) {
    eventually("the load of the other gateway", async || requests(gateway).await == count).await;
}

#[tokio::test]
async fn requests_of_a_gateway_count_at_the_other() {
    let engine = Scripted::start(|_| [stream(&[EVENT]), vec![Act::Hang]].concat()).await;
    let workers = || vec![worker(1, &engine.url(), 1)];
    let one = replica(address(1, 0), address(1, 1), workers()).await;
    let two = replica(address(1, 1), address(1, 0), workers()).await;
    let body = br#"{"model":"mock","prompt":"a","stream":true}"#;
    let client = send(one.address(), "POST", "/v1/completions", "", body).await;
    requests_until(&two, 1).await;
    assert_eq!(requests(&one).await, 1, "own requests count once");
    drop(client);
    requests_until(&two, 0).await;
    requests_until(&one, 0).await;
}
