//! Gateway shutdown with many responses in flight.

use std::time::Duration;

use pointsman_gateway::app::Gateway;
use pointsman_gateway::net::listener::Drained;

use crate::common::proxy::{self, Act, EVENT, Scripted, chunk, chunked_head, gateway, stream_end, until};
use crate::faults::{Client, DONE, metric, router, settings};

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

fn steps() -> Vec<Act> {
    vec![chunked_head(), chunk(EVENT), Act::Wait, chunk(DONE), stream_end()]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_open_at_the_deadline_are_cut_off_and_counted() {
    alone!();
    let worker = Scripted::responding_with(steps()).await;
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
