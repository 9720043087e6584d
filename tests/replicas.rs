//! Routers that share their load and sessions over an in-memory bus, in paused time.

use std::sync::Arc;
use std::time::Duration;

use pointsman::config::{EventMode, SessionAffinity};
use pointsman::internals::config::{QueueConfig, SessionConfig};
use pointsman::internals::session::SessionBinding;
use pointsman::policy::Policy;
use pointsman::protocol::{WorkerId, WorkerRank};
use pointsman::test_support::{MemoryBus, MemoryNetwork, rank};
use pointsman::{
    AddRequest, Placement, Prompt, ReplicaBus, ReplicaId, ReplicaLife, ReplicaTopic, RouteRequest, Router,
    RouterConfig,
    internals::replica::{decode_sessions, encode_sessions},
};
use tokio::sync::mpsc;
use tokio::time::sleep;

use crate::common::counters::Counters;
use crate::common::{assert_at_rest, config, config_with, loads, started, stored, tokens};

const WORKERS: u64 = 4;

async fn replica_with(network: &MemoryNetwork, id: u64, incarnation: u64, config: RouterConfig) -> Router {
    let bus: Arc<MemoryBus> = network.join(ReplicaLife { replica: ReplicaId(id), incarnation });
    started(Router::builder(config).replicas(bus), WORKERS).await
}

async fn replica(network: &MemoryNetwork, id: u64) -> Router {
    replica_with(network, id, 1, config()).await
}

async fn book(router: &Router, id: &str, worker: u64) {
    let prompt = tokens(worker as u32, 10);
    router.add_request(AddRequest::new(id, rank(worker), Prompt::Tokens(&prompt))).await.expect("booked");
}

async fn route(router: &Router, id: u32) -> Placement {
    router.route(RouteRequest::new(id.to_string(), Prompt::Tokens(&tokens(id, 10)))).await.expect("placed")
}

/// Longer than an interval and any delay.
async fn settle() {
    sleep(Duration::from_millis(100)).await;
}

#[tokio::test(start_paused = true)]
async fn bookings_of_a_replica_count_at_the_others() {
    let network = MemoryNetwork::with_delay(Duration::from_millis(1));
    let (one, two) = (replica(&network, 1).await, replica(&network, 2).await);
    book(&one, "a", 2).await;
    settle().await;
    assert_eq!(loads(&two).await[2], (1, 10, 40));
    assert_eq!(loads(&one).await[2], (1, 10, 40), "own bookings count once");
    book(&two, "b", 2).await;
    settle().await;
    assert_eq!((loads(&one).await[2], loads(&two).await[2]), ((2, 20, 80), (2, 20, 80)));
    one.mark_prefill_completed("a").expect("known");
    settle().await;
    assert_eq!(loads(&two).await[2], (2, 20, 40));
    one.free("a").expect("known");
    two.free("b").expect("known");
    settle().await;
    assert_at_rest(&one).await;
    assert_at_rest(&two).await;
}

#[tokio::test(start_paused = true)]
async fn a_booking_after_a_pause_is_published_at_once() {
    let network = MemoryNetwork::with_delay(Duration::from_millis(1));
    let mut config = config();
    config.replicas.interval_ms = 500;
    let one = replica_with(&network, 1, 1, config.clone()).await;
    let two = replica_with(&network, 2, 1, config).await;
    sleep(Duration::from_secs(2)).await;
    book(&one, "a", 0).await;
    sleep(Duration::from_millis(5)).await;
    assert_eq!(loads(&two).await[0].0, 1);
    book(&one, "b", 0).await;
    sleep(Duration::from_millis(5)).await;
    assert_eq!(loads(&two).await[0].0, 1, "one early summary per interval");
    sleep(Duration::from_millis(500)).await;
    assert_eq!(loads(&two).await[0].0, 2);
}

