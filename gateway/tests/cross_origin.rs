//! Requests of web pages of other origins.

use serde_json::json;

use crate::common::proxy::{Scripted, gateway, post, request, settings, worker, write};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_of_allowed_origins_may_send_requests() {
    let head = "HTTP/1.1 200 OK\r\naccess-control-allow-origin: *\r\ncontent-type: application/json\r\n";
    let served = vec![write(format!("{head}content-length: 7\r\n\r\n{{\"a\":1}}"))];
    let scripted = Scripted::start(move |_| served.clone()).await;
    let mut settings = settings(vec![worker(1, &scripted.url(), 1)]);
    let asked = "origin: https://chat.example\r\naccess-control-request-method: POST\r\naccess-control-request-headers: authorization,x\r\n";
    let path = "/v1/score";
    for (allowed, origin) in
        [(None, Some("*")), (Some("https://chat.example"), Some("https://chat.example")), (Some("https://b"), None)]
    {
        settings.gateway.allow_origins = allowed.map(|allowed| vec![allowed.to_owned()]);
        assert_eq!(settings.validate(), Ok(()));
        let gateway = gateway(settings.clone()).await;
        let preflight = request(gateway.address(), "OPTIONS", path, asked, b"").await;
        assert_eq!(preflight.status, if origin.is_some() { 200 } else { 405 });
        assert_eq!(preflight.header("access-control-allow-origin"), origin);
        assert_eq!(preflight.header("access-control-allow-methods"), origin.map(|_| "POST"));
        assert_eq!(preflight.header("access-control-allow-headers"), origin.map(|_| "authorization,x"));
        for (path, status) in [(path, 200), ("/none", 404)] {
            let headers = "origin: https://chat.example\r\n";
            let served = request(gateway.address(), "POST", path, headers, b"{\"model\":\"mock\"}").await;
            assert_eq!((served.status, served.header("access-control-allow-origin")), (status, origin));
        }
        assert_eq!(post(&gateway, path, &json!({})).await.header("access-control-allow-origin"), None, "no browser");
    }
    settings.gateway.allow_origins = Some(vec!["chat.example".to_owned()]);
    assert!(settings.validate().is_err());
}
