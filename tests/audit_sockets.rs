//! Audits over real sockets, of engines whose replies lack messages.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use pointsman::Router;
use pointsman::internals::KvAuditStatus;
use pointsman::internals::config::EventsConfig;

use crate::common::{config, config_with};
use crate::engines::{Engine, source};
use crate::ingest_faults::{assert_exact, fleet, until};

/// A router with one engine that has published 84 messages, and is audited every 20 ms, its replay buffer every 200 ms.
async fn audited() -> (Router, Vec<Engine>) {
    let events = EventsConfig { audit_interval_ms: 20, ..config().events };
    let (router, mut fleet) = fleet(config_with(|c| c.events = events), 1, 10_000).await;
    for _ in 0..20 {
        fleet[0].work();
    }
    assert_exact(&router, &fleet).await;
    (router, fleet)
}

fn audit(router: &Router, engine: &Engine) -> Option<KvAuditStatus> {
    source(router, engine.rank).and_then(|source| source.audit)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_rest_of_a_reply_with_a_gap_is_read() {
    let (router, fleet) = audited().await;
    let from_gap = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&from_gap);
    fleet[0].publisher.drop_from_replies(move |from, sequence| {
        counted.fetch_add((from == 30 && sequence == 83).into(), Ordering::SeqCst);
        from == 0 && ((30..50).contains(&sequence) || sequence == 83)
    });
    until("audits", &router, || from_gap.load(Ordering::SeqCst) >= 3).await;
    until("equal", &router, || audit(&router, &fleet[0]).is_some_and(|audit| audit.result == "equal")).await;
    assert_eq!(audit(&router, &fleet[0]).and_then(|audit| audit.difference), None);
    assert_exact(&router, &fleet).await;
}
