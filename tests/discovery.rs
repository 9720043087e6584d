//! Discovery in a running router: the set of running workers follows the sources through every fault.
//!
//! The tests wait for conditions, never for a time. If a period must elapse, the clock is paused.

use pointsman::internals::config::DiscoveryConfig;
use std::collections::BTreeMap;
use std::future::pending;
use std::time::Duration;

use pointsman::protocol::{WorkerConfig, WorkerId, WorkerMap};
use pointsman::{DiscoveryError, DiscoverySource, DiscoveryStatus, Router, RouterConfig, StaticList};
use tokio::sync::{mpsc, watch};

use crate::common::counters::Counters;
use crate::common::{config, config_with, suppress_fault_reports};

fn set(workers: &[(u64, &str)]) -> WorkerMap {
    workers.iter().map(|(id, endpoint)| (WorkerId(*id), WorkerConfig::at(*endpoint))).collect()
}

/// Registered workers and their endpoints.
fn running(router: &Router) -> BTreeMap<u64, String> {
    router.workers().iter().map(|entry| (entry.worker.0, entry.config.endpoint.clone())).collect()
}

/// Waits until exactly these workers are registered.
async fn runs(router: &Router, workers: &[(u64, &str)]) {
    let wanted: BTreeMap<u64, String> = workers.iter().map(|(id, at)| (*id, (*at).to_owned())).collect();
    until(router, |_| running(router) == wanted).await;
}

/// Waits until the source states satisfy a condition.
async fn until(router: &Router, so: impl Fn(&[DiscoveryStatus]) -> bool) {
    crate::common::until("discovery state", async || {
        assert_eq!(router.health().state, Ok(()), "the router is up");
        so(&router.discovery())
    })
    .await;
}

/// A source that returns the results sent by the test.
struct Told(mpsc::UnboundedReceiver<Say>);

enum Say {
    Set(WorkerMap),
    Trouble(&'static str),
    Panic,
}

impl DiscoverySource for Told {
    fn name(&self) -> String {
        "told".to_owned()
    }

