//! Metrics of a router: only those listed in `docs/metrics.md`, with correct values.
//!
//! Each test runs a router on one thread with a separate recorder and compares all recorded metrics with the page.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use metrics_util::MetricKind;
use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshotter};
use pointsman::error::RouteError;
use pointsman::protocol::{BlockHash, WorkerConfig, WorkerId};
use pointsman::test_support::rank;
use pointsman::{
    AddRequest, BoxFuture, Constraints, Prompt, Rejection, RequestOptions, RouteRequest, Router, SharedCache,
};

use crate::common::{config, config_with, router, stored, tokens};

/// Metrics since the last snapshot: values by name and labels, such as `name{pool="p",class="c"}`.
struct Recorded(BTreeMap<String, DebugValue>);

impl Recorded {
    /// Takes a snapshot and compares names, types, labels and help texts with the page, and units with the names.
    fn by(snapshotter: &Snapshotter) -> Self {
        let documented = documented();
        let values = snapshotter.snapshot().into_vec().into_iter().map(|(key, unit, help, value)| {
            let (kind, key) = key.into_parts();
            let kind = match kind {
                MetricKind::Counter => "counter",
                MetricKind::Gauge => "gauge",
                MetricKind::Histogram => "histogram",
            };
            let labels: Vec<_> = key.labels().map(|label| format!("{}={:?}", label.key(), label.value())).collect();
            let names = key.labels().map(|label| label.key()).filter(|name| *name != "pool");
            let names: String = names.map(|name| format!(", `{name}`")).collect();
            let entry = format!("({kind}{names}): {}", help.expect("described at the start"));
            assert_eq!(documented.get(key.name()), Some(&entry), "{}", key.name());
            let unit = unit.map_or("count", |unit| unit.as_str());
            let named = ["seconds", "bytes"].into_iter().find(|unit| key.name().contains(&format!("_{unit}")));
            assert_eq!(unit, named.unwrap_or("count"), "{}", key.name());
            (format!("{}{{{}}}", key.name(), labels.join(",")), value)
        });
        Self(values.collect())
    }

    fn count(&self, name: &str) -> u64 {
        match &self.0[name] {
            DebugValue::Counter(count) => *count,
            other => panic!("{name} is {other:?}"),
        }
    }

    fn gauge(&self, name: &str) -> f64 {
        match &self.0[name] {
            DebugValue::Gauge(value) => **value,
            other => panic!("{name} is {other:?}"),
        }
    }

    fn values(&self, name: &str) -> Vec<f64> {
        match &self.0[name] {
            DebugValue::Histogram(values) => values.iter().map(|value| **value).collect(),
            other => panic!("{name} is {other:?}"),
        }
    }

    /// Nonzero decision counts, without the pool label.
    fn decisions(&self) -> Vec<(&str, u64)> {
        let prefix = "pointsman_decisions_total{pool=\"default\",";
        let all = self.0.keys().filter_map(|name| Some((name.strip_prefix(prefix)?, self.count(name))));
        all.filter(|(_, count)| *count > 0).collect()
    }
}

/// Type, labels other than `pool`, and meaning by name.
fn documented() -> BTreeMap<String, String> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/metrics.md");
    let page = std::fs::read_to_string(page).expect("page exists");
    let entries = page.lines().filter_map(|line| line.strip_prefix("- `")?.split_once("` "));
    let entries = entries.map(|(name, entry)| (name.to_owned(), entry.to_owned()));
    // The gateway's tests check its own entries.
    entries.filter(|(name, _)| name.starts_with("pointsman_") && !name.starts_with("pointsman_gateway_")).collect()
}

/// Runs a scenario in paused time on this thread with a separate recorder.
fn record(scenario: impl AsyncFnOnce(Snapshotter)) {
    let recorder = DebuggingRecorder::new();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    metrics::with_local_recorder(&recorder, || {
        runtime.expect("a runtime").block_on(scenario(recorder.snapshotter()));
    });
}

/// Advances the clock until gauges are published again.
async fn a_period_passes() {
    tokio::time::advance(Duration::from_secs(1)).await;
    for _ in 0..8 {
        tokio::task::yield_now().await;
    }
}

fn request<'a>(id: &'a str, tokens: &'a [u32]) -> RouteRequest<'a> {
    RouteRequest::new(id, Prompt::Tokens(tokens))
}

