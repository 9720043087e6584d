//! Panics at every kind of message of the readers of KV events and their shard, and of the actors that follow sources of
//! workers.

use std::future::Future;
use std::time::Duration;

use pointsman::internals::config::{EventsConfig, QueueConfig};
use pointsman::internals::index::BlockDigest;
use pointsman::internals::ingest::{BlockName, DIGEST_REQUEST};
use pointsman::protocol::{StorageTier, WorkerConfig, WorkerId, WorkerMap};
use pointsman::test_support::rank;
use pointsman::{DiscoveryError, DiscoverySource, EngineContents, Fault, Router, RouterConfig};
use tokio::sync::mpsc;

use super::{Tally, assert_permits_are_free, assert_unharmed, panics_of, route};
use crate::common::{config, suppress_fault_reports, tokens, until};
use crate::engines::Engine;
use crate::ingest_faults::{assert_exact, fleet};

/// Kinds of messages from readers to a shard.
pub(super) const OF_READERS: [&str; 5] = ["DumpRank", "Digest", "Names", "Forget", "RestoreEvicted"];

/// Replies of an engine to audit requests, which contain all blocks that it holds.
fn audited(engine: &Engine) -> impl Fn(u64) -> Vec<u8> + Send + Sync + 'static {
    let names: Vec<BlockName> = engine.holds().iter().map(|(_, hash, _)| (StorageTier::Device, *hash)).collect();
    move |request| {
        let contents = if request == DIGEST_REQUEST {
            EngineContents::Digest(names.iter().copied().collect::<BlockDigest>())
        } else {
            EngineContents::Names(names.iter().copied().collect())
        };
        contents.encode()
    }
}

/// Routes until the end of `work`.
async fn served(router: &Router, tally: &Tally, work: impl Future<Output = ()>) {
    let serve = async {
        for n in 0_u32.. {
            let (id, prompt) = (n.to_string(), tokens(n % 7, 4));
            drop(tally.returned(router, route(router, &id, &prompt)).await.expect("served"));
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::select! {
        biased;
        () = work => {}
        () = serve => {}
    }
}

/// A snapshot, restored contents, a difference between index and engine, and deaths of the shard or a reader.
async fn work(router: &Router, fleet: &mut [Engine], kind: &str) {
    let mut snapshot = router.snapshot().await.expect("up");
    // Contents for a reader that starts later. The other rank is audited, which requires complete contents.
    let (late, config) = (fleet[1].rank.worker, fleet[1].config());
    router.remove_worker(late).await.expect("registered");
    snapshot.ranks.iter_mut().filter(|rank| rank.rank.worker == late).for_each(|rank| rank.evicted_blocks = 1);
    router.restore(snapshot).expect("the same layout");
    router.upsert_worker(late, config).await.expect("valid");
    // Blocks that only the index has, until an audit.
    fleet[0].store();
    fleet[0].prompts.pop();
    match kind {
        "Resync" => assert!(router.inject(Fault::Radix(rank(0)))),
        "Died" => assert!(router.inject(Fault::Ingest(rank(0)))),
        _ => {}
    }
    assert_exact(router, fleet).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_and_their_shard_panic_at_every_kind_of_message() {
    let events = EventsConfig { audit_interval_ms: 20, blocks_max: 1_000, ..config().events };
    let queue = QueueConfig { requests_max: 40, ..config().queue };
    let (router, mut fleet) = fleet(RouterConfig { events, queue, ..config() }, 2, 10_000).await;
    fleet[0].publisher.reply_to_audits(audited(&fleet[0]));
    let tally = Tally::default();
    let [shard, reader] = [Fault::Radix(rank(0)), Fault::Ingest(rank(0))].map(|fault| (fault, panics_of(fault)));
    served(&router, &tally, async {
        for (fault, panics) in [shard, reader] {
            let is_tested = |kind: &str| fault == Fault::Ingest(rank(0)) || OF_READERS.contains(&kind);
            for (kind, moment) in panics.into_iter().filter(|(kind, _)| is_tested(kind)) {
                tally.inject(1);
                for works in 0.. {
                    let injected = router.inject_at(fault, kind, moment).expect("an actor with this kind");
                    work(&router, &mut fleet, kind).await;
                    if injected.has_begun() {
                        break;
                    }
                    assert!(works < 100, "the work causes no {kind} at {fault:?}");
                }
                if fault == Fault::Ingest(rank(0)) {
                    // The restart budget of a reader begins again.
                    router.remove_worker(fleet[0].rank.worker).await.expect("registered");
                    router.upsert_worker(fleet[0].rank.worker, fleet[0].config()).await.expect("valid");
                    assert_exact(&router, &fleet).await;
                }
            }
        }
    })
    .await;
    assert_unharmed(&router).await;
    assert_permits_are_free(&router).await;
    tally.print("reader and its shard, each kind of message");
}

/// A source that panics on request.
struct Panicky(mpsc::UnboundedReceiver<Option<WorkerMap>>);

impl DiscoverySource for Panicky {
    fn name(&self) -> String {
        "panicky".to_owned()
    }

    async fn next(&mut self) -> Option<Result<WorkerMap, DiscoveryError>> {
        match self.0.recv().await? {
            Some(workers) => Some(Ok(workers)),
            None => std::panic::panic_any("an injected fault"),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn follower_panics_at_every_kind_of_message() {
    suppress_fault_reports();
    let (send, source) = mpsc::unbounded_channel();
    let router = Router::builder(config()).discovery(Panicky(source)).start().await.expect("valid");
    let set = |worker| WorkerMap::from([(WorkerId(0), engine(0)), (WorkerId(worker), engine(worker))]);
    let is_registered = async |worker| router.workers().iter().any(|known| known.worker == WorkerId(worker));
    send.send(Some(set(1))).expect("followed");
    until("registered", async || is_registered(1).await).await;
    let tally = Tally::default();
    served(&router, &tally, async {
        for (worker, (kind, moment)) in (2..).zip(panics_of(Fault::Discovery(0))) {
            let restarts = router.health().restarts;
            tally.inject(1);
            let injected = router.inject_at(Fault::Discovery(0), kind, moment).expect("an actor with this kind");
            // The supervisor passes the fault on before it handles this call: the follower has it before the panic.
            router.remove_worker(WorkerId(u64::MAX)).await.expect_err("unknown");
            send.send(None).expect("followed");
            until("panic", async || injected.has_begun()).await;
            until("restart", async || router.health().restarts > restarts).await;
            send.send(Some(set(worker))).expect("followed");
            until("registered", async || is_registered(worker).await).await;
        }
    })
    .await;
    assert_unharmed(&router).await;
    tally.print("follower of a source, each kind of message");
}

fn engine(worker: u64) -> WorkerConfig {
    WorkerConfig::at(format!("http://engine-{worker}"))
}
