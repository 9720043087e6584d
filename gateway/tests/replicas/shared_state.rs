//! What gateways share beside their load: the workers of stored responses, and pauses of engines.

use std::net::SocketAddr;
use std::time::Duration;

use pointsman_gateway::app::Gateway;
use pointsman_gateway::settings::{AdminSettings, TenantSettings};
use serde_json::{Value, json};

use super::settings::{address, loaded};
use crate::common::admin::{TOKEN, file};
use crate::common::proxy::{Answer, Scripted, answer, eventually, gateway, request, settings, until, worker};
use crate::limits::{authorization, limited};
use crate::stored_responses::{id_of, storing};

/// A gateway of these engines with an admin API, a tenant, and the other gateway as a peer.
async fn start(engines: &[Scripted], tenant: &str, at: SocketAddr, peer: SocketAddr) -> Gateway {
    let mut settings = settings((1..).zip(engines).map(|(n, engine)| worker(n, &engine.url(), 1)).collect());
    settings.models[0].router.min_initial_workers = 0;
    settings.replicas = loaded(&format!("listen = \"{at}\"\npeers = [\"{peer}\"]\nid = \"{at}\"")).settings.replicas;
    let (listen, token_file) = (SocketAddr::from(([127, 0, 0, 1], 0)), file(TOKEN.as_bytes()));
    settings.admin = Some(AdminSettings { listen, token_file, index_token_file: None, read_token_file: None });
    gateway(limited(settings, TenantSettings { name: tenant.to_owned(), ..TenantSettings::default() })).await
}

async fn shutdown(gateway: Gateway) {
    let router = gateway.router("mock").expect("served");
    until("all bookings have ended", || router.health().leases == 0).await;
    gateway.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_worker_of_a_stored_response_is_known_to_all_gateways() {
    let mut engines = Vec::new();
    for n in 0..4 {
        engines.push(storing(n).await);
    }
    let tenant = "sharing";
    let respond = async |gateway: &Gateway, previous: &str| -> Answer {
        let previous = Some(previous).filter(|id| !id.is_empty());
        let body = json!({ "model": "mock", "input": "hi", "previous_response_id": previous }).to_string();
        request(gateway.address(), "POST", "/v1/responses", &authorization(tenant), body.as_bytes()).await
    };
    let read = async |gateway: &Gateway, id: &str, tenant: &str| {
        request(gateway.address(), "GET", &format!("/v1/responses/{id}"), &authorization(tenant), b"").await.status
    };
    let one = start(&engines, tenant, address(2, 0), address(2, 1)).await;
    let mut last = Vec::new();
    for _ in 0..6 {
        last.push(id_of(respond(&one, "").await.text()));
    }
    let two = start(&engines, tenant, address(2, 1), address(2, 0)).await;
    for id in &mut last {
        eventually("the response is known", async || read(&two, id.as_str(), tenant).await == 200).await;
        let next = respond(&two, id.as_str()).await;
        assert_eq!(next.status, 200, "{next:?}");
        *id = id_of(next.text());
    }
    shutdown(one).await;
    // A new process knows those of the time before it, too.
    let one = start(&engines, tenant, address(2, 0), address(2, 1)).await;
    for id in &last {
        eventually("the response is known again", async || read(&one, id.as_str(), tenant).await == 200).await;
        assert_eq!(respond(&one, id.as_str()).await.status, 200);
    }
    assert_eq!(read(&one, "resp_none", tenant).await, 404);
    let posted = |head: &str| head.starts_with("POST /v1/responses HTTP");
    let turns = engines.iter().flat_map(Scripted::requests).filter(|got| posted(&got.head)).count();
    assert_eq!(turns, 3 * last.len(), "no turn is repeated at another worker");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pause_holds_at_all_gateways() {
    let engine =
        Scripted::with(Vec::new(), |_, _| answer("200 OK", "{\"success\":true,\"choices\":[{\"text\":\"a\"}]}")).await;
    let engines = [engine];
    let tenant = "pausing";
    let control = async |gateway: &Gateway, action: &str, body: Value| {
        let (path, key) =
            (format!("/admin/models/mock/control/{action}"), format!("authorization: Bearer {TOKEN}\r\n"));
        let admin = gateway.admin_address().expect("an admin API");
        request(admin, "POST", &path, &key, body.to_string().as_bytes()).await.status
    };
    let body = br#"{"model":"mock","prompt":[1]}"#;
    let complete = async |gateway: &Gateway| -> u16 {
        request(gateway.address(), "POST", "/v1/completions", &authorization(tenant), body).await.status
    };
    let one = start(&engines, tenant, address(3, 0), address(3, 1)).await;
    let two = start(&engines, tenant, address(3, 1), address(3, 0)).await;
    assert_eq!((complete(&one).await, complete(&two).await), (200, 200));
    assert_eq!(control(&one, "sleep", json!({ "requests": "refuse" })).await, 200);
    eventually("the other gateway refuses", async || complete(&two).await == 503).await;
    shutdown(one).await;
    let one = start(&engines, tenant, address(3, 0), address(3, 1)).await;
    eventually("a new process refuses", async || complete(&one).await == 503).await;
    // A reason ends at either gateway, and leaves the other one.
    assert_eq!(control(&one, "pause", json!({ "requests": "refuse" })).await, 200);
    assert_eq!(control(&two, "wake", json!({})).await, 200);
    assert_eq!(complete(&one).await, 503);
    eventually("the other gateway knows the pause", async || complete(&two).await == 503).await;
    assert_eq!(control(&two, "resume", json!({})).await, 200);
    assert_eq!(complete(&two).await, 200);
    eventually("the first gateway serves", async || complete(&one).await == 200).await;
}
