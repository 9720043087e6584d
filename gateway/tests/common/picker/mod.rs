//! Pools with an endpoint picker, and a client that acts as the proxy.

use std::net::SocketAddr;

use pointsman::{NamedWorker, Prompt, RouteRequest, Router};
use pointsman_gateway::app::Gateway;
use pointsman_gateway::settings::{PickerSettings, Settings};

use super::proxy::{self, get, worker};
use client::Connection;

pub(crate) mod client;
pub(crate) mod messages;

pub(crate) const COMPLETIONS: &str = "/v1/completions";

/// Endpoints of workers that receive no requests, because a picker only names them.
pub(crate) const ENDPOINTS: [&str; 3] = ["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"];

/// Workers at the first `count` of [`ENDPOINTS`], with ids from 1.
pub(crate) fn workers(count: usize) -> Vec<NamedWorker> {
    let at = |(n, endpoint): (u64, &&str)| worker(n, &format!("http://{endpoint}"), 1);
    (1..).zip(&ENDPOINTS[..count]).map(at).collect()
}

/// A gateway with a picker and one model, whose name identifies its series on the metrics page.
pub(crate) struct Pool {
    pub(crate) gateway: Gateway,
    pub(crate) router: Router,
    pub(crate) model: String,
}

impl Pool {
    pub(crate) async fn start(model: &str, workers: Vec<NamedWorker>) -> Self {
        Self::start_with(model, workers, |_| {}).await
    }

    pub(crate) async fn start_with(model: &str, workers: Vec<NamedWorker>, change: impl FnOnce(&mut Settings)) -> Self {
        let mut settings = proxy::settings(workers);
        settings.models[0].name = model.to_owned();
        let listen = SocketAddr::from(([127, 0, 0, 1], 0));
        settings.picker = Some(PickerSettings { listen, plaintext: true, ..PickerSettings::default() });
        change(&mut settings);
        let gateway = proxy::gateway(settings).await;
        let router = gateway.router(model).expect("model is served");
        Self { gateway, router, model: model.to_owned() }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.gateway.picker_address().expect("the picker listens")
    }

    pub(crate) async fn connect(&self) -> Connection {
        Connection::open(self.address()).await
    }

    /// A request for completions.
    pub(crate) fn request(&self) -> Vec<u8> {
        self.request_of(100)
    }

    /// A request for completions with this many prompt tokens. It is streamed, so that its prefill load stays until the
    /// first token; other prefills are expected to end after some time.
    pub(crate) fn request_of(&self, tokens: u32) -> Vec<u8> {
        let prompt: Vec<u32> = (1..=tokens).collect();
        let body = serde_json::json!({ "model": self.model, "prompt": prompt, "max_tokens": 9, "stream": true });
        body.to_string().into_bytes()
    }

    /// Booked requests of each rank, in the order of workers.
    pub(crate) async fn booked(&self) -> Vec<u32> {
        let loads = self.router.potential_loads(RouteRequest::query(Prompt::Tokens(&[1]))).await;
        loads.expect("the router responds").iter().map(|load| load.active_requests).collect()
    }

    /// Waits until each rank has this many booked requests.
    pub(crate) async fn until_booked(&self, expected: &[u32]) {
        let what = format!("{expected:?} are booked");
        proxy::eventually(&what, async || self.booked().await == expected).await;
    }

    /// Waits until no booking remains.
    pub(crate) async fn at_rest(&self) {
        proxy::until("all bookings have ended", || self.router.health().leases == 0).await;
        if !self.router.workers().is_empty() {
            self.until_booked(&vec![0; self.router.health().ranks]).await;
        }
    }

    /// Value of a series on the metrics page; 0 if absent.
    pub(crate) async fn metric(&self, series: &str) -> u64 {
        get(&self.gateway, "/metrics").await.metric(series, &[]) as u64
    }

    /// Waits until a series has this value.
    pub(crate) async fn until_metric(&self, series: &str, expected: u64) {
        let what = format!("{series} {expected}");
        proxy::eventually(&what, async || self.metric(series).await == expected).await;
    }

    /// Series of the requests for completions with this status.
    pub(crate) fn requests(&self, status: u16) -> String {
        let model = &self.model;
        format!("pointsman_gateway_requests_total{{model=\"{model}\",endpoint=\"completions\",status=\"{status}\"}}")
    }
}
