//! Tenant isolation in the proxy: requests without a valid key never reach a worker, and no tenant can reuse another
//! tenant's cache.

use pointsman::config::SessionAffinity;
use pointsman_gateway::app::Gateway;
use pointsman_gateway::settings::{Settings, TenantSettings};

use crate::common::directory::Directory;
use crate::common::proxy::{
    Act, Answer, FINE, FINE_JSON, Got, Scripted, eventually, full_response, gateway, get, request, until,
};
use crate::faults::{PATH, body, expect_idle, router, settings};

const KEYS: [&str; 2] = ["acme-key-0123456789", "brew-key-0123456789"];

fn with_tenants(mut settings: Settings, files: &Directory) -> Settings {
    settings.gateway.salt_secret_file = Some(files.write("salt", "0123456789abcdef0123456789abcdef"));
    let tenant = |(name, key): (&str, &str)| TenantSettings {
        name: name.to_owned(),
        keys_file: files.write(name, key),
        ..TenantSettings::default()
    };
    settings.tenants = ["acme", "brew"].into_iter().zip(KEYS).map(tenant).collect();
    settings
}

async fn ask(gateway: &Gateway, headers: &str, body: &str) -> Answer {
    request(gateway.address(), "POST", PATH, headers, body.as_bytes()).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_without_a_valid_key_reach_no_worker() {
    alone!();
    let (worker, files) = (Scripted::responding_with(vec![full_response("200 OK", FINE_JSON)]).await, Directory::new());
    let gateway = gateway(with_tenants(settings(&[worker.url()]), &files)).await;
    let (first, second) = (KEYS[0], KEYS[1]);
    let refused = [
        String::new(),
        "authorization: Bearer \r\n".to_owned(),
        "authorization: Bearer another-key-0123456789\r\n".to_owned(),
        format!("authorization: Basic {first}\r\n"),
        format!("authorization: Bearer {}\r\n", &first[..first.len() - 1]),
        format!("authorization: Bearer {first}{second}\r\n"),
        format!("authorization: Bearer {first}, Bearer {second}\r\n"),
        format!("x-api-key: {first}{second}\r\n"),
    ];
    for headers in refused {
        // Without a valid key, even errors in the body are not reported.
        for body in [r#"{"model":"mock","prompt":[1]}"#, "no JSON"] {
            let answer = ask(&gateway, &headers, body).await;
            assert_eq!((answer.status, answer.code().as_str()), (401, "invalid_api_key"), "{headers}");
            assert_eq!(answer.header("www-authenticate"), Some("Bearer"));
        }
    }
    let two = format!("authorization: Bearer {first}\r\nauthorization: Bearer {first}\r\n");
    let answer = ask(&gateway, &two, "no JSON").await;
    assert_eq!((answer.status, answer.code().as_str()), (400, "repeated_key"));
    assert_eq!(get(&gateway, "/v1/models").await.status, 401);
    // A client that sends its whole body before it reads receives the response as well.
    let large = format!(r#"{{"model":"mock","prompt":"{}"}}"#, "x".repeat(12 << 20));
    let answer = ask(&gateway, "", &large).await;
    assert_eq!((answer.status, answer.code().as_str()), (401, "invalid_api_key"));
    assert_eq!(worker.request_count(), 0);
    for headers in [format!("x-api-key: {first}\r\n"), format!("authorization: Bearer {second}\r\n")] {
        assert_eq!(ask(&gateway, &headers, r#"{"model":"mock","prompt":[1]}"#).await.status, 200, "{headers}");
        assert_eq!(request(gateway.address(), "GET", "/v1/models", &headers, b"").await.status, 200, "{headers}");
    }
    expect_idle(&gateway).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tenants_cannot_produce_salts_of_others() {
    alone!();
    let (worker, files) = (Scripted::responding_with(vec![full_response("200 OK", FINE_JSON)]).await, Directory::new());
    let gateway = gateway(with_tenants(settings(&[worker.url()]), &files)).await;
    let salt_of = async |key: &str, body: &str| {
        let answer = ask(&gateway, &format!("authorization: Bearer {key}\r\n"), body).await;
        assert_eq!((answer.status, answer.text()), (200, FINE_JSON), "{answer:?}");
        let got = worker.seen(|seen| seen.requests.pop().expect("request received"));
        assert_eq!(got.header("authorization"), None, "a key for the gateway is not for workers");
        assert!(!got.text().contains(key));
        let sent: serde_json::Value = serde_json::from_slice(&got.body).expect("JSON");
        assert_eq!(got.text().matches("\"cache_salt\"").count(), 1, "{}", got.text());
        sent["cache_salt"].as_str().expect("a salt").to_owned()
    };
    let plain = r#"{"model":"mock","prompt":[1]}"#;
    let with = |salt: &str| format!(r#"{{"model":"mock","cache_salt":{},"prompt":[1]}}"#, serde_json::json!(salt));
    let mut theirs = vec![salt_of(KEYS[0], plain).await, salt_of(KEYS[0], &with("")).await];
    theirs.push(salt_of(KEYS[0], &with("own")).await);
    assert_eq!(theirs[0], salt_of(KEYS[0], plain).await, "equal salts of a tenant share a cache");
    assert_eq!(theirs[0], salt_of(KEYS[0], r#"{"model":"mock","prompt":[1],"cache_salt": null }"#).await);
    // The second tenant sends salts that it could know or guess of the first tenant.
    for forged in [theirs.clone(), ["acme", "own", "", "\0acme", "\",\"x\":\""].map(str::to_owned).to_vec()].concat() {
        let own = salt_of(KEYS[1], &with(&forged)).await;
        assert!(own != forged && !theirs.contains(&own), "{forged}");
    }
    let own = salt_of(KEYS[1], plain).await;
    assert!(!theirs.contains(&own));
    // Duplicate fields, of which a worker might use the other one.
    for twice in ["\"cache_salt\"", "\"cache\\u005fsalt\""] {
        let body = format!(r#"{{"model":"mock","cache_salt":"a",{twice}:"{}","prompt":[1]}}"#, theirs[0]);
        let answer = ask(&gateway, &format!("authorization: Bearer {}\r\n", KEYS[1]), &body).await;
        assert_eq!((answer.status, answer.code().as_str()), (400, "duplicate_field"));
    }
    expect_idle(&gateway).await;
}

/// One worker serves one request at a time. Twelve requests of acme wait when two of brew arrive: the tenants
/// alternate. Deadlines on acme's requests change nothing, because acme has no right to a priority.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tenants_alternate_in_the_queue_regardless_of_deadlines() {
    alone!();
    for deadline in ["", "x-pointsman-deadline-ms: 3600000\r\n"] {
        let (worker, files) =
            (Scripted::responding_with(vec![Act::Wait, full_response("200 OK", FINE)]).await, Directory::new());
        let mut settings = with_tenants(settings(&[worker.url()]), &files);
        settings.models[0].router.queue.threshold = Some(0.0);
        let gateway = gateway(settings).await;
        let (router, address) = (router(&gateway), gateway.address());
        let mut clients = Vec::new();
        let mut send = |key: &str, headers: &str| {
            let headers = format!("authorization: Bearer {key}\r\n{headers}");
            clients
                .push(tokio::spawn(async move { request(address, "POST", PATH, &headers, body().as_bytes()).await }));
        };
        let waiting =
            async || router.pending().await.expect("up").iter().map(|class| class.depth.requests).sum::<u64>();
        send(KEYS[0], deadline);
        until("the first is being served", || worker.request_count() == 1).await;
        (0..12).for_each(|_| send(KEYS[0], deadline));
        eventually("further requests of the first tenant wait", async || waiting().await == 12).await;
        (0..2).for_each(|_| send(KEYS[1], ""));
        eventually("requests of the second tenant wait behind them", async || waiting().await == 14).await;
        worker.release(15);
        for client in clients {
            let answer = client.await.expect("no panic");
            assert_eq!((answer.status, answer.text()), (200, FINE));
        }
        let salt = |body: &[u8]| serde_json::from_slice::<serde_json::Value>(body).expect("JSON")["cache_salt"].clone();
        let salts: Vec<_> = worker.seen(|seen| seen.requests.iter().map(|got| salt(&got.body)).collect());
        let of_brew: Vec<_> = (0..salts.len()).filter(|place| salts[*place] != salts[0]).collect();
        assert_eq!((salts.len(), of_brew), (15, vec![2, 4]), "alternating tenants, {deadline:?}");
        expect_idle(&gateway).await;
    }
}

/// Each worker keeps the sessions that it receives first, in round-robin order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn equal_session_ids_of_two_tenants_are_two_sessions() {
    alone!();
    let answer = || Scripted::responding_with(vec![full_response("200 OK", FINE_JSON)]);
    let (workers, files) = ([answer().await, answer().await], Directory::new());
    let mut settings = with_tenants(settings(&workers.each_ref().map(Scripted::url)), &files);
    settings.models[0].router.session.affinity = SessionAffinity::Hard;
    settings.gateway.worker_api_key_file = Some(files.write("worker", "worker-key-01234"));
    let gateway = gateway(settings).await;
    for asked in 1..=2 {
        for key in KEYS {
            let headers = format!("authorization: Bearer {key}\r\nx-session-id: chat\r\n");
            let answer = ask(&gateway, &headers, r#"{"model":"mock","prompt":[1]}"#).await;
            assert_eq!((answer.status, answer.text()), (200, FINE_JSON), "{answer:?}");
        }
        assert_eq!(workers.each_ref().map(Scripted::request_count), [asked; 2]);
        for got in workers.iter().flat_map(Scripted::requests) {
            assert_eq!(got.header("authorization"), Some("Bearer worker-key-01234"));
        }
    }
    expect_idle(&gateway).await;
}

/// One worker serves one request at a time. Requests of a tenant without a priority are served in order of arrival.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tenant_without_priority_cannot_reorder_its_requests() {
    alone!();
    let (worker, files) =
        (Scripted::responding_with(vec![Act::Wait, full_response("200 OK", FINE)]).await, Directory::new());
    let mut settings = with_tenants(settings(&[worker.url()]), &files);
    settings.models[0].router.queue.threshold = Some(0.0);
    let gateway = gateway(settings).await;
    let (router, address) = (router(&gateway), gateway.address());
    let mut clients = Vec::new();
    let mut send = |id: &str, priority: &str| {
        let headers = format!("authorization: Bearer {}\r\nx-request-id: {id}\r\n{priority}", KEYS[0]);
        clients.push(tokio::spawn(async move { request(address, "POST", PATH, &headers, body().as_bytes()).await }));
    };
    let waiting = async || router.pending().await.expect("up").iter().map(|class| class.depth.requests).sum::<u64>();
    send("first", "");
    until("the first is being served", || worker.request_count() == 1).await;
    send("second", "");
    eventually("the second waits", async || waiting().await == 1).await;
    send("third", "x-pointsman-priority-jump: 3600\r\n");
    eventually("the third waits", async || waiting().await == 2).await;
    send("fourth", "x-pointsman-priority: 9\r\n");
    eventually("the fourth waits", async || waiting().await == 3).await;
    worker.release(4);
    for client in clients {
        let answer = client.await.expect("no panic");
        assert_eq!((answer.status, answer.text()), (200, FINE));
    }
    let id = |got: &Got| got.header("x-request-id").expect("an id").to_owned();
    let served: Vec<String> = worker.seen(|seen| seen.requests.iter().map(id).collect());
    assert_eq!(served, ["first", "second", "third", "fourth"]);
    expect_idle(&gateway).await;
}