#[test]
fn a_placed_request_is_counted_in_funnel_phases_and_gauges() {
    record(async |snapshotter| {
        let router = router(config_with(|c| c.pool = "chat-1".to_owned()), 2).await;
        let prompt = tokens(1, 20);
        router.apply_events(vec![stored(rank(1), &prompt[..60])]).await.expect("up");
        let placement = router.route(request("a", &prompt)).await.expect("placed");
        assert_eq!((placement.rank(), placement.cached_tokens()), (rank(1), 60));
        placement.delivered_cached_tokens(40);
        placement.delivered_cached_tokens(80); // only the first report counts
        a_period_passes().await;

        let seen = Recorded::by(&snapshotter);
        let count = |name: &str, labels: &str| seen.count(&format!("pointsman_{name}{{pool=\"chat-1\"{labels}}}"));
        assert_eq!(count("decisions_total", ",outcome=\"placed\",reason=\"chosen\""), 1);
        assert_eq!(count("prompt_tokens_total", ""), 80);
        let funnel = ["reachable", "selected", "delivered"];
        assert_eq!(funnel.map(|stage| count("cached_tokens_total", &format!(",stage={stage:?}"))), [60, 60, 40]);
        let sides = ["predicted", "delivered"];
        assert_eq!(sides.map(|side| count("prediction_tokens_total", &format!(",side={side:?}"))), [60, 40]);
        assert_eq!(count("kv_event_blocks_total", ",result=\"stored\""), 15);
        assert_eq!(count("never_matched_total", ",kind=\"plain\""), 0, "registered at start");

        let values = |name: &str, labels: &str| seen.values(&format!("pointsman_{name}{{pool=\"chat-1\"{labels}}}"));
        assert_eq!(values("overlap_ratio", ""), [0.75]);
        assert_eq!(values("reachable_overlap_ratio", ""), [0.75]);
        assert_eq!(values("prediction_error_tokens", ",result=\"over\""), [20.0]);
        for phase in ["hash", "overlap", "decide", "book", "total"] {
            let seconds = values("phase_duration_seconds", &format!(",phase={phase:?}"));
            assert_eq!(seconds, [0.0], "{phase} of the first request is timed, and time is paused");
        }

        let gauge = |name: &str, labels: &str| seen.gauge(&format!("pointsman_{name}{{pool=\"chat-1\"{labels}}}"));
        let of_rank = |name: &str| gauge(name, ",worker=\"1\",rank=\"0\"");
        assert_eq!(
            ["rank_active_requests", "rank_active_blocks", "rank_prefill_tokens", "rank_held_blocks"].map(of_rank),
            [1.0, 20.0, 20.0, 15.0]
        );
        assert_eq!(["ranks", "cold_ranks", "leases"].map(|name| gauge(name, "")), [2.0, 0.0, 1.0]);
        assert_eq!(["requests", "events"].map(|gate| gauge("gate_permits", &format!(",gate={gate:?}"))), [0.0; 2]);
    });
}

#[test]
fn one_request_in_sixteen_is_timed() {
    record(async |snapshotter| {
        let router = router(config(), 1).await;
        for _ in 0..33 {
            drop(router.route(request("a", &tokens(1, 2))).await.expect("placed"));
        }
        let seen = Recorded::by(&snapshotter);
        assert_eq!(seen.values("pointsman_phase_duration_seconds{pool=\"default\",phase=\"total\"}").len(), 3);
        assert_eq!(seen.decisions(), [("outcome=\"placed\",reason=\"chosen\"}", 33)]);
    });
}

#[test]
fn series_of_a_removed_rank_disappear() {
    record(async |snapshotter| {
        let router = router(config(), 2).await;
        let prompt = tokens(1, 20);
        for worker in [0, 1] {
            router.apply_events(vec![stored(rank(worker), &prompt)]).await.expect("up");
            let id = worker.to_string();
            router.add_request(AddRequest::new(&id, rank(worker), Prompt::Tokens(&prompt))).await.expect("booked");
        }
        a_period_passes().await;
        router.remove_worker(WorkerId(0)).await.expect("known");
        a_period_passes().await;
        let seen = Recorded::by(&snapshotter);
        for (name, stays) in [("active_requests", 1.0), ("active_blocks", 20.0), ("held_blocks", 20.0)] {
            let gauge = |worker: &str| {
                seen.gauge(&format!("pointsman_rank_{name}{{pool=\"default\",worker={worker:?},rank=\"0\"}}"))
            };
            assert_eq!([gauge("0"), gauge("1")], [0.0, stays], "{name}");
        }
        assert_eq!(seen.gauge("pointsman_ranks{pool=\"default\"}"), 1.0);
        assert_eq!(seen.decisions(), [("outcome=\"placed\",reason=\"given\"}", 2)]);
    });
}

