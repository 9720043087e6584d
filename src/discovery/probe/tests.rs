use proptest::prelude::*;

use super::*;
use crate::protocol::Engine;

/// Response of a recent SGLang version, shortened.
const SERVER_INFO: &str = r#"{
    "model_path": "/models/qwen", "served_model_name": "qwen", "page_size": 16, "dp_size": 2, "tp_size": 2,
    "chunked_prefill_size": 8192, "max_prefill_tokens": 16384, "max_running_requests": null, "enable_metrics": true,
    "speculative_algorithm": null, "disaggregation_mode": "null", "max_total_num_tokens": 65536,
    "internal_states": [{ "last_gen_throughput": 0.0 }, { "last_gen_throughput": 0.0 }], "version": "0.5.23",
    "kv_events": {
        "publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "topic": "kv-events", "block_size": 16,
        "dp_size": 2, "load_endpoint_port_base": 5559, "load_topic": "load", "replay_endpoint_port_base": 5657
    }
}"#;

const MODELS: &str = r#"{ "object": "list", "data": [
    { "id": "qwen", "object": "model", "created": 1, "owned_by": "vllm", "root": "/models/qwen", "parent": null,
      "max_model_len": 32768 },
    { "id": "sql", "object": "model", "created": 1, "owned_by": "vllm", "root": "/loras/sql", "parent": "qwen" }
] }"#;

const METRICS: &str = r#"# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="qwen"} 0.0
vllm:num_requests_running{engine="1",model_name="qwen"} 0.0
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="auto",enable_prefix_caching="True",engine="0",num_cpu_blocks="None",num_gpu_blocks="4096",num_gpu_blocks_override="None"} 1.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",enable_prefix_caching="True",engine="1",num_cpu_blocks="None",num_gpu_blocks="4000",num_gpu_blocks_override="None"} 1.0
python_gc_objects_collected_total{generation="0"} 7.0
"#;

fn url() -> HttpUrl {
    HttpUrl::parse("http://10.0.0.7:8000").expect("an address")
}

fn expected() -> Expected {
    Expected { model: Some("qwen".to_owned()), block_size: Some(16) }
}

/// Facts of an engine with these pages and no others.
fn pages(pages: &[(EnginePage, &str)]) -> EngineFacts {
    let mut facts = EngineFacts::default();
    for page in EnginePage::ALL {
        let body = pages.iter().find(|(given, _)| *given == page).map(|(_, body)| body.as_bytes().to_vec());
        let _ = facts.record(&url(), page, body.map_or_else(missing, PageAnswer::Body));
    }
    facts
}

fn missing() -> PageAnswer {
    PageAnswer::Missing("response status is 404, must be 200".to_owned())
}

fn failed(reason: &str) -> PageAnswer {
    PageAnswer::Failed(reason.to_owned())
}

fn vllm(models: &str, metrics: &str) -> Result<Described, ProbeError> {
    pages(&[(EnginePage::Models, models), (EnginePage::Metrics, metrics)]).describe(&url())
}

fn sglang(server_info: &str) -> Described {
    pages(&[(EnginePage::ServerInfo, server_info)]).describe(&url()).expect("a usable page")
}

fn complete(described: Described, expected: &Expected) -> Result<WorkerConfig, ProbeError> {
    described.complete(&WorkerConfig::at("http://10.0.0.7:8000"), &url(), expected)
}

#[test]
fn one_sglang_response_contains_the_configuration() {
    let kv_events = KvEventsConfig {
        endpoint: "tcp://10.0.0.7:5557".to_owned(),
        replay_endpoint: Some("tcp://10.0.0.7:5657".to_owned()),
        topic: "kv-events".to_owned(),
    };
    let config = WorkerConfig {
        data_parallel_size: 2,
        max_num_batched_tokens: Some(8192),
        total_kv_blocks: Some(4096),
        block_size: Some(16),
        kv_events: Some(kv_events),
        load: Some(LoadSource::Socket("tcp://10.0.0.7:5559".to_owned())),
        engine: Some(Engine::Sglang),
        ..WorkerConfig::at("http://10.0.0.7:8000")
    };
    assert_eq!(complete(sglang(SERVER_INFO), &expected()), Ok(config));
}

