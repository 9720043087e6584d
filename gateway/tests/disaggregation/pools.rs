//! A gateway over prefill and decode engines, and one engine that serves alone for comparison.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use pointsman::internals::config::HealthConfig;
use pointsman::protocol::{WorkerConfig, WorkerId};
use pointsman::{NamedWorker, Prompt, RouteRequest, RouterConfig};
use pointsman_gateway::app::Gateway;
use pointsman_gateway::formats::handover::Protocol;
use pointsman_gateway::settings::{DisaggregationSettings, ModelSettings, Settings};
use pointsman_trial::mock::{EngineRole, HandoverCounters, HandoverProtocol, MockConfig, MockEngine};
use serde_json::{Value as Json, json};

use crate::common::proxy::{self, Answer, Scripted, post, until};

pub(super) const BLOCK_SIZE: u32 = 16;

static NEXT_POOL: AtomicU64 = AtomicU64::new(0);

/// The protocol as the mock engine names it.
pub(super) fn of_engine(protocol: Protocol) -> HandoverProtocol {
    match protocol {
        Protocol::VllmNixl => HandoverProtocol::VllmNixl,
        Protocol::VllmMooncake => HandoverProtocol::VllmMooncake,
        Protocol::VllmP2pNccl => HandoverProtocol::VllmP2pNccl,
        Protocol::Sglang => HandoverProtocol::Sglang,
        Protocol::TensorrtLlm => HandoverProtocol::TensorrtLlm,
    }
}

/// Prefill and decode engines behind a gateway that serves the model `mock`.
pub(super) struct Pools {
    pub(super) gateway: Gateway,
    pub(super) prefills: Vec<MockEngine>,
    pub(super) decodes: Vec<MockEngine>,
    pool: String,
}

/// Number of engines of each role, and of their data-parallel ranks.
#[derive(Clone, Copy)]
pub(super) struct Size {
    pub(super) prefills: u64,
    pub(super) decodes: u64,
    pub(super) ranks: u16,
}

impl Pools {
    pub(super) async fn start(protocol: Protocol, size: Size, change: impl FnOnce(&mut Settings)) -> Self {
        Self::start_with(protocol, size, |_| {}, change).await
    }

    /// `configure` changes the configuration of each engine.
    pub(super) async fn start_with(
        protocol: Protocol,
        size: Size,
        configure: impl Fn(&mut MockConfig),
        change: impl FnOnce(&mut Settings),
    ) -> Self {
        let start = async |role, n: u64| {
            let mut config = MockConfig {
                handover: Some(of_engine(protocol)),
                role,
                data_parallel_size: size.ranks,
                block_size: BLOCK_SIZE,
                time_scale: 0.0,
                seed: 0,
                ..MockConfig::default()
            };
            configure(&mut config);
            let engine = MockEngine::start(config).await.expect("the engine starts");
            (worker(&engine, n, protocol), engine)
        };
        let (mut prefills, mut decodes) = ((Vec::new(), Vec::new()), (Vec::new(), Vec::new()));
        for n in 0..size.prefills {
            let (worker, engine) = start(EngineRole::Prefill, n).await;
            prefills.0.push(worker);
            prefills.1.push(engine);
        }
        for n in 0..size.decodes {
            let (worker, engine) = start(EngineRole::Decode, n).await;
            decodes.0.push(worker);
            decodes.1.push(engine);
        }
        let mut settings = proxy::settings(decodes.0);
        let router = RouterConfig {
            block_size: Some(BLOCK_SIZE),
            health: HealthConfig { probe_interval_ms: 0, outcome_failures_max: 0, ..HealthConfig::default() },
            ..RouterConfig::default()
        };
        let model = &mut settings.models[0];
        // Series of the metrics page are those of the process.
        let pool = format!("decode-{}", NEXT_POOL.fetch_add(1, Ordering::Relaxed));
        model.router = RouterConfig { pool: pool.clone(), ..router.clone() };
        model.disaggregation = Some(DisaggregationSettings {
            prefill: "mock-prefill".to_owned(),
            protocol,
            skip: false,
            ..DisaggregationSettings::default()
        });
        let tokens = model.tokens.clone();
        let router = RouterConfig { pool: format!("{pool}-prefill"), ..router };
        let workers = prefills.0;
        settings.models.push(ModelSettings { workers, router, tokens, ..ModelSettings::named("mock-prefill") });
        change(&mut settings);
        let gateway = proxy::gateway(settings).await;
        Self { gateway, prefills: prefills.1, decodes: decodes.1, pool }
    }

    /// Sum of a counter over engines.
    pub(super) fn sum(engines: &[MockEngine], counter: impl Fn(&HandoverCounters) -> u64) -> u64 {
        engines.iter().map(|engine| counter(&engine.handover())).sum()
    }