#[test]
fn unplaced_requests_are_counted_by_reason() {
    record(async |snapshotter| {
        let router = router(config(), 0).await;
        let prompt = tokens(1, 2);
        let refused = router.route(request("a", &prompt)).await.expect_err("no ranks");
        assert_eq!(refused, RouteError::Rejected(Rejection::NoRanks));
        router.upsert_worker(WorkerId(0), WorkerConfig::at("")).await.expect("valid");
        let _placement = router.route(request("a", &prompt)).await.expect("placed");
        router.route(request("a", &prompt)).await.expect_err("the id is taken");
        router.route(RouteRequest { request_id: None, ..request("", &prompt) }).await.expect_err("no id");
        router.add_request(AddRequest::new("b", rank(7), Prompt::Tokens(&prompt))).await.expect_err("no such rank");
        assert_eq!(
            Recorded::by(&snapshotter).decisions(),
            [
                ("outcome=\"error\",reason=\"duplicate_request\"}", 1),
                ("outcome=\"error\",reason=\"missing_request_id\"}", 1),
                ("outcome=\"placed\",reason=\"chosen\"}", 1),
                ("outcome=\"rejected\",reason=\"no_ranks\"}", 1),
                ("outcome=\"rejected\",reason=\"unknown_rank\"}", 1),
            ]
        );
    });
}

#[test]
fn queue_metrics_count_waiting_rejected_and_left_requests() {
    record(async |snapshotter| {
        let config = config_with(|c| c.queue.threshold = Some(0.5));
        let worker = WorkerConfig { max_num_batched_tokens: Some(16), ..WorkerConfig::at("") };
        let router = Router::builder(config).worker(WorkerId(0), worker).start().await.expect("starts");
        let prompt = tokens(1, 10);
        let busy = router.route(request("busy", &prompt)).await.expect("placed");
        let refused = RouteRequest {
            options: RequestOptions { do_not_queue: true, ..RequestOptions::default() },
            ..request("refused", &prompt)
        };
        router.route(refused).await.expect_err("would have to wait");
        let (waiting_router, waiting_prompt) = (router.clone(), tokens(2, 10));
        let waiting = tokio::spawn(async move {
            drop(waiting_router.route(request("waiting", &waiting_prompt)).await);
        });
        a_period_passes().await;
        a_period_passes().await;

        let seen = Recorded::by(&snapshotter);
        let gauge = |name: &str| seen.gauge(&format!("pointsman_queue_{name}{{pool=\"default\",class=\"default\"}}"));
        assert_eq!(["requests", "raw_tokens", "cached_tokens"].map(gauge), [1.0, 40.0, 0.0]);
        assert!((1.0..=2.0).contains(&gauge("oldest_age_seconds")), "{}", gauge("oldest_age_seconds"));
        assert_eq!(seen.gauge("pointsman_gate_permits{pool=\"default\",gate=\"requests\"}"), 1.0);
        let by_limit = |limit: &str| {
            let labels = format!("{{pool=\"default\",class=\"default\",limit={limit:?}}}");
            seen.count(&format!("pointsman_queue_backpressure_total{labels}"))
        };
        assert_eq!(["requests", "raw_tokens", "cached_tokens", "do_not_queue"].map(by_limit), [0, 0, 0, 1]);
        assert_eq!(
            seen.decisions(),
            [("outcome=\"placed\",reason=\"chosen\"}", 1), ("outcome=\"rejected\",reason=\"backpressure\"}", 1)]
        );

        waiting.abort();
        assert!(waiting.await.expect_err("aborted").is_cancelled());
        a_period_passes().await;
        let seen = Recorded::by(&snapshotter);
        assert_eq!(seen.decisions(), [("outcome=\"error\",reason=\"cancelled\"}", 1)]);
        assert_eq!(seen.gauge("pointsman_queue_requests{pool=\"default\",class=\"default\"}"), 0.0);
        drop(busy);
    });
}

/// A shared cache that holds the first two blocks, fails, or hangs, depending on the prompt's length.
struct Moody;