    async fn next(&mut self) -> Option<Result<WorkerMap, DiscoveryError>> {
        match self.0.recv().await? {
            Say::Set(workers) => Some(Ok(workers)),
            Say::Trouble(what) => Some(Err(DiscoveryError::Other(what.to_owned()))),
            Say::Panic => std::panic::panic_any("an injected fault"),
        }
    }
}

fn told() -> (mpsc::UnboundedSender<Say>, Told) {
    let (say, said) = mpsc::unbounded_channel();
    (say, Told(said))
}

async fn start(config: RouterConfig, source: impl DiscoverySource) -> Router {
    Router::builder(config).discovery(source).start().await.expect("start succeeds")
}

#[tokio::test(start_paused = true)]
async fn missed_changes_are_applied_at_the_next_pass() {
    let (source, seen) = watch::channel(set(&[(1, "a")]));
    let router = start(
        config_with(|c| {
            c.min_initial_workers = 1;
            c.discovery = DiscoveryConfig { interval_ms: 7_000, ..DiscoveryConfig::default() };
        }),
        seen,
    )
    .await;
    let mut workers = running(&router);
    for round in 2..5_u64 {
        assert!(router.miss_next_discovery());
        source.send_replace(set(&[(round, "a")]));
        until(&router, |statuses| statuses[0].workers == 1 && running(&router) == workers).await;
        let before = tokio::time::Instant::now();
        // No task is ready, so the paused clock advances to the next pass.
        crate::common::until("next pass", async || {
            tokio::time::sleep(Duration::from_millis(1)).await;
            running(&router) != workers
        })
        .await;
        assert!(before.elapsed() <= Duration::from_millis(7_001), "{:?}", before.elapsed());
        workers = running(&router);
        assert_eq!(workers.keys().copied().collect::<Vec<_>>(), [round]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_panicking_source_is_retried() {
    suppress_fault_reports();
    let (say, source) = told();
    let router = start(config(), source).await;
    for worker in 1..4 {
        say.send(Say::Panic).expect("followed");
        until_slowly(&router, |statuses| statuses[0].last_error.as_deref() == Some("the source panicked")).await;
        say.send(Say::Set(set(&[(worker, "a")]))).expect("followed");
        until_slowly(&router, |_| running(&router).contains_key(&worker)).await;
    }
    assert_eq!(router.health().restarts, 0, "no actor dies");
}

/// Like [`until`], and lets a paused clock advance.
async fn until_slowly(router: &Router, so: impl Fn(&[DiscoveryStatus]) -> bool) {
    crate::common::until("discovery state", async || {
        tokio::time::sleep(Duration::from_millis(1)).await;
        so(&router.discovery())
    })
    .await;
}

#[tokio::test]
async fn worker_lists_close_after_they_are_applied() {
    let list = StaticList::new([(Some(WorkerId(7)), WorkerConfig::at("a")), (None, WorkerConfig::at("b"))]);
    let config = config_with(|c| c.min_initial_workers = 2);
    let router = start(config, list.expect("ids differ")).await;
    assert_eq!(running(&router).into_keys().collect::<Vec<_>>(), [7, WorkerId::derived("b").0]);
    until(&router, |statuses| statuses[0].closed).await;
}

#[tokio::test]
async fn errors_and_conflicts_are_counted() {
    let counters = Counters::default();
    let _guard = counters.record();
    let ((say, first), (say_too, second)) = (told(), told());
    let builder = Router::builder(config()).discovery(first).discovery(second);
    let router = builder.start().await.expect("start succeeds");
    say.send(Say::Set(set(&[(1, "a"), (2, "a")]))).expect("followed");
    runs(&router, &[(1, "a"), (2, "a")]).await;
    for _ in 0..2 {
        say_too.send(Say::Trouble("again")).expect("followed");
    }
    say_too.send(Say::Set(set(&[(2, "b"), (3, "b")]))).expect("followed");
    runs(&router, &[(1, "a"), (2, "a"), (3, "b")]).await;
    let counts = ["conflicts", "errors"].map(|of| counters.get(&format!("pointsman_discovery_{of}_total"), &[]));
    assert_eq!(counts, [1, 2]);
}

/// A pending source does not keep a dropped router alive.
#[tokio::test]
async fn sources_end_with_the_router() {
    struct Silent(#[allow(dead_code, reason = "held until the source is dropped")] mpsc::Sender<()>);
    impl DiscoverySource for Silent {
        fn name(&self) -> String {
            "silent".to_owned()
        }
        async fn next(&mut self) -> Option<Result<WorkerMap, DiscoveryError>> {
            pending().await
        }
    }
    let (held, mut gone) = mpsc::channel(1);
    let router = start(config(), Silent(held)).await;
    drop(router);
    assert_eq!(gone.recv().await, None, "the source has been dropped");
}

#[cfg(feature = "discovery")]
mod found {
    use std::path::{Path, PathBuf};

    use pointsman::protocol::LoadSource;
    use pointsman::{DnsNames, ProbeOptions, ProbedUrls, WatchedFile};
    use tokio::net::TcpListener;

    use crate::common::BLOCK_SIZE;
    use crate::common::pages::Pages;

    use super::*;

    const SOON: Duration = Duration::from_millis(5);
    const AN_HOUR: Duration = Duration::from_secs(3600);

    /// A directory of one test, removed after it.
    struct Directory(PathBuf);

    impl Directory {
        fn new(test: &str) -> Self {
            let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("discovery-{test}-{}", std::process::id()));
            std::fs::create_dir_all(&path).expect("a directory");
            Self(path)
        }

        /// Replaces a file atomically.
        fn replace(&self, name: &str, content: &str) -> PathBuf {
            let (new, path) = (self.0.join("new"), self.0.join(name));
            std::fs::write(&new, content).expect("written");
            std::fs::rename(&new, &path).expect("renamed");
            path
        }
    }

    impl Drop for Directory {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    /// A mock engine.
    struct Engine(Pages);

    impl Engine {
        fn vllm(blocks: u32, block_size: u32) -> Self {
            let engine = Self(Pages::default());
            engine.0.set("/v1/models", r#"{ "object": "list", "data": [{ "id": "mock", "parent": null }] }"#);
            let of_rank = |rank| {
                let labels = format!("block_size=\"{block_size}\",engine=\"{rank}\",num_gpu_blocks=\"{blocks}\"");
                format!("vllm:cache_config_info{{{labels}}} 1.0\n")
            };
            engine.0.set("/metrics", [of_rank(0), of_rank(1)].concat());
            engine
        }

        fn sglang(model: &str) -> Self {
            let engine = Self(Pages::default());
            let kv_events = format!(
                r#"{{ "publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "topic": "",
                    "block_size": {BLOCK_SIZE}, "dp_size": 1 }}"#
            );
            let info = format!(
                r#"{{ "served_model_name": "{model}", "dp_size": 1, "max_total_num_tokens": 400, "kv_events": {kv_events} }}"#
            );
            engine.0.set("/get_server_info", info);
            engine
        }
    }

    fn options() -> ProbeOptions {
        ProbeOptions { interval: SOON, timeout: AN_HOUR, ..ProbeOptions::of(&config()).model("mock") }
    }

    fn config_of(router: &Router, url: &str) -> Option<WorkerConfig> {
        let workers = router.workers();
        workers.iter().find(|entry| entry.worker == WorkerId::derived(url)).map(|entry| entry.config.clone())
    }

    #[tokio::test]
    async fn a_failing_engine_does_not_affect_others() {
        let (good, other) = (Engine::vllm(100, BLOCK_SIZE), Engine::vllm(100, BLOCK_SIZE));
        let (good_url, other_url) = (good.0.serve().await, other.0.serve().await);
        let misfit = Engine::sglang("other").0.serve().await;
        let nobody = TcpListener::bind("127.0.0.1:0").await.expect("a port").local_addr().expect("bound");
        let urls = [good_url.clone(), other_url.clone(), misfit.clone(), format!("http://{nobody}")];
        let router = start(config(), ProbedUrls::new(urls, options()).expect("addresses")).await;
        until(&router, |statuses| statuses[0].workers == 2 && statuses[0].last_error.is_some()).await;
        let error = router.discovery()[0].last_error.clone().expect("two invalid workers");
        let mismatch = format!("{misfit}: it serves {{\"other\"}}, must serve \"mock\"");
        assert!(error.contains(&mismatch) && error.contains("cannot connect"), "{error}");

        // After an invalid response the last valid one stays in force, and the other engine is still polled.
        good.0.set("/metrics", "<html>");
        until(&router, |statuses| statuses[0].last_error.as_ref().is_some_and(|e| e.contains("/metrics"))).await;
        let grown = Engine::vllm(200, BLOCK_SIZE).0.get("/metrics").expect("a page");
        other.0.set("/metrics", grown);
        until(&router, |_| config_of(&router, &other_url).is_some_and(|c| c.total_kv_blocks == Some(200))).await;
        assert_eq!(config_of(&router, &good_url).and_then(|config| config.total_kv_blocks), Some(100));

        // The engine now serves another model.
        good.0.set("/metrics", Engine::vllm(1, BLOCK_SIZE).0.get("/metrics").expect("a page"));
        good.0.set("/v1/models", r#"{ "data": [{ "id": "other" }] }"#);
        until(&router, |_| config_of(&router, &good_url).is_none()).await;
        assert!(config_of(&router, &other_url).is_some());
    }

    #[tokio::test]
    async fn files_are_followed_and_invalid_ones_rejected() {
        let directory = Directory::new("file");
        let path = directory.0.join("workers.toml");
        let source = WatchedFile::new(&path, options()).expect("a name").every(SOON);
        let router = start(config(), source).await;
        let shows = async |what: &str| {
            until(&router, |statuses| statuses[0].last_error.as_ref().is_some_and(|error| error.contains(what))).await;
        };
        shows("cannot be read").await;
        directory.replace("workers.toml", "[[workers]]\nid = 1\nurl = \"http://a\"\n");
        runs(&router, &[(1, "http://a")]).await;
        for (broken, says) in [
            ("[[workers]]\nid = 1\nurl = \"http://b\"\ntotal_kv_block = 3\n", "line 4: unknown field `total_kv_block`"),
            ("[[workers]]\nid = 1\nurl = \"ftp://b\"\n", "its scheme is \"ftp\", must be http or https"),
            ("[[workers]]\nid = 1\nurl = \"http://", "line 3: "),
            ("", "missing field `workers`"),
        ] {
            directory.replace("workers.toml", broken);
            shows(says).await;
            assert!(router.discovery()[0].last_error.as_ref().is_some_and(|e| e.contains("workers.toml: ")));
            runs(&router, &[(1, "http://a")]).await;
        }
        directory.replace("workers.toml", "[[workers]]\nid = 2\nurl = \"http://b\"\n");
        runs(&router, &[(2, "http://b")]).await;
        until(&router, |statuses| statuses[0].last_error.is_none()).await;
        std::fs::remove_file(&path).expect("was registered");
        shows("cannot be read").await;
        runs(&router, &[(2, "http://b")]).await;
    }

    #[tokio::test]
    async fn workers_of_a_file_may_be_probed() {
        let (directory, engine) = (Directory::new("probe"), Engine::vllm(100, BLOCK_SIZE));
        let url = engine.0.serve().await;
        let entry =
            format!(r#"{{ "id": 5, "url": "{url}", "probe": true, "kv_events": {{ "endpoint": "tcp://*:9" }} }}"#);
        let path = directory
            .replace("workers.json", &format!(r#"{{ "workers": [{entry}, {{ "id": 6, "url": "http://plain" }}] }}"#));
        let source = WatchedFile::new(path, options()).expect("a name").every(SOON);
        let router = start(config_with(|c| c.min_initial_workers = 2), source).await;
        let config = router.workers()[0].config.clone();
        assert_eq!((config.data_parallel_size, config.total_kv_blocks), (2, Some(100)));
        assert_eq!(config.kv_events.map(|kv_events| kv_events.endpoint).as_deref(), Some("tcp://127.0.0.1:9"));
        assert_eq!(router.workers()[1].config, WorkerConfig::at("http://plain"));
    }

    #[tokio::test]
    async fn every_address_of_a_name_is_a_worker() {
        let given = WorkerConfig { load: Some(LoadSource::Socket("tcp://*:9".to_owned())), ..WorkerConfig::at("") };
        let source = DnsNames::new(["127.0.0.1:8000", "https://[::1]:8000"]).expect("names").given(&given).every(SOON);
        assert_eq!(DiscoverySource::name(&source), "dns:127.0.0.1:8000,https://[::1]:8000");
        let router = start(config_with(|c| c.min_initial_workers = 2), source).await;
        let four = config_of(&router, "http://127.0.0.1:8000").expect("there");
        assert_eq!(four.load, Some(LoadSource::Socket("tcp://127.0.0.1:9".to_owned())));
        let six = config_of(&router, "https://[::1]:8000").expect("there");
        assert_eq!(six.load, Some(LoadSource::Socket("tcp://[::1]:9".to_owned())));
    }

    #[tokio::test]
    async fn unresolvable_names_are_reported_and_affect_no_other() {
        let too_long = format!("{}:8000", "a".repeat(64));
        let source = DnsNames::new([too_long.as_str(), "127.0.0.1:8000"]).expect("names").every(SOON);
        let router = start(config(), source).await;
        until(&router, |statuses| statuses[0].last_error.is_some()).await;
        let error = router.discovery()[0].last_error.clone().expect("just seen");
        assert!(error.starts_with(&format!("{too_long} cannot be resolved: ")), "{error}");
        runs(&router, &[(WorkerId::derived("http://127.0.0.1:8000").0, "http://127.0.0.1:8000")]).await;
    }
}