    /// Waits until no request runs, nothing is booked and every held block is claimed.
    pub(super) async fn at_rest(&self) {
        for model in ["mock", "mock-prefill"] {
            let router = self.gateway.router(model).expect("the model exists");
            until("all bookings have ended", || router.health().leases == 0).await;
        }
        let engines = || self.prefills.iter().chain(&self.decodes);
        until("no leg runs", || engines().all(|engine| engine.handover().running_now == 0)).await;
    }

    /// Waits until some rank of the model has this many leading blocks of a prompt by the index.
    pub(super) async fn until_indexed(&self, model: &str, prompt: &[u32], blocks: u32) {
        let router = self.gateway.router(model).expect("the model exists");
        proxy::eventually(&format!("{blocks} blocks in the index of {model}"), async || {
            let scores = router.overlap_scores(RouteRequest::query(Prompt::Tokens(prompt)), false).await;
            scores.expect("the router responds").ranks.iter().any(|rank| rank.device_blocks >= blocks)
        })
        .await;
    }

    /// A completion of `tokens`, streamed or not.
    pub(super) async fn complete(&self, tokens: &[u32], output: u32, is_stream: bool) -> Answer {
        post(&self.gateway, "/v1/completions", &body(tokens, output, is_stream)).await
    }

    /// Requests of this result by the counter on the metrics page.
    pub(super) async fn prefills(&self, result: &str) -> u64 {
        let labels = [format!("model=\"{}\"", self.pool), format!("result=\"{result}\"")];
        let page = proxy::get(&self.gateway, "/metrics").await;
        page.metric("pointsman_gateway_prefills_total", &labels.each_ref().map(String::as_str)) as u64
    }
}

/// A gateway in front of one scripted engine of each role, with so many ranks. `disaggregation` has all settings except
/// the model.
pub(super) async fn scripted(
    prefill: &Scripted,
    decode: &Scripted,
    ranks: u32,
    disaggregation: DisaggregationSettings,
) -> Gateway {
    let mut settings = proxy::settings(vec![proxy::worker(1, &decode.url(), ranks)]);
    let pool = NEXT_POOL.fetch_add(1, Ordering::Relaxed);
    let mut second = settings.models[0].clone();
    second.name = "prefill".to_owned();
    second.router.pool = format!("scripted-prefill-{pool}");
    second.workers = vec![proxy::worker(2, &prefill.url(), ranks)];
    settings.models.push(second);
    settings.models[0].router.pool = format!("scripted-decode-{pool}");
    settings.models[0].disaggregation =
        Some(DisaggregationSettings { prefill: "prefill".to_owned(), ..disaggregation });
    proxy::gateway(settings).await
}

pub(super) fn body(tokens: &[u32], output: u32, is_stream: bool) -> Json {
    let mut body = json!({ "model": "mock", "prompt": tokens, "max_tokens": output, "stream": is_stream });
    if is_stream {
        body["stream_options"] = json!({ "include_usage": true });
    }
    body
}

pub(super) fn worker(engine: &MockEngine, n: u64, protocol: Protocol) -> NamedWorker {
    let transfer_port = match protocol {
        Protocol::VllmP2pNccl => Some(engine.address().port()),
        _ => engine.config().bootstrap_port,
    };
    let config = WorkerConfig {
        data_parallel_size: engine.config().data_parallel_size.into(),
        transfer_port,
        ..proxy::published(engine)
    };
    NamedWorker { id: Some(WorkerId(n)), config, probe: false }
}

/// Text and cached tokens of a completion.
pub(super) fn completion(answer: &Answer) -> (String, Option<u64>) {
    assert_eq!(answer.status, 200, "{}", answer.text());
    let cached = |usage: &Json| usage["prompt_tokens_details"]["cached_tokens"].as_u64();
    if answer.header("content-type").is_some_and(|kind| kind.starts_with("application/json")) {
        let answer = answer.json();
        return (answer["choices"][0]["text"].as_str().expect("text").to_owned(), cached(&answer["usage"]));
    }
    let (mut text, mut tokens) = (String::new(), None);
    for line in answer.text().lines().filter_map(|line| line.strip_prefix("data: ")).filter(|line| *line != "[DONE]") {
        let event: Json = serde_json::from_str(line).expect("an event");
        text.push_str(event["choices"][0]["text"].as_str().unwrap_or_default());
        tokens = cached(&event["usage"]).or(tokens);
    }
    (text, tokens)
}

/// Texts of one engine that serves every request alone, by number of output tokens.
pub(super) async fn alone(prompts: &[Vec<u32>], output: u32) -> BTreeMap<usize, String> {
    let config = MockConfig { block_size: BLOCK_SIZE, time_scale: 0.0, seed: 0, ..MockConfig::default() };
    let engine = MockEngine::start(config).await.expect("the engine starts");
    let mut texts = BTreeMap::new();
    for (n, prompt) in prompts.iter().enumerate() {
        let body = body(prompt, output, false).to_string();
        let answer = proxy::request(engine.address(), "POST", "/v1/completions", "", body.as_bytes()).await;
        texts.insert(n, completion(&answer).0);
    }
    texts
}