impl SharedCache for Moody {
    fn query(&self, block_hashes: Arc<[BlockHash]>) -> BoxFuture<'_, Result<Vec<std::ops::Range<u32>>, String>> {
        Box::pin(async move {
            match block_hashes.len() {
                1 => Err("out of order".into()),
                2 => std::future::pending().await,
                _ => Ok(vec![0..1, 1..2]),
            }
        })
    }
}

#[test]
fn shared_cache_hits_and_failures_are_counted() {
    record(async |snapshotter| {
        let builder = Router::builder(config()).worker(WorkerId(0), WorkerConfig::at("")).shared_cache(Arc::new(Moody));
        let router = builder.start().await.expect("starts");
        for blocks in [1, 2, 4, 4] {
            drop(router.route(request("a", &tokens(1, blocks))).await.expect("placed despite the cache failure"));
        }
        let seen = Recorded::by(&snapshotter);
        let failed =
            |kind: &str| seen.count(&format!("pointsman_shared_cache_errors_total{{pool=\"default\",kind={kind:?}}}"));
        assert_eq!([failed("error"), failed("late")], [1, 1]);
        assert_eq!(seen.values("pointsman_shared_cache_hit_rate{pool=\"default\"}"), [0.5, 0.5]);
        let beyond = seen.values("pointsman_shared_cache_beyond_blocks{pool=\"default\"}");
        assert_eq!(beyond, [0.0, 0.0, 2.0, 2.0]);
    });
}

#[cfg(feature = "faults")]
#[test]
fn restarts_are_counted_by_role_and_cold_ranks_reported() {
    use pointsman::Fault;

    record(async |snapshotter| {
        let router = router(config(), 2).await;
        for fault in [Fault::Scheduler, Fault::Radix(rank(0)), Fault::Sequence(rank(1))] {
            let restarts = router.health().restarts;
            assert!(router.inject(fault));
            crate::common::until("restart", async || router.health().restarts > restarts).await;
        }
        a_period_passes().await;
        let seen = Recorded::by(&snapshotter);
        for role in ["scheduler", "radix", "sequence"] {
            assert_eq!(seen.count(&format!("pointsman_restarts_total{{pool=\"default\",role={role:?}}}")), 1, "{role}");
        }
        assert_eq!(seen.gauge("pointsman_cold_ranks{pool=\"default\"}"), 2.0);
    });
}

#[test]
fn forgone_overlap_and_rates_of_each_rank_are_counted() {
    record(async |snapshotter| {
        let router = router(config(), 2).await;
        let prompt = tokens(1, 20);
        router.apply_events(vec![stored(rank(1), &prompt[..60])]).await.expect("up");
        let constraints = Constraints { allowed_workers: Some([WorkerId(0)].into()), ..Constraints::default() };
        let options = RequestOptions { constraints, ..RequestOptions::default() };
        drop(router.route(RouteRequest { options, ..request("a", &prompt) }).await.expect("placed"));
        let chosen = router.route(request("b", &prompt)).await.expect("placed");
        assert_eq!(chosen.rank(), rank(1));
        chosen.delivered_cached_tokens(40);
        // Work on the rank with the match makes the other one cheaper.
        let load = (0..40).map(|n| (n.to_string(), tokens(100 + n, 2_000))).collect::<Vec<_>>();
        for (id, tokens) in &load {
            router.add_request(AddRequest::new(id, rank(1), Prompt::Tokens(tokens))).await.expect("booked");
        }
        let elsewhere = router.route(request("c", &prompt)).await.expect("placed");
        assert_eq!((elsewhere.rank(), elsewhere.forgone_blocks()), (rank(0), 15));
        a_period_passes().await;

        let seen = Recorded::by(&snapshotter);
        let count = |name: &str, labels: &str| seen.count(&format!("pointsman_{name}{{pool=\"default\"{labels}}}"));
        assert_eq!((count("overlap_forgone_total", ""), count("overlap_forgone_blocks_total", "")), (1, 15));
        let of = |worker: u64, name: &str, more: &str| count(name, &format!(",worker=\"{worker}\",rank=\"0\"{more}"));
        assert_eq!([0, 1].map(|worker| of(worker, "rank_placements_total", "")), [2, 1]);
        let side = |side: &str| of(1, "rank_prediction_tokens_total", &format!(",side={side:?}"));
        assert_eq!(["prompt", "predicted", "delivered"].map(side), [80, 60, 40]);
        let share = seen.gauge("pointsman_busiest_rank_ratio{pool=\"default\"}");
        assert!((share - 2.0 / 3.0).abs() < 1e-9, "{share}");
    });
}