#[tokio::test(start_paused = true)]
async fn an_orderly_end_and_a_restart_drop_the_share() {
    let network = MemoryNetwork::default();
    let (one, two) = (replica(&network, 1).await, replica(&network, 2).await);
    book(&one, "a", 0).await;
    settle().await;
    assert_eq!(loads(&two).await[0].0, 1);
    one.shutdown(Duration::ZERO).await;
    settle().await;
    assert_at_rest(&two).await;

    let restarted = replica_with(&network, 1, 2, config()).await;
    book(&restarted, "b", 1).await;
    settle().await;
    assert_eq!(loads(&two).await.iter().map(|load| load.0).collect::<Vec<_>>(), [0, 1, 0, 0]);
}

/// Bookings of a rank and a count of conflicts: on an idle fleet, two replicas book one rank, alone or at the same time.
#[tokio::test(start_paused = true)]
async fn simultaneous_bookings_of_one_rank_are_conflicts() {
    let counters = Counters::default();
    let _guard = counters.record();
    let network = MemoryNetwork::with_delay(Duration::from_millis(1));
    let latency = config_with(|c| c.policy = Policy::Latency.into());
    let routers = [replica_with(&network, 1, 1, latency.clone()).await, replica_with(&network, 2, 1, latency).await];
    let conflicts = || counters.get("pointsman_replica_conflicts_total", &[]);
    let book = async |replica: usize, id: &str, worker: u64| {
        let prompt = tokens(worker as u32, 1_000);
        let request = AddRequest::new(id, rank(worker), Prompt::Tokens(&prompt));
        routers[replica].add_request(request).await.expect("booked");
    };
    // The first message about a rank has no earlier one to compare with.
    book(0, "a", 1).await;
    settle().await;
    book(1, "b", 1).await;
    settle().await;
    book(0, "g", 1).await;
    settle().await;
    assert_eq!(conflicts(), 0, "one after the other");
    book(0, "c", 1).await;
    book(1, "d", 2).await;
    settle().await;
    assert_eq!(conflicts(), 0, "different ranks");
    book(0, "e", 1).await;
    book(1, "f", 1).await;
    settle().await;
    assert_eq!(conflicts(), 2, "each replica counts one");
}

/// One rank, which is busy with any prefill. Requests arrive at both routers in turn.
#[tokio::test(start_paused = true)]
async fn queues_of_replicas_take_turns() {
    let network = MemoryNetwork::with_delay(Duration::from_millis(1));
    let mut routers = Vec::new();
    for id in 1..=2 {
        let queue = QueueConfig { threshold: Some(0.0), ..config().queue };
        let bus: Arc<MemoryBus> = network.join(ReplicaLife { replica: ReplicaId(id), incarnation: 1 });
        routers.push(started(Router::builder(config_with(|c| c.queue = queue)).replicas(bus), 1).await);
    }
    let first = route(&routers[0], 0).await;
    settle().await;
    let (placed, mut arrivals) = mpsc::unbounded_channel();
    for id in 1..=20 {
        let (router, placed) = (routers[id as usize % 2].clone(), placed.clone());
        tokio::spawn(async move { placed.send((id, route(&router, id).await)) });
        settle().await;
    }
    let mut running = first;
    for expected in 1..=20 {
        running.prefill_completed();
        drop(running);
        let (id, placement) = arrivals.recv().await.expect("a request is placed");
        settle().await;
        assert!(arrivals.is_empty(), "the rank is busy with request {id}");
        assert_eq!(id, expected, "the longest-waiting request of both is next");
        running = placement;
    }
}

/// Number of summaries of replica 1 in a second, in which `routers` place 100 requests in turn.
async fn summaries_in_a_second(bus: &Arc<dyn ReplicaBus>, routers: &[&Router]) -> usize {
    let mut messages = bus.subscribe();
    for id in 0..100 {
        drop(route(routers[id as usize % routers.len()], id).await);
        sleep(Duration::from_millis(10)).await;
    }
    let sent = std::iter::from_fn(|| messages.try_recv().ok());
    sent.filter(|message| message.topic == ReplicaTopic::Load && message.from.replica == ReplicaId(1)).count()
}

