//! Deaths of every actor that is restarted while a router does everything that it can do.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use pointsman::config::{EventMode, SpeculativeModel};
use pointsman::internals::config::{
    EventsConfig, HealthConfig, IndexConfig, LoadConfig, QueueConfig, SpeculativeConfig,
};
use pointsman::protocol::{WorkerConfig, WorkerId};
use pointsman::test_support::{MemoryNetwork, rank};
use pointsman::{
    AddRequest, Constraints, EngineReading, Fault, HealthState, Outcome, Placement, Prompt, RankConditions, RankHealth,
    ReplicaId, ReplicaLife, RequestOptions, RouteRequest, Router, RouterConfig, SessionId,
};

use super::{Tally, assert_permits_are_free, assert_unharmed, dropped_after, rounds};
use crate::common::{WAIT_MAX, cleared, config, loads, stored, suppress_fault_reports, tokens, until};

/// Rank that comes and goes. No other calls than its own choose it.
const PASSING: WorkerId = WorkerId(9);

fn with_queue() -> RouterConfig {
    let speculative = SpeculativeConfig { with_events_ttl_ms: Some(1_000), ..config().index.speculative };
    RouterConfig {
        index: IndexConfig { shards: 2, speculative, ..config().index },
        queue: QueueConfig { threshold: Some(0.5), overlap_refresh_after_ms: 1, requests_max: 40, ..config().queue },
        events: EventsConfig { blocks_max: 100, ..config().events },
        health: HealthConfig { outcome_failures_max: 1, ejection_ms: 1, ..config().health },
        ..config()
    }
}

/// No events: decisions fill modelled caches, and replicas exchange them.
fn with_modelled_caches() -> RouterConfig {
    let speculative = SpeculativeConfig { model: SpeculativeModel::Lru, ..config().index.speculative };
    RouterConfig {
        events: EventsConfig { mode: EventMode::Off, ..config().events },
        index: IndexConfig { shards: 2, speculative, ..config().index },
        ..with_queue()
    }
}

/// Probes that fail at once: no one listens at the address.
fn with_probes() -> RouterConfig {
    RouterConfig { health: HealthConfig { probe_interval_ms: 5, ..config().health }, ..with_queue() }
}

/// Ranks that owe first tokens are stalled soon.
fn with_stalls() -> RouterConfig {
    RouterConfig { health: HealthConfig { stall_ms: 1, ..config().health }, ..with_queue() }
}

fn engine() -> WorkerConfig {
    WorkerConfig { max_num_batched_tokens: Some(100), ..WorkerConfig::at("http://127.0.0.1:9") }
}

/// A router with another replica, under load.
struct World {
    router: Router,
    peer: Router,
    tally: Tally,
    ids: AtomicU64,
    stalls: bool,
}

impl World {
    async fn start(config: RouterConfig) -> Arc<Self> {
        let network = MemoryNetwork::default();
        let [router, peer] = [1, 2].map(|replica| {
            let bus = network.join(ReplicaLife { replica: ReplicaId(replica), incarnation: 1 });
            let builder = Router::builder(config.clone()).replicas(bus);
            let builder = (0..3).fold(builder, |builder, worker| builder.worker(WorkerId(worker), engine()));
            builder.worker(PASSING, engine()).start()
        });
        let (router, peer) = (router.await.expect("valid"), peer.await.expect("valid"));
        let stalls = config.health.stall_ms == 1;
        Arc::new(Self { router, peer, tally: Tally::default(), ids: AtomicU64::new(0), stalls })
    }

    fn number(&self) -> u64 {
        self.ids.fetch_add(1, Ordering::Relaxed)
    }