#[test]
fn sglang_without_events_may_have_any_block_size() {
    let info = r#"{ "model_path": "qwen", "page_size": 1, "max_total_num_tokens": 65536, "chunked_prefill_size": -1,
        "enable_metrics": true, "kv_events": null }"#;
    let config = complete(sglang(info), &expected()).expect("compatible with the pool");
    assert_eq!((config.total_kv_blocks, config.max_num_batched_tokens), (Some(4096), None));
    assert_eq!((config.kv_events, config.data_parallel_size), (None, 1));
    assert_eq!(config.load, Some(LoadSource::Metrics("http://10.0.0.7:8000/metrics".to_owned())));
}

#[test]
fn named_hosts_are_unchanged() {
    let info = SERVER_INFO.replace("\"*\"", "\"fd00::7\"");
    let config = complete(sglang(&info), &expected()).expect("compatible with the pool");
    assert_eq!(config.kv_events.expect("events are published").endpoint, "tcp://[fd00::7]:5557");
}

#[test]
fn sglang_engines_report_their_role_and_bootstrap_port() {
    let role = |mode: &str| {
        let fields = format!("\"disaggregation_mode\": \"{mode}\", \"disaggregation_bootstrap_port\": 8998");
        let info = SERVER_INFO.replace("\"disaggregation_mode\": \"null\"", &fields);
        complete(sglang(&info), &expected()).expect("compatible with the pool")
    };
    let facts = ["prefill", "decode", "null"].map(role).map(|config| (config.role, config.transfer_port));
    let expected = [(Some(WorkerRole::Prefill), Some(8998)), (Some(WorkerRole::Decode), None), (None, None)];
    assert_eq!(facts, expected);
}

#[test]
fn sglang_reports_the_maximum_sequence_length() {
    let of = |info: &str| complete(sglang(info), &expected()).expect("compatible with the pool").max_model_len;
    assert_eq!(of(&SERVER_INFO.replacen('{', "{ \"context_length\": 8192,", 1)), Some(8_192));
    assert_eq!(of(&SERVER_INFO.replacen('{', "{ \"context_length\": null,", 1)), None);
}

#[test]
fn vllm_reports_the_configuration_in_labels() {
    let config = WorkerConfig {
        data_parallel_size: 2,
        total_kv_blocks: Some(4000),
        block_size: Some(16),
        max_model_len: Some(32_768),
        lora_adapters: ["sql".to_owned()].into(),
        load: Some(LoadSource::Metrics("http://10.0.0.7:8000/metrics".to_owned())),
        engine: Some(Engine::Vllm),
        ..WorkerConfig::at("http://10.0.0.7:8000")
    };
    assert_eq!(complete(vllm(MODELS, METRICS).expect("valid response"), &expected()), Ok(config));
}

#[test]
fn an_engine_with_one_label_is_that_rank() {
    let metrics = METRICS.lines().filter(|line| !line.contains("engine=\"0\"")).collect::<Vec<_>>().join("\n");
    let described = vllm(MODELS, &metrics.replace("engine=\"1\"", "engine=\"3\"")).expect("valid response");
    assert_eq!((described.data_parallel_start_rank, described.data_parallel_size), (3, 1));
    let old = METRICS.replace("engine=\"0\",", "").replace("engine=\"1\",", "").replace("4096", "None");
    let described = vllm(MODELS, &old).expect("valid response");
    assert_eq!((described.data_parallel_start_rank, described.data_parallel_size), (0, 1));
    assert_eq!(described.cache_tokens, Some(64_000));
}

