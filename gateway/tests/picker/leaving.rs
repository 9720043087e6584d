//! Clients that disconnect: every booking ends, and no task remains.

use pointsman::policy::Policy;
use tokio::runtime::Handle;

use super::client::{Connection, Exchange};
use super::{COMPLETIONS, Pool, workers};
use crate::common::proxy::until;

/// How a proxy ends an exchange whose client has disconnected.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    /// Ends its messages.
    HalfClose,
    /// Resets the stream.
    Reset,
    /// Closes the connection, because it is killed.
    Kill,
}

/// How far an exchange has come.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    Head,
    Body,
    /// After the pick, which the proxy has not read.
    Unread,
    /// In the answers with a body that exceeds all buffers, because the proxy does not read them.
    Stalled,
    Pick,
    ResponseHead,
    ResponseBody,
}

const EVENT: &[u8] = b"data: {\"choices\":[{\"text\":\"a\"}]}\n\n";

async fn advance(pool: &Pool, exchange: &mut Exchange, phase: Phase) {
    let mut body = pool.request_of(20_000);
    if phase == Phase::Stalled {
        body.resize(8 << 20, b' ');
    }
    exchange.begin(("POST", COMPLETIONS), &[("content-type", "application/json")], false, None).await;
    if phase == Phase::Head {
        return;
    }
    exchange.body(&body[..70_000], false).await;
    if phase == Phase::Body {
        return;
    }
    for part in body[70_000..].chunks(1 << 20) {
        exchange.body(part, false).await;
    }
    exchange.body(b"", true).await;
    if matches!(phase, Phase::Unread | Phase::Stalled) {
        until("the request is booked", || pool.router.health().leases == 1).await;
        return;
    }
    exchange.pick().await;
    if phase == Phase::Pick {
        return;
    }
    exchange.respond("200", "text/event-stream", false, None).await;
    exchange.response_headers().await;
    if phase == Phase::ResponseHead {
        return;
    }
    exchange.response_body(EVENT, false).await;
    exchange.response_piece().await;
}

/// Leaves an exchange. Returns what remains of it on the side of the proxy.
async fn leave(connection: Connection, mut exchange: Exchange, way: Way) -> (Option<Connection>, Option<Exchange>) {
    match way {
        Way::HalfClose => {
            exchange.half_close();
            (Some(connection), Some(exchange))
        }
        Way::Reset => {
            exchange.reset().await;
            (Some(connection), None)
        }
        Way::Kill => {
            connection.kill().await;
            (None, Some(exchange))
        }
    }
}

#[tokio::test]
async fn disconnected_clients_leave_no_booking_and_no_task() {
    let pool = Pool::start("picker-left", workers(2)).await;
    let tasks = || Handle::current().metrics().num_alive_tasks();
    // The first exchange starts what lasts.
    let mut connection = pool.connect().await;
    let mut exchange = connection.process().await;
    advance(&pool, &mut exchange, Phase::ResponseBody).await;
    exchange.response_body(b"data: [DONE]\n\n", true).await;
    assert!(exchange.response_piece().await.end_of_stream);
    assert_eq!(exchange.finish().await, (0, String::new()));
    connection.kill().await;
    pool.at_rest().await;
    let mut idle = tasks();
    for _ in 0..100 {
        tokio::task::yield_now().await;
        idle = idle.min(tasks());
    }

    let phases = [
        Phase::Head,
        Phase::Body,
        Phase::Unread,
        Phase::Stalled,
        Phase::Pick,
        Phase::ResponseHead,
        Phase::ResponseBody,
    ];
    for way in [Way::HalfClose, Way::Reset, Way::Kill] {
        for phase in phases {
            if (way, phase) == (Way::HalfClose, Phase::Stalled) {
                continue; // the proxy must read, or reset the stream
            }
            let mut connection = pool.connect().await;
            let mut exchange = connection.process().await;
            advance(&pool, &mut exchange, phase).await;
            let rest = leave(connection, exchange, way).await;
            pool.at_rest().await;
            drop(rest);
            until(&format!("no task remains: {way:?} in {phase:?}"), || tasks() <= idle).await;
        }
    }
    // One complete exchange. Without a body the model is unknown.
    assert_eq!(pool.metric(&pool.requests(200)).await, 1 + 3 * 2, "responses had begun");
}

/// Waiting requests leave the queue. A later one is placed once the rank is free.
#[tokio::test]
async fn clients_disconnect_while_their_request_waits() {
    let pool = Pool::start_with("picker-waits", Vec::new(), |settings| {
        settings.gateway.hold_without_endpoints_ms = 60_000;
        settings.models[0].router.policy = Policy::Kv.into();
    });
    let pool = pool.await;
    let held = "pointsman_gateway_held_requests{model=\"picker-waits\"}";
    for way in [Way::HalfClose, Way::Reset, Way::Kill] {
        let mut connection = pool.connect().await;
        let mut exchange = connection.process().await;
        exchange.post(COMPLETIONS, &pool.request(), None).await;
        pool.until_metric(held, 1).await;
        let _rest = leave(connection, exchange, way).await;
        pool.until_metric(held, 0).await;
    }
    pool.until_metric(&pool.requests(499), 3).await;
    pool.at_rest().await;
}
