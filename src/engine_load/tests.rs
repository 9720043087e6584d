//! Literal pages and messages, and invalid input.

use proptest::prelude::*;

use super::*;

const VLLM: &str = r#"# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a \"b\", {c} \\"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 0.0 1700000000000
vllm:num_requests_waiting{engine="0",model_name="m"} 1.2e+01
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{model_name="m",engine="0"} 0.25
vllm:kv_cache_usage_perc{ model_name = "m" , engine = "1" , } 1.0000000002
vllm:request_success_total{engine="0",finished_reason="stop"} 7.0
process_cpu_seconds_total 11.0
"#;

type RankReading = (u32, Option<u32>, Option<u32>, Option<f64>);

fn of_ranks(text: &str, start: u32, size: u32) -> Vec<RankReading> {
    let page = read_page(text);
    page.of_ranks(start, size).map(|(rank, of)| (rank, of.running, of.waiting, of.kv_usage)).collect()
}

#[test]
fn vllm_page_is_parsed_per_rank() {
    assert_eq!(of_ranks(VLLM, 0, 2), [(0, Some(3), Some(12), Some(0.25)), (1, Some(0), Some(0), Some(1.0))]);
    assert_eq!(of_ranks(VLLM, 1, 1), [(1, Some(0), Some(0), Some(1.0))], "the rank's part of a larger deployment");
    assert_eq!(read_page(VLLM).refused, 0);
    assert_eq!(of_ranks("vllm:gpu_cache_usage_perc{model_name=\"m\"} 0.5", 0, 1), [(0, None, None, Some(0.5))]);
}

#[test]
fn sglang_page_is_parsed_with_and_without_ranks() {
    let one = "sglang:num_running_reqs{model_name=\"m\",tp_rank=\"0\"} 4.0\n\
               sglang:num_queue_reqs{model_name=\"m\",tp_rank=\"0\"} 2.0\nsglang:token_usage{model_name=\"m\"} 0.125\n";
    assert_eq!(of_ranks(one, 0, 1), [(0, Some(4), Some(2), Some(0.125))]);
    assert_eq!(of_ranks(one, 3, 1), [(3, Some(4), Some(2), Some(0.125))]);
    assert!(of_ranks(one, 0, 2).is_empty(), "ambiguous between two ranks");
    let two = "sglang:num_queue_reqs{dp_rank=\"0\",tp_rank=\"0\"} 2\nsglang:num_queue_reqs{dp_rank=\"1\"} 5\n\
               sglang:num_queue_reqs{dp_rank=\"0\",tp_rank=\"1\"} 3\n";
    assert_eq!(of_ranks(two, 0, 2), [(0, None, Some(3), None), (1, None, Some(5), None)], "processes of one rank");
}

/// Names and values of vLLM 0.33.
#[test]
fn sleep_is_read_by_state() {
    let page = |awake: u8, offloaded: u8, discarded: u8| {
        let series = |state, value| {
            format!("vllm:engine_sleep_state{{engine=\"0\",model_name=\"m\",sleep_state=\"{state}\"}} {value}.0\n")
        };
        series("awake", awake) + &series("weights_offloaded", offloaded) + &series("discard_all", discarded)
    };
    let sleep = |page: &str| read_page(page).of_ranks(0, 1).next().and_then(|(_, reading)| reading.sleep);
    assert_eq!(sleep(&page(1, 0, 0)), Some(EngineSleep::Awake));
    assert_eq!(sleep(&page(0, 0, 0)), Some(EngineSleep::Paused));
    assert_eq!(sleep(&page(0, 1, 0)), Some(EngineSleep::Emptied));
    assert_eq!(sleep(&page(0, 0, 1)), Some(EngineSleep::Emptied));
    assert_eq!(sleep(VLLM), None);
    let cell = EngineLoadCell::default();
    for sleep in [EngineSleep::Paused, EngineSleep::Emptied, EngineSleep::Awake] {
        let load =
            EngineLoad { reading: EngineReading { sleep: Some(sleep), ..EngineReading::default() }, at: Timestamp(1) };
        cell.publish(&load);
        assert_eq!((cell.read(), cell.sleep()), (Some(load), Some(sleep)));
    }
}

#[test]
fn single_rank_may_have_any_number() {
    assert_eq!(of_ranks("vllm:num_requests_running{engine=\"5\"} 1", 0, 1), [(0, Some(1), None, None)]);
    assert!(of_ranks("vllm:num_requests_running{engine=\"5\"} 1", 0, 2).is_empty());
}

#[test]
fn invalid_values_are_omitted_individually() {
    let bad = ["NaN", "-1", "+Inf", "-Inf", "1e300", "x", "", "0x10"];
    for value in bad {
        let text = format!(
            "vllm:num_requests_running{{engine=\"0\"}} {value}\nvllm:num_requests_waiting{{engine=\"0\"}} 2\n\
             vllm:kv_cache_usage_perc{{engine=\"0\"}} {value}\n"
        );
        assert_eq!(of_ranks(&text, 0, 1), [(0, None, Some(2), None)], "{value}");
        assert_eq!(read_page(&text).refused, 2, "{value}");
    }
    for line in ["{engine=\"0\" 3", "{engine=0} 3", "{engine=\"0} 3", "{engine} 3", "{", "", "{\"}"] {
        let page = read_page(&format!("vllm:num_requests_running{line}"));
        assert_eq!((page.refused, page.of_ranks(0, 1).count()), (1, 0), "{line}");
    }
    assert_eq!(read_page("vllm:kv_cache_usage_perc 37").refused, 1, "a share, not a percentage");
}