#[tokio::test(start_paused = true)]
async fn summaries_are_rare_until_another_replica_places_requests() {
    let network = MemoryNetwork::default();
    let bus: Arc<dyn ReplicaBus> = network.join(ReplicaLife { replica: ReplicaId(9), incarnation: 1 });
    let one = replica(&network, 1).await;
    let two = replica(&network, 2).await;
    settle().await;
    let unread = summaries_in_a_second(&bus, &[&one]).await;
    let read = summaries_in_a_second(&bus, &[&one, &two]).await;
    assert!((5..=15).contains(&unread) && read >= 40, "{unread} and {read} summaries");
}

#[tokio::test(start_paused = true)]
async fn another_block_size_is_refused() {
    let network = MemoryNetwork::default();
    let one = replica(&network, 1).await;
    let two = replica_with(&network, 2, 1, config_with(|c| c.block_size = Some(8))).await;
    book(&two, "a", 0).await;
    settle().await;
    assert_at_rest(&one).await;
}

fn with_hard_sessions() -> RouterConfig {
    config_with(|c| c.session = SessionConfig { affinity: SessionAffinity::Hard, ..SessionConfig::default() })
}

/// The rank of a request of session `chat`, without these ranks.
async fn rank_in_session(router: &Router, id: u32, excluded: &[WorkerRank]) -> WorkerRank {
    let prompt = tokens(id, 10);
    let mut request = RouteRequest::new(id.to_string(), Prompt::Tokens(&prompt));
    request.options.session_id = Some("chat".into());
    request.options.constraints.excluded_ranks = excluded.iter().copied().collect();
    router.route(request).await.expect("placed").rank()
}

#[tokio::test(start_paused = true)]
async fn sessions_follow_the_decisions_of_all_replicas() {
    let network = MemoryNetwork::with_delay(Duration::from_millis(1));
    let one = replica_with(&network, 1, 1, with_hard_sessions()).await;
    let two = replica_with(&network, 2, 1, with_hard_sessions()).await;
    let first = rank_in_session(&one, 1, &[]).await;
    settle().await;
    book(&one, "busy", first.worker.0).await;
    settle().await;
    assert_eq!(rank_in_session(&two, 2, &[]).await, first, "although it is the busiest rank");
    let second = rank_in_session(&two, 3, &[first]).await;
    settle().await;
    assert_eq!(rank_in_session(&one, 4, &[]).await, second);

    let joined = replica_with(&network, 3, 1, with_hard_sessions()).await;
    book(&joined, "also busy", second.worker.0).await;
    sleep(Duration::from_secs(16)).await; // a repetition of all sessions
    assert_eq!(rank_in_session(&joined, 5, &[]).await, second);
    one.shutdown(Duration::ZERO).await;
    let restarted = replica_with(&network, 1, 2, with_hard_sessions()).await;
    let third = rank_in_session(&restarted, 6, &[first, second]).await;
    settle().await;
    assert_eq!(rank_in_session(&two, 7, &[]).await, third, "the later life writes above the earlier one");
}

#[tokio::test(start_paused = true)]
async fn only_used_sessions_are_sent_and_malformed_ones_are_refused() {
    let counters = Counters::default();
    let _guard = counters.record();
    let network = MemoryNetwork::default();
    let bus = network.join(ReplicaLife { replica: ReplicaId(9), incarnation: 1 });
    let mut messages = bus.subscribe();
    let one = replica_with(&network, 1, 1, with_hard_sessions()).await;
    drop(route(&one, 1).await);
    sleep(Duration::from_secs(10)).await;
    while let Ok(message) = messages.try_recv() {
        assert_eq!(message.topic, ReplicaTopic::Load, "no session is in use");
    }
    let rank = rank_in_session(&one, 2, &[]).await;
    settle().await;
    let received =
        std::iter::from_fn(|| messages.try_recv().ok()).find(|message| message.topic == ReplicaTopic::Sessions);
    let bindings = decode_sessions(&received.expect("the new session").payload).expect("encoded bindings");
    assert_eq!(bindings.iter().map(|binding| (&*binding.id, binding.rank)).collect::<Vec<_>>(), [("chat", rank)]);

    let mut version = bindings[0].version;
    version.sequence += 1;
    let moved = SessionBinding {
        rank: WorkerRank::new(WorkerId(u64::from(rank.worker.0 == 0)), 0),
        version,
        ..bindings[0].clone()
    };
    let mut bytes = encode_sessions(std::slice::from_ref(&moved));
    bytes.push(0);
    bus.publish(&with_hard_sessions().pool.into(), ReplicaTopic::Sessions, bytes.into());
    settle().await;
    assert_eq!(rank_in_session(&one, 3, &[]).await, rank);
    assert_eq!(counters.get("pointsman_replica_summaries_refused_total", &[]), 1);
    assert_ne!(moved.rank, rank);
}

