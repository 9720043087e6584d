use super::*;

fn map(pairs: &[(&str, &str)]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in pairs {
        let name: HeaderName = name.parse().unwrap();
        headers.append(name, HeaderValue::from_bytes(value.as_bytes()).unwrap());
    }
    headers
}

/// Headers of lines.
fn lines(text: &str) -> HeaderMap {
    map(&text.trim().lines().map(|line| line.split_once(": ").expect("a header")).collect::<Vec<_>>())
}

fn pairs(headers: &HeaderMap) -> Vec<(&str, &str)> {
    let mut pairs: Vec<_> = headers.iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect();
    pairs.sort_unstable();
    pairs
}

const OWN: ToWorker<'_> = ToWorker { request_id: "r1", data_parallel_rank: None, authorization: Authorization::Drop };

#[test]
fn options_are_read() {
    let headers = map(&[
        ("X-Pointsman-Priority", "4294967295"),
        ("X-Pointsman-Priority-Jump", "1.5"),
        ("X-Pointsman-Deadline-Ms", "250"),
        ("X-Pointsman-Class", "batch"),
        ("X-Session-Id", "chat-\u{fc}7"),
        ("X-Pointsman-Expected-Output-Tokens", "300"),
        ("X-Pointsman-No-Queue", "true"),
    ]);
    let options = RequestOptions {
        strict_priority: u32::MAX,
        priority_jump: 1.5,
        deadline: Some(Duration::from_millis(250)),
        policy_class: Some("batch".into()),
        session_id: Some("chat-\u{fc}7".into()),
        expected_output_tokens: Some(300),
        do_not_queue: true,
        ..RequestOptions::default()
    };
    assert_eq!(request_options(&headers), Ok(options));
}

#[test]
fn targets_are_read_from_own_headers_and_those_of_llm_d() {
    let own =
        [("X-Pointsman-TTFT-Ms", "250"), ("X-Pointsman-ITL-Ms", "12.5"), ("X-Pointsman-On-Target-Miss", "reject")];
    let options = RequestOptions {
        ttft_target: Some(Duration::from_millis(250)),
        itl_target: Some(Duration::from_micros(12_500)),
        on_target_miss: Some(OnTargetMiss::Reject),
        ..RequestOptions::default()
    };
    assert_eq!(request_options(&map(&own)), Ok(options.clone()));
    let served = RequestOptions { on_target_miss: None, ..options };
    for (ttft, tpot) in [("x-llm-d-slo-ttft-ms", "x-llm-d-slo-tpot-ms"), ("x-slo-ttft-ms", "x-slo-tpot-ms")] {
        assert_eq!(request_options(&map(&[(ttft, "250"), (tpot, "12.5")])), Ok(served.clone()));
    }
    let several = [("x-slo-ttft-ms", "soon"), ("x-llm-d-slo-ttft-ms", "2"), ("x-pointsman-ttft-ms", "1")];
    let of = |headers: &[(&str, &str)]| request_options(&map(headers)).map(|options| options.ttft_target);
    assert_eq!(of(&several), Ok(Some(Duration::from_millis(1))), "Pointsman's header applies");
    assert_eq!(of(&several[..2]), Ok(Some(Duration::from_millis(2))), "the current name of llm-d's header applies");
}

#[test]
fn invalid_header_values_are_rejected_by_name() {
    let long = "x".repeat(257);
    let cases = [
        (PRIORITY, vec!["", "-1", "+1", "1.0", "4294967296", "high", "1 ", "٣"]),
        (PRIORITY_JUMP, vec!["", "-0.1", "inf", "NaN", "1e309", "86401", "soon"]),
        (DEADLINE_MS, vec!["", "0", "-1", "+5", "86400001", "99999999999999999999", "1s"]),
        (CLASS, vec!["", &long]),
        (SESSION_ID, vec!["", &long]),
        (NO_QUEUE, vec!["", "1", "yes", "True"]),
        (TTFT_MS[0], vec!["", "0", "-1", "NaN", "inf", "0.0001", "86400001", "1s"]),
        (TTFT_MS[1], vec!["", "0", "fast"]),
        (TTFT_MS[2], vec!["", "0", "1,5"]),
        (ITL_MS[0], vec!["", "0", "-0.5", "20ms"]),
        (ITL_MS[1], vec!["0"]),
        (ITL_MS[2], vec!["0"]),
        (ON_TARGET_MISS, vec!["", "Reject", "drop", "1"]),
        (EXPECTED_OUTPUT_TOKENS, vec!["", "0", "-1", "+5", "1.5", "4294967296", "some"]),
    ];
    for (name, values) in cases {
        for value in values {
            let error = request_options(&map(&[(name, value)])).unwrap_err();
            assert_eq!(
                (error.status.as_u16(), error.code, error.param),
                (400, "invalid_header", Some(name)),
                "{value:?}"
            );
            assert!(error.message.contains(name), "{error}");
        }
        let twice = request_options(&map(&[(name, "1"), (name, "1")])).unwrap_err();
        assert_eq!(twice.message, format!("header {name} must occur once"));
    }
}