#[test]
fn number_of_ranks_on_a_page_is_limited() {
    let lines = (0..5_000).map(|rank| format!("vllm:num_requests_running{{engine=\"{rank}\"}} 1\n"));
    let page = read_page(&lines.collect::<String>());
    assert_eq!((page.of_ranks(0, 5_000).count(), page.refused), (4_096, 904));
}

#[test]
fn stat_is_parsed_as_array_and_as_map() {
    let all = EngineReading { running: Some(300), waiting: Some(2), kv_usage: Some(0.5), sleep: None };
    // ["LoadStat", 300, 2, 50, 100, 1]; a longer one; one without tag and rank.
    for payload in [
        b"\x96\xa8LoadStat\xcd\x01\x2c\x02\x32\x64\x01".as_slice(),
        b"\x97\xa8LoadStat\xcd\x01\x2c\x02\x32\x64\xc0\x81\xa1x\x93\x01\x02\x03",
        b"\x94\xd1\x01\x2c\x02\x32\x64",
        b"\xdc\x00\x05\xd9\x08LoadStat\xce\x00\x00\x01\x2c\xcb\x40\x00\x00\x00\x00\x00\x00\x00\x32\x64",
    ] {
        assert_eq!(read_stat(payload), Ok(all));
    }
    let map = b"\x86\xa4type\xa8LoadStat\xa5other\x92\x01\x81\x01\x02\xb0num_running_reqs\xcd\x01\x2c\
                \xb0num_waiting_reqs\x02\xaanum_tokens\x32\xb4max_total_num_tokens\x64";
    assert_eq!(read_stat(map), Ok(all));
}

#[test]
fn unknown_values_of_a_stat_are_omitted() {
    let unknown = EngineReading { running: Some(1), ..EngineReading::default() };
    for payload in [
        b"\x95\xa8LoadStat\x01\xff\x32\x00".as_slice(), // negative count, no capacity
        b"\x95\xa8LoadStat\x01\xc0\xc0\xc0",            // nil
        b"\x93\xa8LoadStat\x01\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00", // NaN, and truncated
        b"\x95\xa8LoadStat\x01\xcf\xff\xff\xff\xff\xff\xff\xff\xff\xff\x64", // 2^64 − 1, negative tokens
    ] {
        assert_eq!(read_stat(payload), Ok(unknown));
    }
}

#[test]
fn invalid_payloads_are_rejected() {
    for payload in [
        b"".as_slice(),
        b"\x01",
        b"\x90",
        b"\x92\xa5Other\x01",
        b"\x96\xa8LoadStat\x01",
        b"\xdd\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\x81\xa1a\x01",
        b"\xc1",
    ] {
        assert_eq!(read_stat(payload), Err(MessageError::NotAStat));
    }
    let deep = [[0x91; 60_000].as_slice(), &[0x01]].concat();
    assert_eq!(read_stat(&deep), Err(MessageError::NotAStat));
    assert_eq!(read_stat(&[0; 70_000]), Err(MessageError::TooLong(70_000)));
}

#[test]
fn limits_apply_to_known_and_fresh_values() {
    let limits = EngineLimits { waiting: Some(4), kv_usage: Some(0.9), stale_after: Duration::from_nanos(100) };
    let exceeds = |waiting, kv_usage, now| {
        let reading = EngineReading { running: None, waiting, kv_usage, sleep: None };
        limits.exceeded_by(&EngineLoad { reading, at: Timestamp(0) }, Timestamp(now))
    };
    assert!(exceeds(Some(5), None, 0) && exceeds(None, Some(0.91), 99));
    assert!(!exceeds(Some(4), Some(0.9), 0) && !exceeds(None, None, 0) && !exceeds(Some(5), Some(1.0), 100));
    assert!(limits.any() && !EngineLimits::default().any());
}

#[test]
fn labels_are_found_after_any_prefix() {
    let page = "# HELP a b\na:x{path=\"c:\\\\\",say=\"\\\"n=\\\"}\" , n=\"7\",} 1.0 123\na:y 2\na:w{\na:z{x=\"1\"} 1 # n=\"2\"";
    let found: Vec<_> = series(page).map(|series| (series.name, series.label("n"))).collect();
    assert_eq!(found, [("a:x", Some("7")), ("a:y", None), ("a:w", None), ("a:z", None)]);
}

proptest! {
    #[test]
    fn any_input_is_parsed_or_rejected(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        check(&read_stat(&bytes).unwrap_or_default())?;
        let stat = [b"\x96\xa8LoadStat".as_slice(), &bytes].concat();
        check(&read_stat(&stat).unwrap_or_default())?;
        let text = String::from_utf8_lossy(&bytes);
        for prefix in ["", "vllm:kv_cache_usage_perc", "sglang:num_queue_reqs{", "vllm:num_requests_running{engine=\""] {
            for (_, reading) in read_page(&format!("{prefix}{text}")).of_ranks(0, 2) {
                check(&reading)?;
            }
        }
    }
}

fn check(reading: &EngineReading) -> Result<(), TestCaseError> {
    prop_assert!(reading.kv_usage.is_none_or(|usage| (0.0..=1.0).contains(&usage)), "{:?}", reading);
    Ok(())
}