fn with_events(mode: EventMode) -> RouterConfig {
    config_with(|c| c.events.mode = mode)
}

/// The rank with the most cached blocks of prompt `id`, and their number.
async fn best(router: &Router, id: u32) -> (WorkerRank, u32) {
    let prompt = tokens(id, 10);
    let best = router.find_best_match(RouteRequest::query(Prompt::Tokens(&prompt))).await.expect("a match");
    (best.rank(), best.overlap_blocks())
}

#[tokio::test(start_paused = true)]
async fn without_events_a_prompt_placed_by_one_replica_is_a_hit_at_the_others() {
    let network = MemoryNetwork::with_delay(Duration::from_millis(1));
    let bus = network.join(ReplicaLife { replica: ReplicaId(9), incarnation: 1 });
    let one = replica_with(&network, 1, 1, with_events(EventMode::Off)).await;
    let two = replica_with(&network, 2, 1, with_events(EventMode::Off)).await;
    settle().await;
    let mut messages = bus.subscribe();
    let placed = route(&one, 1).await.rank();
    settle().await;
    assert_eq!((best(&one, 1).await, best(&two, 1).await), ((placed, 10), (placed, 10)));
    one.record_routing_decision(RouteRequest::query(Prompt::Tokens(&tokens(2, 10))), rank(3)).await.expect("known");
    settle().await;
    assert_eq!(best(&two, 2).await, (rank(3), 10));
    let sent = std::iter::from_fn(|| messages.try_recv().ok());
    let sent: Vec<ReplicaId> =
        sent.filter(|message| message.topic == ReplicaTopic::Speculative).map(|message| message.from.replica).collect();
    assert_eq!(sent, [ReplicaId(1); 2], "a receiver does not send them again");
}

#[tokio::test(start_paused = true)]
async fn decisions_for_ranks_with_events_are_not_sent() {
    let network = MemoryNetwork::default();
    let bus = network.join(ReplicaLife { replica: ReplicaId(9), incarnation: 1 });
    let mut messages = bus.subscribe();
    let one = replica_with(&network, 1, 1, with_events(EventMode::On)).await;
    let two = replica_with(&network, 2, 1, with_events(EventMode::Auto)).await;
    settle().await;
    for worker in 0..WORKERS {
        two.apply_events(vec![stored(rank(worker), &tokens(100 + worker as u32, 1))]).await.expect("up");
    }
    drop((route(&one, 1).await, route(&two, 2).await));
    settle().await;
    let mut sent = std::iter::from_fn(|| messages.try_recv().ok());
    assert!(sent.all(|message| message.topic != ReplicaTopic::Speculative));
}

/// Ten thousand prompts of 10 blocks exceed the queue. The receiver has the latest ones, and the others are counted.
#[tokio::test(start_paused = true)]
async fn a_flood_of_decisions_drops_the_oldest() {
    let counters = Counters::default();
    let _guard = counters.record();
    let network = MemoryNetwork::default();
    let one = replica_with(&network, 1, 1, with_events(EventMode::Off)).await;
    let two = replica_with(&network, 2, 1, with_events(EventMode::Off)).await;
    settle().await;
    for id in 0..10_000 {
        let prompt = tokens(id, 10);
        one.record_routing_decision(RouteRequest::query(Prompt::Tokens(&prompt)), rank(1)).await.expect("known");
    }
    sleep(Duration::from_secs(2)).await;
    assert_eq!(best(&two, 9_999).await, (rank(1), 10));
    assert_eq!(best(&two, 0).await.1, 0);
    assert_eq!(counters.get("pointsman_replica_decisions_dropped_total", &[]), 10_000 - 65_536 / 10);
}
