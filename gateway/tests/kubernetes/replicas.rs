//! Replicas that find each other by the EndpointSlices of their Service.

use std::path::Path;

use pointsman_gateway::replicas::Replicas;
use pointsman_gateway::settings::{ConfigFile, Sources};
use serde_json::{Value, json};
use tokio::net::TcpListener;

use crate::common::directory::Directory;

use super::api_server::ApiServer;
use super::cluster::NAMESPACE;
use crate::common::proxy::until;

/// Replicas of one Service have one port and different addresses.
async fn listener(address: &str) -> TcpListener {
    TcpListener::bind(address).await.expect("the address is free")
}

/// A replica with valid settings whose Service is `gateways`.
fn replica(listener: TcpListener, directory: &Path) -> Replicas {
    let port = listener.local_addr().expect("bound").port();
    let text = format!(
        "[replicas]\nlisten = \"127.0.0.1:7\"\nkubernetes_service = \"gateways:{port}\"\nkubernetes_namespace = \
         \"{NAMESPACE}\"\nkubeconfig_file = \"kubeconfig\"\ninsecure = true\n[[models]]\nname = \"m\"\nworker_urls = \
         [\"http://e:8000\"]\n"
    );
    let file = Some(ConfigFile { text, directory: directory.to_owned() });
    let loaded = Sources { file, ..Sources::default() }.load().expect("valid settings");
    Replicas::start_on(listener, &loaded.settings.replicas.expect("given"), None).expect("start succeeds")
}

/// A slice of a Service with the addresses of pods that are not ready.
fn slice(name: &str, service: &str, addresses: &[&str]) -> Value {
    let conditions = json!({ "ready": false });
    let endpoint = |address: &&str| json!({ "addresses": [address], "conditions": conditions });
    let endpoints: Vec<Value> = addresses.iter().map(endpoint).collect();
    let labels = json!({ "kubernetes.io/service-name": service });
    let metadata = json!({ "namespace": NAMESPACE, "name": name, "uid": name, "labels": labels });
    json!({
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": metadata,
        "addressType": "IPv4",
        "endpoints": endpoints,
    })
}

/// Waits until the members of each replica have these addresses.
async fn until_members(replicas: &[&Replicas], expected: &[Vec<String>], what: &str) {
    let members = |replica: &Replicas| {
        let mut addresses: Vec<String> =
            replica.bus().members().borrow().iter().map(|member| member.address.clone()).collect();
        addresses.sort_unstable();
        addresses
    };
    let found = || replicas.iter().map(|replica| members(replica)).collect::<Vec<_>>();
    until(&format!("{what}: {expected:?}"), || found() == expected).await;
}

#[tokio::test]
async fn replicas_are_the_endpoints_of_their_service() {
    let mut server = ApiServer::start().await;
    let directory = Directory::new();
    directory.kubeconfig(&server.url(), &[], &json!({}));
    let first = listener("127.0.5.1:0").await;
    let port = first.local_addr().expect("bound").port();
    let at = |n: u32| format!("127.0.5.{n}:{port}");
    let (second, third) = (listener(&at(2)).await, listener(&at(3)).await);
    let [first, second, third] = [first, second, third].map(|listener| replica(listener, directory.path()));
    server.put(slice("other", "others", &["127.0.5.3"]));
    server.put(slice("one", "gateways", &["127.0.5.1"]));
    server.put(slice("two", "gateways", &["127.0.5.2"]));
    // The third replica is no endpoint: it dials the others, and nobody dials it.
    let expected = [vec![at(2)], vec![at(1)], vec![at(1), at(2)]];
    until_members(&[&first, &second, &third], &expected, "two endpoints in two slices").await;
    server.put(slice("two", "gateways", &["127.0.5.2", "127.0.5.3"]));
    let expected = [vec![at(2), at(3)], vec![at(1), at(3)], vec![at(1), at(2)]];
    until_members(&[&first, &second, &third], &expected, "three endpoints").await;

    // During an outage all stay, and later changes apply after it.
    server.stop().await;
    server.put(slice("two", "gateways", &["127.0.5.2"]));
    third.leave().await;
    until_members(&[&first, &second], &[vec![at(2)], vec![at(1)]], "a replica has left").await;
    server.restart().await;
    let fourth = replica(listener(&at(4)).await, directory.path());
    server.put(slice("four", "gateways", &["127.0.5.4"]));
    let expected = [vec![at(2), at(4)], vec![at(1), at(4)], vec![at(1), at(2)]];
    until_members(&[&first, &second, &fourth], &expected, "a new endpoint after the outage").await;
    for replica in [first, second, fourth] {
        replica.leave().await;
    }
}
