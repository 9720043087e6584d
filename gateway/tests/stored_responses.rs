//! Responses that engines store: continued, read, deleted and cancelled at their worker.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use serde_json::json;

use crate::common::proxy::{
    Scripted, answer, at_rest, gateway, get, post, request, settings, stream, stream_end, worker,
};

/// An engine that stores its responses in its own memory.
pub(crate) async fn storing(n: usize) -> Scripted {
    let stored = Arc::new(Mutex::new(BTreeSet::new()));
    Scripted::with(Vec::new(), move |number, got| {
        let mut stored = stored.lock().expect("lock not poisoned");
        let not_found = || answer("404 Not Found", "{\"error\":{\"message\":\"not found\",\"code\":404}}");
        let response = |id: &str| json!({ "object": "response", "id": id, "output": [], "status": "completed" });
        let path = got.head.split(' ').nth(1).expect("a path").to_owned();
        if let Some(id) = path.strip_prefix("/v1/responses/") {
            let known = stored.contains(id.trim_end_matches("/cancel"));
            return if known { answer("200 OK", &response(id).to_string()) } else { not_found() };
        }
        let body: serde_json::Value = serde_json::from_slice(&got.body).expect("JSON");
        if body["previous_response_id"].as_str().is_some_and(|id| !stored.contains(id)) {
            return not_found();
        }
        let id = format!("resp_{n}_{number}");
        stored.insert(id.clone());
        match body["stream"] == true {
            false => answer("200 OK", &response(&id).to_string()),
            true => {
                let created = json!({ "type": "response.created", "response": response(&id) });
                let events = [
                    &*format!("event: response.created\ndata: {created}\n\n"),
                    "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"a\"}\n\n",
                    "event: response.completed\ndata: {\"type\":\"response.completed\"}\n\n",
                ];
                [stream(&events), vec![stream_end()]].concat()
            }
        }
    })
    .await
}

pub(crate) fn id_of(response: &str) -> String {
    response.split("\"id\":\"").nth(1).and_then(|rest| rest.split('"').next()).expect("an id").to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stored_responses_are_continued_and_read_at_their_worker() {
    let mut engines = Vec::new();
    for n in 0..4 {
        engines.push(storing(n).await);
    }
    let settings = settings((1..).zip(&engines).map(|(n, engine)| worker(n, &engine.url(), 1)).collect());
    let gateway = gateway(settings.clone()).await;
    let mut last = Vec::new();
    for agent in 0..6 {
        let mut previous = serde_json::Value::Null;
        for turn in 0..5 {
            let body = json!({ "input": "hi", "previous_response_id": previous, "stream": turn % 2 == 1 });
            let served = post(&gateway, "/v1/responses", &body).await;
            assert_eq!(served.status, 200, "agent {agent}, turn {turn}: {served:?}");
            previous = id_of(served.text()).into();
        }
        last.push(previous.as_str().expect("an id").to_owned());
    }
    // Another gateway of the same engines finds them, too.
    let other = crate::common::proxy::gateway(settings).await;
    for gateway in [&gateway, &other] {
        for id in &last {
            let path = format!("/v1/responses/{id}");
            assert_eq!(id_of(get(gateway, &path).await.text()), *id);
            let deleted = request(gateway.address(), "DELETE", &path, "", b"").await;
            assert_eq!(deleted.status, 200);
            assert_eq!(post(gateway, &format!("{path}/cancel"), &json!({})).await.status, 200);
        }
        for unknown in ["/v1/responses/resp_none", "/v1/responses/resp_none/cancel"] {
            let method = if unknown.ends_with("cancel") { "POST" } else { "GET" };
            let refused = request(gateway.address(), method, unknown, "", b"").await;
            assert_eq!((refused.status, refused.code().as_str()), (404, "response_not_found"), "{unknown}");
        }
        let body = json!({ "input": "hi", "previous_response_id": "../../health?x=" });
        let refused = post(gateway, "/v1/responses", &body).await;
        assert_eq!((refused.status, refused.code().as_str()), (404, "response_not_found"));
        let refused = post(gateway, "/v1/responses/resp_1", &json!({})).await;
        assert_eq!((refused.status, refused.header("allow")), (405, Some("GET, DELETE")));
        at_rest(gateway).await;
    }
    let posted = |head: &str| head.starts_with("POST /v1/responses HTTP");
    let turns = engines.iter().flat_map(Scripted::requests).filter(|got| posted(&got.head)).count();
    assert_eq!(turns, 6 * 5, "no turn is repeated at another worker");
    assert!(engines.iter().flat_map(Scripted::requests).all(|got| !got.head.contains("health")), "no other path");
}