#[test]
fn given_settings_combine_with_probed_ones() {
    let kv_events =
        KvEventsConfig { endpoint: "tcp://*:6000".to_owned(), replay_endpoint: None, topic: "t".to_owned() };
    let given = WorkerConfig {
        total_kv_blocks: Some(5),
        data_parallel_size: 7,
        kv_events: Some(kv_events),
        lora_adapters: ["other".to_owned()].into(),
        ..WorkerConfig::at("http://10.0.0.7:8000")
    };
    let described = vllm(MODELS, METRICS).expect("valid response");
    let config = described.complete(&given, &url(), &expected()).expect("compatible with the pool");
    assert_eq!((config.total_kv_blocks, config.lora_adapters), (Some(5), given.lora_adapters.clone()));
    assert_eq!(config.kv_events.expect("given").endpoint, "tcp://10.0.0.7:6000");
    assert_eq!(config.data_parallel_size, 2, "the probed value takes precedence");
    assert_eq!(config.engine, Some(Engine::Vllm));
    let other = WorkerConfig { engine: Some(Engine::Sglang), ..given };
    let described = vllm(MODELS, METRICS).expect("valid response");
    let config = described.complete(&other, &url(), &expected()).expect("compatible with the pool");
    assert_eq!(config.engine, other.engine, "the given value takes precedence");
}

