use proptest::prelude::*;

use super::*;

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
    Expected { model: Some("qwen".to_owned()), block_size: Some(16), block_size_must_match: true }
}

fn vllm(models: &str, metrics: &str) -> Result<Described, ProbeError> {
    Described::of_vllm(&url(), models.as_bytes(), metrics.as_bytes())
}

fn sglang(server_info: &str) -> Described {
    Described::of_sglang(&url(), server_info.as_bytes()).expect("valid response").expect("an SGLang response")
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
    assert_eq!((config.total_kv_blocks, config.lora_adapters), (Some(5), given.lora_adapters));
    assert_eq!(config.kv_events.expect("given").endpoint, "tcp://10.0.0.7:6000");
    assert_eq!(config.data_parallel_size, 2, "the probed value takes precedence");
}

#[test]
fn engines_of_other_pools_are_rejected_with_a_reason() {
    let refused = |described: Described, expected: Expected| {
        let error = complete(described, &expected).expect_err("incompatible with the pool");
        error.to_string()
    };
    assert_eq!(
        refused(sglang(SERVER_INFO), Expected { block_size: Some(64), ..expected() }),
        "its block size is 16, must be 64, as router.block_size sets"
    );
    assert_eq!(
        refused(vllm(MODELS, METRICS).expect("sense"), Expected { model: Some("llama".to_owned()), ..expected() }),
        r#"it serves {"qwen"}, must serve "llama""#
    );
    assert!(refused(sglang(&SERVER_INFO.replace("5559", "65535")), expected()).contains("65535"), "no second port");
    let lenient = Expected { model: None, block_size: Some(64), block_size_must_match: false };
    let sizes = |config: WorkerConfig| (config.block_size, config.total_kv_blocks);
    assert_eq!(complete(sglang(SERVER_INFO), &lenient).map(sizes), Ok((None, Some(1024))), "the report is ignored");
    let unsized_pool = Expected { block_size: None, ..expected() };
    assert_eq!(complete(sglang(SERVER_INFO), &unsized_pool).map(sizes), Ok((Some(16), Some(4096))));
    let without_events = SERVER_INFO.replace("\"kv_events\": {", "\"kv_events\": null, \"others\": {");
    assert_eq!(complete(sglang(&without_events), &unsized_pool).map(sizes), Ok((None, Some(1024))));
    let gap = vllm(MODELS, &METRICS.replace("engine=\"1\"", "engine=\"2\"")).expect_err("rank 1 is missing");
    assert_eq!(gap.to_string(), "its ranks are {0, 2}, must be in a row");
}

#[test]
fn responses_of_other_servers_are_distinguished() {
    let of_sglang = |answer: &str| Described::of_sglang(&url(), answer.as_bytes());
    assert_eq!(of_sglang(r#"{ "vllm_config": "..." }"#), Ok(None));
    for answer in ["", "[]", "<html>", r#"{ "kv_events": 7 }"#, r#"{ "kv_events": { "endpoint_host": "*" } }"#] {
        assert!(matches!(of_sglang(answer), Err(ProbeError::Broken { .. })), "{answer}");
    }
    for host in ["", "a b", "a/b", "[x]", "me@a"] {
        let answer = SERVER_INFO.replace("\"*\"", &format!("{host:?}"));
        assert!(matches!(of_sglang(&answer), Err(ProbeError::Broken { .. })), "{host}");
    }
    let null = r#"{ "kv_events": { "publisher": "null", "endpoint_host": "*", "endpoint_port_base": 1 } }"#;
    assert_eq!(sglang(null).kv_events, None);
    for (models, metrics) in [("{}", METRICS), (MODELS, "up 1\n")] {
        assert!(matches!(vllm(models, metrics), Err(ProbeError::Broken { .. })), "not vLLM's");
    }
    let many: String = (0..100_000).map(|rank| format!("vllm:x{{engine=\"{rank}\"}} 1\n")).collect();
    let described = vllm(MODELS, &many).expect("ranks in a row");
    assert!(matches!(complete(described, &expected()), Err(ProbeError::Config(_))), "but too many");
}

proptest! {
    #[test]
    fn arbitrary_responses_never_panic(cut in 0..SERVER_INFO.len(), at in 0..METRICS.len(), with in any::<u8>()) {
        let mut info = SERVER_INFO.as_bytes().to_vec();
        info[cut] = with;
        let said = Described::of_sglang(&url(), &info);
        if let Ok(Some(described)) = said {
            let _ = complete(described, &expected());
        }
        let mut metrics = METRICS.as_bytes().to_vec();
        metrics[at] = with;
        let _ = Described::of_vllm(&url(), MODELS.as_bytes(), &metrics);
        let _ = Described::of_vllm(&url(), MODELS.as_bytes(), &METRICS.as_bytes()[..at]);
    }
}