    fn request<'a>(&self, prompt: &'a [u32]) -> RouteRequest<'a> {
        let n = self.number();
        let constraints = Constraints { excluded_ranks: BTreeSet::from([rank(PASSING.0)]), ..Constraints::default() };
        let session_id = Some(format!("{}", n % 5).into());
        let options = RequestOptions { session_id, constraints, ..RequestOptions::default() };
        RouteRequest { options, ..RouteRequest::new(n.to_string(), Prompt::Tokens(prompt)) }
    }

    async fn route(&self, router: &Router, prompt: &[u32]) -> Placement {
        self.tally.returned(router, router.route(self.request(prompt))).await.expect("placed")
    }

    /// Requests one after the other. Returns the last ones.
    async fn call(&self, seed: u32) -> Vec<Placement> {
        let mut held = Vec::new();
        for n in 0..6 {
            let placement = self.route(&self.router, &tokens(seed + n % 3, 4)).await;
            placement.delivered_cached_tokens(u32::MAX);
            placement.prefill_completed();
            placement.output_block(Some(0.7)).expect("a share");
            held.insert(0, placement);
            held.truncate(2);
            drop(self.route(&self.peer, &tokens(seed + n, 4)).await);
        }
        held
    }

    /// Requests that wait for busy ranks; one of them is cancelled.
    async fn wait(&self) {
        let mut busy = Vec::new();
        for n in 0..3 {
            busy.push(self.route(&self.router, &tokens(100 + n, 25)).await);
        }
        let prompt = tokens(200, 25);
        tokio::join!(async { self.route(&self.router, &prompt).await.prefill_completed() }, async {
            dropped_after(self.router.route(self.request(&prompt)), 2).await;
            drop(self.router.pending().await); // may be lost
            self.router.session_rank(&SessionId::new("0").expect("short")).await; // the same
            tokio::time::sleep(Duration::from_millis(3)).await; // overlaps are queried again
            busy.clear();
        });
    }

    /// The passing worker changes, and is removed at the deadline of a drain. It ends as registered.
    async fn change_workers(&self) {
        let (router, n) = (&self.router, self.number());
        let book = async |id: &str| {
            let request = AddRequest::new(id, rank(PASSING.0), Prompt::Tokens(&[1]));
            self.tally.returned(router, router.add_request(request)).await.expect("booked");
        };
        let other = WorkerConfig { total_kv_blocks: Some(500 + n as u32), ..engine() };
        router.upsert_worker(PASSING, other).await.expect("valid");
        router.cordon_worker(PASSING).await.expect("registered");
        router.uncordon_worker(PASSING).await.expect("registered");
        book("first").await;
        tokio::join!(async { drop(router.drain_worker(PASSING, WAIT_MAX).await) }, async {
            tokio::task::yield_now().await;
            router.undrain_worker(PASSING).await.expect("registered");
        });
        router.free("first").expect("booked");
        book("second").await;
        assert_eq!(router.drain_worker(PASSING, Duration::from_millis(1)).await.expect("registered"), 1);
        router.upsert_worker(PASSING, engine()).await.expect("valid");
    }

    /// Events, reports and queries. Lost replies are errors.
    async fn query(&self) {
        let (router, prompt) = (&self.router, tokens(3, 6));
        let query = || RouteRequest::query(Prompt::Tokens(&prompt));
        for worker in 0..3 {
            let events = vec![cleared(rank(worker)), stored(rank(worker), &prompt)];
            router.apply_events(events).await.expect("up");
        }
        let _ = router.flush().await;
        drop(router.dump_events().await);
        drop(router.overlap_scores(query(), false).await);
        router.find_best_match(query()).await.expect("a rank");
        router.explain(query()).await.expect("a rank");
        router.potential_loads(query()).await.expect("a snapshot");
        router.record_routing_decision(query(), rank(1)).await.expect("known");
        router.rank_health().await.expect("up");
        router.report_outcome(rank(2), Outcome::ConnectFailed);
        router.report_engine_load(rank(0), EngineReading { running: Some(1), ..EngineReading::default() });
        let unavailable = BTreeSet::from([rank(1)]);
        router.set_conditions(RankConditions { unavailable, ..RankConditions::default() }).await.expect("up");
        router.set_conditions(RankConditions::default()).await.expect("up");
    }

    /// A load query to a hung rank ends with its timeout. A request that is booked there waits for the end of the hang.
    async fn time_out(&self) {
        let router = self.router.clone();
        let hang = tokio::task::spawn_blocking(move || router.hang(Fault::Sequence(rank(0)))).await.expect("no panic");
        let prompt = tokens(300, 4);
        tokio::join!(async { drop(self.route(&self.router, &prompt).await) }, async {
            tokio::time::sleep(2 * LoadConfig::QUERY_TIMEOUT).await;
            tokio::task::spawn_blocking(move || drop(hang)).await.expect("no panic");
        });
    }

    /// A rank with reported first tokens owes two until it is stalled.
    async fn stall(&self, restarts: u64) {
        let excluded_ranks = [0, 1, PASSING.0].map(rank).into();
        let options =
            RequestOptions { constraints: Constraints { excluded_ranks, ..Default::default() }, ..Default::default() };
        let prompt = tokens(400, 4);
        let mut owed = Vec::new();
        for n in 0..12 {
            let request = RouteRequest {
                options: options.clone(),
                ..RouteRequest::new(self.number().to_string(), Prompt::Tokens(&prompt))
            };
            let placement = self.tally.returned(&self.router, self.router.route(request)).await.expect("placed");
            if n < 10 {
                placement.prefill_completed();
            } else {
                owed.push(placement);
            }
        }
        // Until a pass has found it, or an actor has died: the next one has not seen these first tokens. Each load has a
        // time limit.
        let is_stalled = |row: &RankHealth| matches!(row.state, HealthState::Stalled { .. });
        while self.router.health().restarts == restarts
            && !self.router.rank_health().await.is_ok_and(|rows| rows.iter().any(is_stalled))
        {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Everything that a router does, at the same time. Returns the placements that are held.
    async fn load(self: &Arc<Self>) -> Vec<Placement> {
        let [first, second, third, fourth] = [(); 4].map(|()| Arc::clone(self));
        let restarts = self.router.health().restarts;
        let callers =
            [tokio::spawn(async move { first.call(0).await }), tokio::spawn(async move { second.call(10).await })];
        let others = [
            tokio::spawn(async move {
                third.wait().await;
                third.change_workers().await;
            }),
            tokio::spawn(async move {
                fourth.query().await;
                fourth.time_out().await;
                if fourth.stalls {
                    fourth.stall(restarts).await;
                }
            }),
        ];
        let mut held = Vec::new();
        for caller in callers {
            held.extend(tokio::time::timeout(WAIT_MAX, caller).await.expect("every call returns").expect("no panic"));
        }
        for task in others {
            tokio::time::timeout(WAIT_MAX, task).await.expect("every call returns").expect("no panic");
        }
        held
    }

    /// One booking per placement, and none after the placements. The loads of the other replica arrive later.
    async fn assert_booked_once(&self, held: Vec<Placement>) {
        let requests = async || loads(&self.router).await.iter().map(|load| load.0 as usize).sum::<usize>();
        let count = held.len();
        until("one booking per placement", async || requests().await == count && self.router.health().leases == count)
            .await;
        drop(held);
        until("rest", async || loads(&self.router).await.iter().all(|load| *load == (0, 0, 0))).await;
        assert_eq!((self.router.health().leases, self.peer.health().leases), (0, 0));
    }

    /// An actor dies after a number of requests of the load. The load and its books are complete nevertheless.
    async fn die_at(self: &Arc<Self>, fault: Fault, requests: u64) {
        let (before, at) = (self.router.health().restarts, self.ids.load(Ordering::Relaxed) + requests);
        self.tally.inject(1);
        let death = async {
            until("the request", async || self.ids.load(Ordering::Relaxed) >= at).await;
            assert!(self.router.inject(fault), "an actor");
        };
        let (held, ()) = tokio::join!(self.load(), death);
        self.assert_booked_once(held).await;
        until("restart", async || self.router.health().restarts > before).await;
    }
}

async fn actors_die(faults: &[Fault], config: RouterConfig, row: &str) {
    suppress_fault_reports();
    let world = World::start(config).await;
    for (round, requests) in (0..rounds()).flat_map(|round| [0, 8, 16].map(|requests| (round, requests))) {
        for fault in faults {
            world.die_at(*fault, requests + round % 8).await;
        }
    }
    assert_unharmed(&world.router).await;
    assert_permits_are_free(&world.router).await;
    world.tally.print(row);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn actors_die_while_a_router_does_everything() {
    let of_requests = [Fault::Scheduler, Fault::Radix(rank(PASSING.0)), Fault::Sequence(rank(0))];
    actors_die(&of_requests, with_queue(), "scheduler, shard or sequence actor, under everything").await;
    actors_die(&[Fault::Radix(rank(0))], with_modelled_caches(), "shard with modelled caches, under everything").await;
    let of_reports = [Fault::Health, Fault::EngineLoads];
    actors_die(&of_reports, with_probes(), "health or engine load actor, failing probes").await;
    actors_die(&of_reports[..1], with_stalls(), "health actor, stalled ranks").await;
}