#[test]
fn hints_are_those_that_the_engine_supports() {
    let given = WorkerConfig { session_hints: true, priority_hints: true, ..WorkerConfig::at("http://10.0.0.7:8000") };
    let hints = |described: Described| {
        let config = described.complete(&given, &url(), &expected()).expect("compatible with the pool");
        (config.session_hints, config.priority_hints)
    };
    let with = |fields: &str| sglang(&SERVER_INFO.replacen('{', &format!("{{ {fields},"), 1));
    let both = r#""enable_session_radix_cache": true, "enable_priority_scheduling": true"#;
    assert_eq!(hints(with(both)), (true, true));
    assert_eq!(hints(with(&format!(r#"{both}, "schedule_low_priority_values_first": true"#))), (true, false));
    assert_eq!(hints(sglang(SERVER_INFO)), (false, false));
    assert_eq!(hints(vllm(MODELS, METRICS).expect("valid response")), (false, false));
}

#[test]
fn engines_of_other_pools_are_rejected_with_a_reason() {
    let refused = |described: Described, expected: Expected| {
        let error = complete(described, &expected).expect_err("incompatible with the pool");
        error.to_string()
    };
    assert_eq!(
        refused(vllm(MODELS, METRICS).expect("sense"), Expected { model: Some("llama".to_owned()), ..expected() }),
        r#"it serves {"qwen"}, must serve "llama""#
    );
    assert!(refused(sglang(&SERVER_INFO.replace("5559", "65535")), expected()).contains("65535"), "no second port");
    let other_size = Expected { model: None, block_size: Some(64) };
    let sizes = |config: WorkerConfig| (config.block_size, config.total_kv_blocks);
    assert_eq!(complete(sglang(SERVER_INFO), &other_size).map(sizes), Ok((Some(16), Some(1024))), "a hint");
    let unsized_pool = Expected { block_size: None, ..expected() };
    assert_eq!(complete(sglang(SERVER_INFO), &unsized_pool).map(sizes), Ok((Some(16), Some(4096))));
    let without_events = SERVER_INFO.replace("\"kv_events\": {", "\"kv_events\": null, \"others\": {");
    assert_eq!(complete(sglang(&without_events), &unsized_pool).map(sizes), Ok((None, Some(1024))));
    let gap = vllm(MODELS, &METRICS.replace("engine=\"1\"", "engine=\"2\"")).expect_err("rank 1 is missing");
    assert_eq!(gap.to_string(), "its ranks are {0, 2}, must be in a row");
}

#[test]
fn pages_of_other_servers_are_told_apart() {
    for info in [
        r#"{ "vllm_config": "..." }"#,
        "",
        "[]",
        "<html>",
        r#"{ "kv_events": 7 }"#,
        r#"{ "kv_events": { "endpoint_host": "*" } }"#,
    ] {
        let facts =
            pages(&[(EnginePage::ServerInfo, info), (EnginePage::Models, MODELS), (EnginePage::Metrics, METRICS)]);
        let described = facts.describe(&url()).expect("two usable pages");
        assert_eq!((described.engine, described.block_size), (Engine::Vllm, Some(16)), "{info}");
    }
    for host in ["", "a b", "a/b", "[x]", "me@a"] {
        let info = SERVER_INFO.replace("\"*\"", &format!("{host:?}"));
        let error = pages(&[(EnginePage::ServerInfo, &info)]).describe(&url()).expect_err("no usable page");
        assert!(error.to_string().contains("endpoint_host"), "{error}");
    }
    let null = r#"{ "kv_events": { "publisher": "null", "endpoint_host": "*", "endpoint_port_base": 1 } }"#;
    assert_eq!(sglang(null).kv_events, None);
    let website = EnginePage::ALL.map(|page| (page, "<html>"));
    let error = pages(&website).describe(&url()).expect_err("no engine").to_string();
    assert!(
        error.contains("/v1/models, /server_info, /kv_event_sources: unknown content: ")
            && error.contains("it is no metrics page"),
        "{error}"
    );
    let many: String = (0..100_000).map(|rank| format!("vllm:x{{engine=\"{rank}\"}} 1\n")).collect();
    let described = vllm(MODELS, &many).expect("ranks in a row");
    assert!(matches!(complete(described, &expected()), Err(ProbeError::Config(_))), "but too many");
}

#[test]
fn no_page_is_required() {
    let facts = |pages_of: &[(EnginePage, &str)]| {
        complete(pages(pages_of).describe(&url()).expect("a usable page"), &expected()).expect("a worker of the pool")
    };
    let names = |config: &WorkerConfig| config.unreported.keys().cloned().collect::<Vec<_>>();
    let models_only = facts(&[(EnginePage::Models, MODELS)]);
    assert_eq!(names(&models_only), ["KV cache size", "block size", "load"]);
    assert_eq!(models_only.unreported["load"], "/metrics: response status is 404, must be 200");
    assert_eq!((models_only.data_parallel_size, models_only.max_model_len), (1, Some(32_768)));
    let llama_cpp = "# TYPE llamacpp:requests_processing gauge\nllamacpp:requests_processing 0\n";
    let other = facts(&[(EnginePage::Models, MODELS), (EnginePage::Metrics, llama_cpp)]);
    assert_eq!((names(&other).len(), other.load), (3, None), "its metrics have other names");
    let metrics_only = facts(&[(EnginePage::Metrics, METRICS)]);
    assert_eq!((names(&metrics_only), metrics_only.total_kv_blocks), (vec![], Some(4000)), "labels have the model");
    let info_only = facts(&[(EnginePage::ServerInfo, SERVER_INFO)]);
    assert_eq!(names(&info_only), Vec::<String>::new());
    let unnamed = METRICS.replace("model_name", "name");
    assert_eq!(names(&facts(&[(EnginePage::Metrics, &unnamed)])), ["model"], "it cannot be checked");
    let given = WorkerConfig { total_kv_blocks: Some(7), ..WorkerConfig::at("http://10.0.0.7:8000") };
    let described = pages(&[(EnginePage::Models, MODELS)]).describe(&url()).expect("a usable page");
    let config = described.complete(&given, &url(), &expected()).expect("a worker of the pool");
    assert_eq!(names(&config), ["block size", "load"], "the size of the cache is given");
    let none = pages(&[]).describe(&url()).expect_err("no page").to_string();
    assert_eq!(none, "/v1/models, /server_info, /metrics, /kv_event_sources: response status is 404, must be 200");
}

#[test]
fn an_engine_joins_once_its_model_is_known_or_cannot_be_checked() {
    let unnamed = METRICS.replace("model_name", "name");
    let of = |models: PageAnswer, metrics: &str| {
        let mut facts = pages(&[(EnginePage::Metrics, metrics)]);
        let _ = facts.record(&url(), EnginePage::Models, models);
        facts.describe(&url()).and_then(|described| complete(described, &expected())).map_err(|error| error.to_string())
    };
    assert!(of(missing(), &unnamed).is_ok());
    assert!(of(failed("slow"), METRICS).is_ok());
    assert_eq!(of(failed("slow"), &unnamed), Err("its model is not known yet: /v1/models: slow".to_owned()));
    let denied = || PageAnswer::Denied("response status is 401: set api_key_file".to_owned());
    assert_eq!(of(denied(), METRICS), Err("/v1/models: response status is 401: set api_key_file".to_owned()));
    assert!(
        of(PageAnswer::Body(br#"{ "data": [] }"#.to_vec()), METRICS).is_err_and(|error| error.contains("it serves {}"))
    );
    let other = METRICS.replace("qwen", "llama");
    assert!(of(failed("slow"), &other).is_err_and(|error| error.contains("must serve \"qwen\"")));
    let any_model = Expected { model: None, ..expected() };
    let described = pages(&[(EnginePage::Metrics, &unnamed)]).describe(&url()).expect("a usable page");
    assert_eq!(complete(described, &any_model).expect("a worker").unreported.len(), 0);
}

#[test]
fn failed_pages_keep_their_facts_and_missing_ones_do_not() {
    let mut facts = pages(&[(EnginePage::Models, MODELS), (EnginePage::Metrics, METRICS)]);
    let before = facts.describe(&url()).expect("two pages");
    let record = |facts: &mut EngineFacts, answer| facts.record(&url(), EnginePage::Metrics, answer);
    assert_eq!(record(&mut facts, failed("slow")), Err("slow".to_owned()));
    assert!(
        record(&mut facts, PageAnswer::Body(b"<html>".to_vec())).is_err_and(|error| error.contains("no metrics page"))
    );
    assert_eq!(facts.describe(&url()), Ok(before));
    assert_eq!(record(&mut facts, missing()), Ok(()));
    assert_eq!(facts.describe(&url()).expect("one page").block_size, None);
    assert_eq!(record(&mut facts, failed("slow")), Err("slow".to_owned()), "it may have the page again");
}

/// Response of vLLM 0.32 with two ranks on ports that the system has assigned.
const SOURCES: &str = r#"{
    "2": { "enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:24140",
           "replay_endpoint": "tcp://0.0.0.0:24190", "buffer_steps": 10000, "hwm": 100000, "topic": "kv-events" },
    "3": { "enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://192.0.2.1:40007",
           "replay_endpoint": null, "buffer_steps": 10000, "topic": "" }
}"#;

#[test]
fn vllm_reports_event_endpoints_by_global_rank() {
    let metrics = METRICS.replace("engine=\"0\"", "engine=\"2\"").replace("engine=\"1\"", "engine=\"3\"");
    let described = |sources: &str| {
        let facts = pages(&[
            (EnginePage::Models, MODELS),
            (EnginePage::Metrics, &metrics),
            (EnginePage::EventSources, sources),
        ]);
        (facts.may_publish_unreported(), facts.describe(&url()).expect("usable pages"))
    };
    let (unreported, described_by_rank) = described(SOURCES);
    let config = complete(described_by_rank.clone(), &expected()).expect("a worker of the pool");
    assert!(!unreported);
    assert_eq!((config.data_parallel_start_rank, config.data_parallel_size), (2, 2));
    let events = |rank| config.kv_events_of(rank).expect("valid").map(|of| (of.endpoint, of.replay_endpoint, of.topic));
    let (live, replay) = ("tcp://10.0.0.7:24140".to_owned(), "tcp://10.0.0.7:24190".to_owned());
    assert_eq!(events(2), Some((live, Some(replay), "kv-events".to_owned())), "wildcards are the worker's host");
    assert_eq!(events(3), Some(("tcp://192.0.2.1:40007".to_owned(), None, String::new())));
    let only_rank_2 = SOURCES.replace("\"3\"", "\"9\"");
    let left = complete(described(&only_rank_2).1, &expected()).expect("a worker of the pool");
    assert_eq!((left.data_parallel_size, left.kv_events_of(3)), (2, Ok(None)), "the rank stays, without events");
    let (unreported, none) = described("{}");
    assert!(!unreported && !complete(none, &expected()).expect("a worker").has_kv_events(), "it does not publish");
    assert!(described("[]").0 && described("<html>").0, "another version may publish at the default port");

    let kv_events =
        Some(KvEventsConfig { endpoint: "tcp://*:1".to_owned(), replay_endpoint: None, topic: String::new() });
    let given = WorkerConfig { kv_events, ..WorkerConfig::at("http://10.0.0.7:8000") };
    let config = described_by_rank.complete(&given, &url(), &expected()).expect("a worker of the pool");
    assert_eq!(config.kv_events_of(2).expect("valid").map(|of| of.endpoint), Some("tcp://10.0.0.7:3".to_owned()));
    assert_eq!(config.kv_events_by_rank, BTreeMap::new(), "configured endpoints have precedence");
}

#[test]
fn publishers_without_a_tcp_port_are_left_out() {
    let of = |endpoint: &str| {
        let sources = format!(r#"{{ "0": {{ "publisher": "zmq", "endpoint": {endpoint:?} }} }}"#);
        pages(&[(EnginePage::EventSources, &sources)]).describe(&url()).expect("a usable page").kv_events_by_rank
    };
    for endpoint in [
        "ipc:///tmp/x",
        "inproc://x",
        "tcp://*",
        "tcp://*:0",
        "tcp://*:x",
        "tcp://:1",
        "tcp://a b:1",
        "tcp://h:1/x",
        "",
    ] {
        assert_eq!(of(endpoint), Some(BTreeMap::new()), "{endpoint}");
    }
    for endpoint in ["tcp://*:1", "tcp://[::]:1", "tcp://[fd00::1]:1", "tcp://h:1"] {
        assert_eq!(of(endpoint).map(|ranks| ranks.len()), Some(1), "{endpoint}");
    }
    let ranks = r#"{ "0": { "endpoint": "tcp://*:1" }, "1": { "endpoint": "tcp://*:9", "publisher": "null" } }"#;
    let described = pages(&[(EnginePage::EventSources, ranks)]).describe(&url()).expect("a usable page");
    assert_eq!(
        (described.data_parallel_size, described.engine),
        (1, Engine::Vllm),
        "without metrics its ranks are those"
    );
}

proptest! {
    #[test]
    fn arbitrary_responses_never_panic(
        cut in 0..SERVER_INFO.len(), at in 0..METRICS.len(), of in 0..SOURCES.len(), with in any::<u8>()
    ) {
        let changed = |body: &str, at: usize| {
            let mut body = body.as_bytes().to_vec();
            body[at] = with;
            PageAnswer::Body(body)
        };
        let answers = [
            (EnginePage::ServerInfo, changed(SERVER_INFO, cut)),
            (EnginePage::Metrics, changed(METRICS, at)),
            (EnginePage::EventSources, changed(SOURCES, of)),
            (EnginePage::Models, PageAnswer::Body(MODELS.as_bytes().to_vec())),
            (EnginePage::Metrics, PageAnswer::Body(METRICS.as_bytes()[..at].to_vec())),
            (EnginePage::EventSources, PageAnswer::Body(SOURCES.as_bytes()[..of].to_vec())),
        ];
        let mut facts = EngineFacts::default();
        for (page, answer) in answers {
            let _ = facts.record(&url(), page, answer);
            let _ = facts.describe(&url()).and_then(|described| complete(described, &expected()));
        }
    }
}
