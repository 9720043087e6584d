//! One file of workers for both pools, with a role for each worker.

use std::path::PathBuf;

use pointsman::RouterConfig;
use pointsman::internals::config::HealthConfig;
use pointsman_gateway::app::Gateway;
use pointsman_gateway::formats::handover::Protocol;
use pointsman_gateway::settings::{DisaggregationSettings, ModelSettings};
use pointsman_trial::mock::{EngineRole, MockConfig, MockEngine};
use serde_json::{Value as Json, json};

use super::pools::{BLOCK_SIZE, body, of_engine, worker};
use super::prompt;
use crate::common::directory::Directory;
use crate::common::proxy::{self, post, until};

/// Engines of these roles, and the directory of their file.
struct Fleet {
    engines: Vec<MockEngine>,
    directory: Directory,
}

impl Fleet {
    async fn start(roles: &[EngineRole]) -> Self {
        let mut engines = Vec::new();
        for role in roles {
            let config = MockConfig {
                handover: Some(of_engine(Protocol::VllmNixl)),
                role: *role,
                block_size: BLOCK_SIZE,
                time_scale: 0.0,
                ..MockConfig::default()
            };
            engines.push(MockEngine::start(config).await.expect("the engine starts"));
        }
        Self { engines, directory: Directory::new() }
    }

    fn file(&self) -> PathBuf {
        self.directory.path().join("workers.json")
    }

    /// Writes the file with these roles of the engines.
    fn write(&self, roles: &[&str]) {
        let worker = |(engine, role): (&MockEngine, &&str)| {
            let config = worker(engine, 0, Protocol::VllmNixl).config;
            let mut worker = serde_json::to_value(config).expect("JSON");
            worker["role"] = Json::from(*role);
            let fields = worker.as_object_mut().expect("an object");
            let url = fields.remove("endpoint").expect("an address");
            fields.insert("url".to_owned(), url);
            worker
        };
        let workers: Vec<Json> = self.engines.iter().zip(roles).map(worker).collect();
        let new = self.directory.write("new.json", json!({ "workers": workers }).to_string());
        std::fs::rename(new, self.file()).expect("renamed");
    }

    /// A gateway whose pools read the file, and the numbers of their workers.
    async fn gateway(&self, pool: &str, workers: [usize; 2]) -> Gateway {
        let mut settings = proxy::settings(Vec::new());
        let router = RouterConfig {
            block_size: Some(BLOCK_SIZE),
            health: HealthConfig { probe_interval_ms: 0, outcome_failures_max: 0, ..HealthConfig::default() },
            ..RouterConfig::default()
        };
        let tokens = settings.models[0].tokens.clone();
        settings.models = [("mock", pool.to_owned()), ("mock-prefill", format!("{pool}-prefill"))]
            .map(|(name, pool)| ModelSettings {
                workers_file: Some(self.file()),
                router: RouterConfig { pool, ..router.clone() },
                tokens: tokens.clone(),
                ..ModelSettings::named(name)
            })
            .into();
        settings.models[0].disaggregation =
            Some(DisaggregationSettings { prefill: "mock-prefill".to_owned(), ..DisaggregationSettings::default() });
        let gateway = Gateway::start(settings).await.expect("start succeeds");
        self.have(&gateway, workers).await;
        gateway
    }

    async fn have(&self, gateway: &Gateway, workers: [usize; 2]) {
        let count = |model| gateway.router(model).expect("the model is served").workers().len();
        until("the workers are registered", || ["mock", "mock-prefill"].map(count) == workers).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_file_has_the_workers_of_both_pools() {
    let fleet = Fleet::start(&[EngineRole::Prefill, EngineRole::Both, EngineRole::Decode]).await;
    fleet.write(&["prefill", "prefill", "decode"]);
    let gateway = fleet.gateway("roles", [1, 2]).await;
    for seed in 0..4 {
        let answer = post(&gateway, "/v1/completions", &body(&prompt(700 + seed, 4), 3, true)).await;
        assert_eq!((answer.status, answer.header("x-pointsman-prefill")), (200, Some("remote")), "{}", answer.text());
    }
    let legs = |n: usize| (fleet.engines[n].handover().legs_prefill, fleet.engines[n].handover().legs_decode);
    assert_eq!((legs(0).0 + legs(1).0, legs(1).1, legs(2)), (4, 0, (0, 4)));
    // The file changes the role of an engine.
    fleet.write(&["prefill", "decode", "decode"]);
    fleet.have(&gateway, [2, 1]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_of_both_pools_never_transfers_to_itself() {
    let fleet = Fleet::start(&[EngineRole::Both, EngineRole::Both]).await;
    fleet.write(&["both", "both"]);
    let gateway = fleet.gateway("both", [2, 2]).await;
    for seed in 0..6 {
        let answer = post(&gateway, "/v1/completions", &body(&prompt(710 + seed, 4), 3, false)).await;
        assert_eq!((answer.status, answer.header("x-pointsman-prefill")), (200, Some("remote")), "{}", answer.text());
        let legs = [0, 1].map(|n| {
            let counters = fleet.engines[n].handover();
            (counters.legs_prefill, counters.legs_decode)
        });
        let crossed = [(legs[0].0, legs[1].1), (legs[1].0, legs[0].1)];
        assert!(crossed.iter().all(|(prefill, decode)| prefill == decode), "{legs:?}");
    }
    // The only worker computes its prompts itself.
    fleet.write(&["both"]);
    fleet.have(&gateway, [1, 1]).await;
    let answer = post(&gateway, "/v1/completions", &body(&prompt(720, 4), 3, false)).await;
    assert_eq!((answer.status, answer.header("x-pointsman-prefill")), (200, Some("fallback")), "{}", answer.text());
}
