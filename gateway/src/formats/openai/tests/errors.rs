//! Every error, its headers, and its row in the documentation.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::http::{HeaderMap, StatusCode};
use axum::response::IntoResponse as _;
use http_body_util::BodyExt as _;
use pointsman::error::{Down, RouteError};
use pointsman::internals::{
    schedule::{MissedTarget, TargetsMissed},
    select::Removed,
};
use pointsman::protocol::{WorkerId, WorkerRank};
use pointsman::{Filter, Pin, PinMode, Rejection, SessionId};
use pointsman::{
    LimitKind,
    internals::queue::{Backpressure, UnknownClass},
};
use serde_json::{Value, json};

use crate::admission::quota::Limit;
use crate::formats::anthropic::{Purpose, chat_body};
use crate::formats::openai::{ApiError, Endpoint, RequestBody, request_options};

const PAGE: &str = include_str!("../../../../../docs/headers.md");

fn backpressure(limit: LimitKind, retry_after_ms: u64) -> RouteError {
    let retry_after = Duration::from_millis(retry_after_ms);
    Rejection::Backpressure(Backpressure { class: "gold".into(), limit, current: 777, max: 778, retry_after }).into()
}

fn targets_missed(retry_after_ms: Option<u64>) -> Rejection {
    let ttft = MissedTarget { predicted: Duration::from_micros(850_250), target: Duration::from_millis(500) };
    let retry_after = retry_after_ms.map(Duration::from_millis);
    Rejection::TargetsMissed(TargetsMissed { ttft: Some(ttft), itl: None, retry_after })
}

#[test]
fn missed_targets_are_named_with_their_predictions() {
    let ttft = "time to first token: predicted 850.2 ms, target 500.0 ms";
    let start = "no worker is predicted to meet the latency targets of the request";
    assert_eq!(ApiError::from(targets_missed(None)).message, format!("{start}; {ttft}"));
}

fn of_router() -> Vec<(RouteError, u16, &'static str, Option<u64>)> {
    let removed = Removed::default();
    let rank = WorkerRank::new(WorkerId(777), 0);
    let pinned = |refused_by| Rejection::Pinned {
        pin: Pin { worker: rank.worker, rank: Some(0), mode: PinMode::Hard },
        refused_by,
    };
    vec![
        (backpressure(LimitKind::Requests, 100), 429, "queue_full", Some(1)),
        (backpressure(LimitKind::RawTokens, 1001), 429, "queue_tokens_full", Some(2)),
        (backpressure(LimitKind::CachedTokens, 30_000), 429, "queue_tokens_full", Some(30)),
        (backpressure(LimitKind::DoNotQueue, 0), 429, "would_queue", Some(1)),
        (backpressure(LimitKind::ProgramStarts, 2_500), 429, "programs_full", Some(3)),
        (RouteError::Overloaded { requests_max: 777 }, 429, "queue_full", Some(1)),
        (Rejection::AllOverloaded { removed }.into(), 429, "overloaded", Some(1)),
        (pinned(Some(Filter::Busy)).into(), 429, "overloaded", Some(1)),
        (Rejection::DeadlineExceeded { waited: Duration::from_millis(777) }.into(), 429, "deadline_exceeded", Some(1)),
        (targets_missed(None).into(), 429, "targets_missed", None),
        (targets_missed(Some(1_500)).into(), 429, "targets_missed", Some(2)),
        (RouteError::TargetsNotPredicted { policy: "gold" }, 400, "invalid_header", None),
        (RouteError::ZeroTarget("777"), 500, "internal", None),
        (Rejection::NoRanks.into(), 503, "no_workers", Some(1)),
        (Rejection::NoneEligible { removed }.into(), 503, "no_eligible_worker", Some(1)),
        (Rejection::UnknownRank(rank).into(), 503, "no_eligible_worker", Some(1)),
        (pinned(None).into(), 503, "no_eligible_worker", Some(1)),
        (RouteError::Freed, 503, "cancelled", Some(1)),
        (RouteError::Lost { attempts: 777 }, 503, "router_restarted", Some(1)),
        (RouteError::Down(Down::Failed), 503, "router_failed", Some(1)),
        (RouteError::Down(Down::Stopped), 503, "draining", Some(1)),
        (Rejection::UnknownClass(UnknownClass("777".to_owned())).into(), 400, "unknown_class", None),
        (RouteError::PriorityJump(f64::NAN), 400, "invalid_header", None),
        (RouteError::Session(SessionId::new("").unwrap_err()), 400, "invalid_session_id", None),
        (RouteError::PromptTooLong { prompt_tokens: 1 << 33 }, 400, "prompt_too_long", None),
        (
            RouteError::ContextLength { prompt_tokens: 9_000, max_model_len: 8_192 },
            400,
            "context_length_exceeded",
            None,
        ),
        (RouteError::MissingRequestId, 500, "internal", None),
    ]
}