#[test]
fn names_in_headers_are_utf8() {
    for name in [CLASS, SESSION_ID] {
        let mut headers = map(&[(name, "gr\u{fc}n")]);
        assert!(request_options(&headers).is_ok(), "{name}");
        headers.insert(name, HeaderValue::from_bytes(b"gr\xfcn").expect("opaque bytes are valid"));
        assert_eq!(request_options(&headers).map_err(|error| error.code), Err("invalid_header"), "{name}");
    }
}

#[test]
fn framing_and_selecting_headers_are_not_forwarded() {
    let dropped = lines(
        r#"
Connection: keep-alive, X-Mine
X-Mine: 1
Keep-Alive: timeout=5
Proxy-Authorization: Basic eA==
Proxy-Connection: close
TE: trailers
Trailer: x-sum
Transfer-Encoding: chunked
Upgrade: h2c
Host: gateway
Content-Length: 7
Content-Encoding: gzip
Expect: 100-continue
Accept-Encoding: gzip
Cookie: sso=secret
Authorization: Bearer client
X-Request-Id: theirs
X-Pointsman-Priority: 9
x-data-parallel-rank: 3
X_Data_Parallel_Rank: 3
x-data-parallel-host-port: 10.0.0.1:80
x-dp-rank: 3
x-gateway-destination-endpoint: 10.0.0.1:80
x-gateway-destination-endpoint-subset: 10.0.0.1:80
x-worker-instance-id: 3
x-prefiller-host-port: 10.0.0.1:80
x-prefill-instance-id: 3
x-decode-instance-id: 3
x-encoder-hosts-ports: 10.0.0.1:80
x-dynamo-instance: 3
x-override-routed-dp-rank: 3
x-override-bootstrap-host: 10.0.0.1
x-smg-target-worker: 3
"#,
    );
    assert_eq!(pairs(&to_worker(&dropped, OWN)), [("x-request-id", "r1")]);
}

#[test]
fn gateway_sets_rank_and_key() {
    let client =
        map(&[("authorization", "Bearer client"), ("x-data-parallel-rank", "9"), ("connection", "x-request-id")]);
    let key = HeaderValue::from_static("Bearer worker");
    let worker_headers =
        |authorization| to_worker(&client, ToWorker { data_parallel_rank: Some(1), authorization, ..OWN });
    let expected = |key| {
        let mut expected = vec![("x-data-parallel-rank", "1"), ("x-request-id", "r1")];
        expected.splice(0..0, key);
        expected
    };
    assert_eq!(pairs(&worker_headers(Authorization::Drop)), expected(None));
    assert_eq!(pairs(&worker_headers(Authorization::Pass)), expected(Some(("authorization", "Bearer client"))));
    assert_eq!(pairs(&worker_headers(Authorization::Key(&key))), expected(Some(("authorization", "Bearer worker"))));
    for authorization in [Authorization::Pass, Authorization::Key(&key)] {
        assert!(!format!("{:?}", worker_headers(authorization)).contains("Bearer"), "secrets are not printed");
    }
}

#[test]
fn long_connection_headers_are_linear() {
    let many = "a,".repeat(30_000) + " X-Mine ,, \t,not a name,content-type";
    let mut client = map(&[("connection", "close"), ("x-mine", "1"), ("x-also-mine", "2"), ("accept", "*/*")]);
    for value in [many.as_bytes(), b"\xff,x-ALSO-mine"] {
        client.append("connection", HeaderValue::from_bytes(value).expect("a value"));
    }
    client.append("content-type", HeaderValue::from_static("text/plain"));
    assert_eq!(pairs(&to_worker(&client, OWN)), [("accept", "*/*"), ("x-request-id", "r1")]);
}

#[test]
fn response_headers_that_identify_workers_are_dropped() {
    let answer = lines(
        r#"
content-type: text/event-stream
content-length: 12
openai-processing-ms: 5
retry-after: 3
connection: close, x-mine
x-mine: 1
keep-alive: timeout=5
transfer-encoding: chunked
proxy-authenticate: Basic
server: uvicorn
x-powered-by: worker-3
set-cookie: node=3
alt-svc: h3="worker-3:443"
x-data-parallel-rank: 3
x-worker-id: 3
x-gateway-destination-endpoint-served: 10.0.0.1:80
x-request-id: theirs
"#,
    );
    let expected = [
        ("content-type", "text/event-stream"),
        ("openai-processing-ms", "5"),
        ("retry-after", "3"),
        ("x-request-id", "r1"),
    ];
    assert_eq!(pairs(&to_client(&answer, "r1")), expected);
}
