//! A gateway with one well-behaved client, used by the hostile cases.
//!
//! It owns the well-behaved client and the maximum of live bytes. [`Scene::finish`] requires that the client was
//! served throughout and that no request, booking or load remains. The hostile requests are in the cases.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use pointsman_gateway::app::Gateway;
use tokio::task::JoinHandle;

use crate::common::proxy::{self, Answer, FINE_JSON, Scripted, full_response, gateway, request};
use crate::faults::{Client, PATH, expect_idle, metric, settings};
use crate::peak::Peak;

pub(crate) const MIB: usize = 1 << 20;

/// Maximum accepted body length.
pub(crate) const BODY_BYTES_MAX: usize = 4 * MIB;

/// Memory limit of one case. It covers the body in the test, in transit, while it is received and its buffer grows, its
/// tokens, the worker's copy in this process, and the well-behaved client.
pub(crate) const CASE_BYTES_MAX: usize = 10 * BODY_BYTES_MAX;

/// A gateway, its worker, and one well-behaved client with continuous requests.
pub(crate) struct Scene {
    pub(crate) gateway: Gateway,
    pub(crate) worker: Scripted,
    good: JoinHandle<usize>,
    is_over: Arc<AtomicBool>,
    pub(crate) peak: Peak,
}

pub(crate) const GOOD: &str = r#"{"model":"mock","prompt":[1,2,3],"user":"good"}"#;

impl Scene {
    pub(crate) async fn set() -> Self {
        let worker = Scripted::with(Vec::new(), |_, _| vec![full_response("200 OK", FINE_JSON)]).await;
        let mut settings = settings(&[worker.url()]);
        settings.models[0].workers = vec![proxy::worker(1, &worker.url(), 2)];
        settings.gateway.body_bytes_max = BODY_BYTES_MAX as u64;
        settings.gateway.head_timeout_ms = 2_000;
        settings.gateway.body_timeout_ms = 500;
        let gateway = gateway(settings).await;
        let (address, is_over) = (gateway.address(), Arc::new(AtomicBool::new(false)));
        let finish = Arc::clone(&is_over);
        let good = tokio::spawn(async move {
            let mut served = 0;
            while !finish.load(Ordering::Relaxed) {
                let answer = request(address, "POST", PATH, "", GOOD.as_bytes()).await;
                assert_eq!((answer.status, answer.text()), (200, FINE_JSON), "the well-behaved client is served");
                served += 1;
            }
            served
        });
        Self { gateway, worker, good, is_over, peak: Peak::watch() }
    }

    /// Takes the requests at the worker that the well-behaved client did not send.
    pub(crate) fn reached(&self) -> Vec<proxy::Got> {
        let mut all = self.worker.seen(|seen| std::mem::take(&mut seen.requests));
        all.retain(|got| got.body != GOOD.as_bytes());
        all
    }

    pub(crate) async fn finish(self) {
        self.is_over.store(true, Ordering::Relaxed);
        assert!(self.good.await.expect("the well-behaved client does not panic") > 0);
        expect_idle(&self.gateway).await;
        assert_eq!(metric(&self.gateway, "pointsman_gateway_requests_total", &["status=\"500\""]).await, 0.0);
        let page = proxy::get(&self.gateway, "/live").await;
        assert_eq!(page.status, 200);
    }

    /// The response to these bytes. The connection must end after it.
    pub(crate) async fn exchange(&self, bytes: impl AsRef<[u8]>) -> Option<Answer> {
        let mut client = Client::connect(self.gateway.address()).await;
        // The write may fail if the gateway responds before it has read everything.
        client.write(bytes).await;
        client.answer().await
    }

    pub(crate) async fn posted(&self, body: impl AsRef<[u8]>) -> Answer {
        request(self.gateway.address(), "POST", PATH, "", body.as_ref()).await
    }
}

pub(crate) fn repeated(start: &str, part: &str, times: usize, end: &str) -> String {
    [start, &part.repeat(times), end].concat()
}

/// The head of a valid request with these additional headers.
pub(crate) fn head(headers: &str) -> String {
    format!("POST {PATH} HTTP/1.1\r\nhost: g\r\n{headers}\r\n")
}