fn of_bodies() -> Vec<ApiError> {
    let bodies: [&[u8]; 9] = [
        b"{",
        b"\xff",
        b"[]",
        &b"[".repeat(200),
        br#"{"model":"a","model":"a"}"#,
        b"{}",
        br#"{"messages":5}"#,
        br#"{"messages":[],"model":""}"#,
        br#"{"messages":[],"session_id":""}"#,
    ];
    let mut errors: Vec<_> = bodies
        .iter()
        .map(|body| RequestBody::parse(Endpoint::Chat, body.to_vec().into()).err().expect("invalid"))
        .collect();
    let unsupported = br#"{"messages":[{"role":"user","content":[{"type":"x"}]}]}"#;
    errors.push(chat_body(unsupported, Purpose::Count).unwrap_err());
    errors.push(RequestBody::parse(Endpoint::Completions, r#"{"prompt":[-1]}"#.into()).err().expect("invalid"));
    errors
}

fn of_proxy() -> Vec<ApiError> {
    let limits = Limit::ALL.map(|limit| ApiError::limit_exceeded(limit, 1, Duration::from_secs(1)));
    let others = vec![
        ApiError::query_invalid(),
        ApiError::unauthorized(),
        ApiError::model_not_found("x"),
        ApiError::not_found(),
        ApiError::response_not_found("x"),
        ApiError::coding_unsupported(),
        ApiError::coding_invalid(),
        ApiError::engines_paused(),
        RequestBody::form(Endpoint::Audio, &HeaderMap::new(), "".into()).err().expect("invalid"),
        ApiError::method_not_allowed("POST"),
        ApiError::too_large(5),
        ApiError::body_timeout(),
        ApiError::body_broken(),
        ApiError::host_invalid(),
        ApiError::transfer_encoding_unsupported(),
        ApiError::worker_failed(),
        ApiError::worker_timeout(),
        ApiError::queue_timeout(),
        ApiError::token_count_unavailable(),
        ApiError::draining(),
        ApiError::request_budget_exhausted(),
        ApiError::connection_overloaded(),
        ApiError::heads_too_large(),
        ApiError::key_repeated(),
        ApiError::too_many_connections(),
        ApiError::internal(),
        request_options(&HeaderMap::from_iter([("x-pointsman-no-queue".parse().unwrap(), "x".parse().unwrap())]))
            .unwrap_err(),
        ApiError { code: "duplicate_request", status: StatusCode::CONFLICT, ..ApiError::invalid("", None, "") },
    ];
    others.into_iter().chain(limits).collect()
}

#[test]
fn router_errors_are_distinct_and_reveal_no_internals() {
    for (error, status, code, retry_after_s) in of_router() {
        let response = ApiError::from(error.clone());
        assert_eq!(
            (response.status.as_u16(), response.code, response.retry_after_s),
            (status, code, retry_after_s),
            "{error}"
        );
        assert!(!response.message.contains("777") && !response.message.contains("gold"), "{response}");
    }
}

#[tokio::test]
async fn error_responses_have_openai_format() {
    let answer = |error: ApiError| async {
        let (head, body) = error.into_response().into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        let header =
            |name| head.headers.get(name).map(|value: &axum::http::HeaderValue| value.to_str().unwrap().to_owned());
        let headers = ["retry-after", "www-authenticate", "allow", "connection"].map(header);
        (head.status.as_u16(), headers, serde_json::from_slice::<Value>(&body).unwrap())
    };
    let some = |text: &str| Some(text.to_owned());
    let (status, headers, body) = answer(ApiError::model_not_found(&format!("a\n{}", "x".repeat(500)))).await;
    assert_eq!((status, headers), (404, [None, None, None, None]));
    assert_eq!(
        body,
        json!({ "error": {
            "message": format!("the model \"a\\n{}\" does not exist", "x".repeat(126)),
            "type": "invalid_request_error", "param": "model", "code": "model_not_found",
        } })
    );
    let heads = [
        (ApiError::unauthorized(), 401, [None, some("Bearer"), None, None]),
        (ApiError::method_not_allowed("GET, HEAD"), 405, [None, None, some("GET, HEAD"), None]),
        (ApiError::too_large(5), 413, [None, None, None, some("close")]),
        (ApiError::body_timeout(), 408, [None, None, None, some("close")]),
        (ApiError::draining(), 503, [some("1"), None, None, some("close")]),
        (backpressure(LimitKind::Requests, 29_001).into(), 429, [some("30"), None, None, None]),
    ];
    for (error, status, headers) in heads {
        let code = error.code;
        let response = answer(error).await;
        assert_eq!((response.0, response.1), (status, headers), "{code}");
        assert_eq!(response.2["error"]["param"], Value::Null, "{code}");
    }
}

/// Type that the page states for a status and a code.
fn documented_type(status: &str, code: &str) -> &'static str {
    match (status, code) {
        ("401", _) => "authentication_error",
        ("429", _) => "rate_limit_error",
        (_, "path_not_found") => "not_found_error",
        (_, "transfer_encoding_unsupported") => "invalid_request_error",
        (status, _) if status < "500" => "invalid_request_error",
        _ => "server_error",
    }
}

/// Documented codes, with status and type.
fn documented() -> BTreeMap<String, (String, String)> {
    let section = PAGE.split("## Errors").nth(1).expect("the page has an errors section");
    let mut documented = BTreeMap::new();
    for row in section.lines().filter_map(|line| line.strip_prefix("- ")) {
        let (status, rest) = row.split_once(' ').expect("a status");
        for code in rest.split(':').next().unwrap_or_default().split('`').skip(1).step_by(2) {
            let kind = documented_type(status, code).to_owned();
            documented.insert(code.to_owned(), (status.to_owned(), kind));
        }
    }
    documented
}

#[test]
fn errors_match_their_documentation() {
    let errors = of_router().into_iter().map(|(error, ..)| ApiError::from(error)).chain(of_bodies()).chain(of_proxy());
    let made: BTreeMap<_, _> = errors
        .map(|error| (error.code.to_owned(), (error.status.as_str().to_owned(), error.kind.name().to_owned())))
        .collect();
    assert_eq!(made, documented());
}
