//! Gateway shutdown with many responses in flight.

use std::time::Duration;

use pointsman_gateway::app::Gateway;
use pointsman_gateway::net::listener::Drained;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

use crate::alone;
use crate::common::proxy::{self, EVENT, PATIENCE, gateway, until};
use crate::faults::{
    Client, DONE, FaultyWorker, Step, chunk, chunked_head, chunks_end, eventually, metric, router, settings,
};

const STREAMS: usize = 500;

/// Clients that have received the first frame. The worker waits before the second.
async fn streams(gateway: &Gateway, count: usize) -> Vec<Client> {
    let mut clients = Vec::new();
    for _ in 0..count {
        clients.push(Client::ask(gateway).await);
    }
    for client in &mut clients {
        client.expect_body(EVENT.as_bytes()).await;
    }
    clients
}

fn steps() -> Vec<Step> {
    vec![chunked_head(), chunk(EVENT), Step::Wait, chunk(DONE), chunks_end()]
}

/// A gateway during shutdown that refuses new connections.
async fn ending(gateway: Gateway, deadline: Duration) -> JoinHandle<Drained> {
    let address = gateway.address();
    let ending = tokio::spawn(gateway.shutdown(deadline));
    eventually("new connections are refused", async || TcpStream::connect(address).await.is_err()).await;
    ending
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn open_streams_end_normally_in_a_drain() {
    let _alone = alone().await;
    let worker = FaultyWorker::responding_with(steps()).await;
    let gateway = gateway(settings(&[worker.url()])).await;
    let router = router(&gateway);
    let clients = streams(&gateway, STREAMS).await;
    assert_eq!(router.health().leases, STREAMS);
    let ending = ending(gateway, PATIENCE).await;
    assert!(!ending.is_finished());
    assert_eq!(router.health().leases, STREAMS, "all streams continue");
    worker.release(STREAMS);
    for client in clients {
        let answer = client.answer().await.expect("response received");
        assert!(answer.is_whole && answer.text() == [EVENT, DONE].concat(), "{answer:?}");
    }
    assert_eq!(ending.await.expect("task ends without panic"), Drained { broken: 0 });
    assert_eq!(router.health().leases, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_open_at_the_deadline_are_cut_off_and_counted() {
    let _alone = alone().await;
    let worker = FaultyWorker::responding_with(steps()).await;
    let gateway = gateway(settings(&[worker.url()])).await;
    let router = router(&gateway);
    let clients = streams(&gateway, 20).await;
    let by_drain = ["reason=\"drain\""];
    let broken = metric(&gateway, "pointsman_gateway_streams_broken_total", &by_drain).await;
    let gone = metric(&gateway, "pointsman_gateway_client_gone_total", &[]).await;
    let drained = gateway.shutdown(Duration::from_millis(50)).await;
    assert_eq!(drained, Drained { broken: 20 });
    for client in clients {
        let answer = client.answer().await.expect("response started");
        assert!(!answer.is_whole && answer.text() == EVENT, "{answer:?}");
    }
    worker.wait_until_closed().await;
    until("all bookings have ended", || router.health().leases == 0).await;
    // All gateways of a process share one metrics page.
    let other = proxy::gateway(settings(&[])).await;
    assert_eq!(metric(&other, "pointsman_gateway_streams_broken_total", &by_drain).await - broken, 20.0);
    assert_eq!(metric(&other, "pointsman_gateway_client_gone_total", &[]).await, gone, "clients are still there");
}
