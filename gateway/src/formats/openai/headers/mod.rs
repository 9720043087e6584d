//! Request options from headers, and header forwarding rules.
//!
//! No client header can select a worker, a cache source or the framing of a response, and no forwarded response header
//! identifies a worker. The proxy checks permissions.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use axum::http::header::{self, HeaderMap, HeaderName, HeaderValue};
use pointsman::config::OnTargetMiss;
use pointsman::{RequestOptions, SessionId};

use super::error::ApiError;

/// Strict priority.
pub(super) const PRIORITY: &str = "x-pointsman-priority";
/// Seconds of head start in the queue.
pub(super) const PRIORITY_JUMP: &str = "x-pointsman-priority-jump";
/// Placement deadline.
pub(super) const DEADLINE_MS: &str = "x-pointsman-deadline-ms";
/// Queue class.
pub(super) const CLASS: &str = "x-pointsman-class";
/// Rejection instead of queueing.
pub(super) const NO_QUEUE: &str = "x-pointsman-no-queue";
/// Expected output tokens.
pub(super) const EXPECTED_OUTPUT_TOKENS: &str = "x-pointsman-expected-output-tokens";
/// Target of the time to first token: Pointsman's header, and llm-d's, current and former (reference: llm-d router,
/// predicted latency). The first that is present applies.
pub(super) const TTFT_MS: [&str; 3] = ["x-pointsman-ttft-ms", "x-llm-d-slo-ttft-ms", "x-slo-ttft-ms"];
/// Target of the inter-token latency, which llm-d names time per output token.
pub(super) const ITL_MS: [&str; 3] = ["x-pointsman-itl-ms", "x-llm-d-slo-tpot-ms", "x-slo-tpot-ms"];
/// Effect of targets that no worker is predicted to meet.
pub(super) const ON_TARGET_MISS: &str = "x-pointsman-on-target-miss";
/// Session.
pub(super) const SESSION_ID: &str = "x-session-id";

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Key of a tenant, as Anthropic's clients send it.
pub(crate) const API_KEY: HeaderName = HeaderName::from_static("x-api-key");
const DATA_PARALLEL_RANK: HeaderName = HeaderName::from_static("x-data-parallel-rank");

/// Maximum deadline: one day.
const DEADLINE_MS_MAX: u32 = 86_400_000;
/// Minimum target, in milliseconds.
const TARGET_MS_MIN: f64 = 0.001;
/// Maximum target: one day.
const TARGET_MS_MAX: f64 = 86_400_000.0;
/// Maximum priority jump: one day.
const PRIORITY_JUMP_MAX: f64 = 86_400.0;
/// Maximum length of a class name.
const CLASS_BYTES_MAX: usize = 128;
/// Maximum length of a request id.
const REQUEST_ID_BYTES_MAX: usize = 128;

/// Connection headers (RFC 9110, 7.6.1), and headers that `hyper` derives from the body. [`STRIPPED`] covers Proxy-*.
const HOP_BY_HOP: [HeaderName; 6] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// Further headers that are not forwarded to workers.
///
/// `Accept-Encoding`: the gateway reads usage and errors from uncompressed responses; compression is the task of a
/// proxy in front. `Content-Encoding`: the body was read uncompressed. `Cookie`: a secret of the gateway's site that no
/// engine reads. [`ToWorker`] sets `Authorization`. `X-Api-Key`: the key of Anthropic's clients for the gateway.
const NOT_TO_WORKERS: [HeaderName; 8] = [
    header::HOST,
    header::CONTENT_LENGTH,
    header::EXPECT,
    header::ACCEPT_ENCODING,
    header::CONTENT_ENCODING,
    header::COOKIE,
    header::AUTHORIZATION,
    API_KEY,
];

/// Headers that are not forwarded to clients besides hop-by-hop headers, because they identify a worker or a way around
/// the gateway, which also decides about pages of other origins. `hyper` sets `Content-Length` from the body; the value of a worker that also sends chunks is
/// unreliable.
const NOT_TO_CLIENTS: [HeaderName; 6] = [
    header::ACCESS_CONTROL_ALLOW_ORIGIN,
    header::CONTENT_LENGTH,
    header::SERVER,
    header::SET_COOKIE,
    header::ALT_SVC,
    HeaderName::from_static("x-powered-by"),
];

/// Prefixes of headers that select a worker, a rank or a cache source in some engine, sidecar or gateway, and of
/// Pointsman's own headers. They pass in neither direction. `-` also matches `_`, because some servers treat them as
/// equal.
///
/// `x-data-parallel-`: vLLM, SGLang and llm-d. `x-dp-`, `x-worker-`, `x-prefill` (`x-prefiller-host-port`), `x-decode`,
/// `x-encoder-`, `x-dynamo-`: llm-d's sidecar and Dynamo. `x-gateway-`: the Gateway API's inference extension.
/// `x-override-`, `x-smg-`: SGLang, and its gateway.
const STRIPPED: [&str; 12] = [
    "proxy-",
    "x-data-parallel-",
    "x-decode",
    "x-dp-",
    "x-dynamo-",
    "x-encoder-",
    "x-gateway-",
    "x-override-",
    "x-pointsman-",
    "x-prefill",
    "x-smg-",
    "x-worker-",
];

/// Reads the request options that the headers contain: `X-Pointsman-Priority`, `X-Pointsman-Priority-Jump`,
/// `X-Pointsman-Deadline-Ms`, `X-Pointsman-Class`, `X-Session-Id`, `X-Pointsman-Expected-Output-Tokens`,
/// `X-Pointsman-No-Queue`, `X-Pointsman-TTFT-Ms`, `X-Pointsman-ITL-Ms` and `X-Pointsman-On-Target-Miss`. The targets are
/// also read from llm-d's headers.
///
/// ```
/// use axum::http::HeaderMap;
/// use pointsman_gateway::formats::openai::request_options;
///
/// let mut headers = HeaderMap::new();
/// headers.insert("x-pointsman-priority", "5".parse()?);
/// assert_eq!(request_options(&headers)?.strict_priority, 5);
/// headers.insert("x-pointsman-priority", "high".parse()?);
/// let error = request_options(&headers).unwrap_err();
/// assert_eq!(error.to_string(), "header x-pointsman-priority must be a whole number from 0 to 4294967295");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// 400 with the name of an invalid or repeated header.
pub fn request_options(headers: &HeaderMap) -> Result<RequestOptions, ApiError> {
    let strict_priority = whole(headers, PRIORITY, 0..=u32::MAX)?;
    let priority_jump =
        read(headers, PRIORITY_JUMP, seconds, || format!("must be a number of seconds from 0 to {PRIORITY_JUMP_MAX}"))?;
    let deadline = whole(headers, DEADLINE_MS, 1..=DEADLINE_MS_MAX)?.map(|ms| Duration::from_millis(ms.into()));
    let policy_class = text(headers, CLASS, CLASS_BYTES_MAX)?;
    let session_id = text(headers, SESSION_ID, SessionId::BYTES_MAX)?;
    let expected_output_tokens = whole(headers, EXPECTED_OUTPUT_TOKENS, 1..=u32::MAX)?;
    let [ttft_target, itl_target] = [target(headers, TTFT_MS)?, target(headers, ITL_MS)?];
    let on_target_miss =
        read(headers, ON_TARGET_MISS, OnTargetMiss::from_name, || "must be serve or reject".to_owned())?;
    let do_not_queue = read(headers, NO_QUEUE, |given| given.parse().ok(), || "must be true or false".to_owned())?;
    Ok(RequestOptions {
        strict_priority: strict_priority.unwrap_or(0),
        priority_jump: priority_jump.unwrap_or(0.0),
        deadline,
        policy_class,
        session_id,
        expected_output_tokens,
        ttft_target,
        itl_target,
        on_target_miss,
        do_not_queue: do_not_queue.unwrap_or(false),
        ..RequestOptions::default()
    })
}

/// Value of one header through `parse`, or an error with its `rule`.
fn read<T>(
    headers: &HeaderMap,
    name: &'static str,
    parse: impl FnOnce(&str) -> Option<T>,
    rule: impl FnOnce() -> String,
) -> Result<Option<T>, ApiError> {
    let mut values = headers.get_all(name).iter();
    let Some(value) = values.next() else { return Ok(None) };
    if values.next().is_some() {
        return Err(ApiError::header_invalid(name, "must occur once"));
    }
    str::from_utf8(value.as_bytes())
        .ok()
        .and_then(parse)
        .map(Some)
        .ok_or_else(|| ApiError::header_invalid(name, &rule()))
}

/// A latency target from the first header of these that is present.
fn target(headers: &HeaderMap, names: [&'static str; 3]) -> Result<Option<Duration>, ApiError> {
    let Some(name) = names.into_iter().find(|name| headers.contains_key(*name)) else { return Ok(None) };
    let rule = || format!("must be a number of milliseconds from {TARGET_MS_MIN} to {TARGET_MS_MAX}");
    read(headers, name, fractional_millis, rule)
}

fn fractional_millis(given: &str) -> Option<Duration> {
    let millis = given.parse::<f64>().ok().filter(|millis| (TARGET_MS_MIN..=TARGET_MS_MAX).contains(millis))?;
    Duration::try_from_secs_f64(millis / 1e3).ok()
}

fn whole(headers: &HeaderMap, name: &'static str, range: RangeInclusive<u32>) -> Result<Option<u32>, ApiError> {
    // Digits only; Rust's number parsers also accept a sign.
    let digits = |given: &str| given.bytes().all(|byte| byte.is_ascii_digit()).then(|| given.parse().ok()).flatten();
    let rule = || format!("must be a whole number from {} to {}", range.start(), range.end());
    read(headers, name, |given| digits(given).filter(|number| range.contains(number)), rule)
}

fn text(headers: &HeaderMap, name: &'static str, bytes_max: usize) -> Result<Option<Arc<str>>, ApiError> {
    let parse = |given: &str| (1..=bytes_max).contains(&given.len()).then(|| Arc::from(given));
    read(headers, name, parse, || format!("must have 1 to {bytes_max} bytes of UTF-8"))
}

fn seconds(given: &str) -> Option<f64> {
    // NaN is in no range.
    given.parse().ok().filter(|seconds| (0.0..=PRIORITY_JUMP_MAX).contains(seconds))
}

/// The client's request id if it is fit for logs: exactly one, with 1 to 128 visible ASCII characters.
pub fn request_id(headers: &HeaderMap) -> Option<&str> {
    let mut values = headers.get_all(REQUEST_ID).iter();
    let id = values.next()?.to_str().ok()?;
    let is_fit = (1..=REQUEST_ID_BYTES_MAX).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_graphic());
    (is_fit && values.next().is_none()).then_some(id)
}

/// `Authorization` header for the worker.
#[derive(Clone, Copy)]
pub enum Authorization<'a> {
    /// None: the client's key was for the gateway.
    Drop,
    /// The client's header; the worker checks it.
    Pass,
    /// The key of the workers, including `Bearer `.
    Key(&'a HeaderValue),
}

/// Headers that the gateway sets for a worker.
#[derive(Clone, Copy)]
pub struct ToWorker<'a> {
    /// `X-Request-Id`: visible ASCII.
    pub request_id: &'a str,
    /// `X-data-parallel-rank`; `None` for single-rank workers, which do not accept it.
    pub data_parallel_rank: Option<u32>,
    /// `Authorization`.
    pub authorization: Authorization<'a>,
}

/// Client headers for a worker, including `traceparent` and `tracestate`.
pub fn to_worker(client: &HeaderMap, own: ToWorker<'_>) -> HeaderMap {
    let mut headers = passing(client, &NOT_TO_WORKERS);
    let key = match own.authorization {
        Authorization::Drop => None,
        Authorization::Pass => client.get(header::AUTHORIZATION),
        Authorization::Key(key) => Some(key),
    };
    if let Some(mut key) = key.cloned() {
        key.set_sensitive(true);
        headers.insert(header::AUTHORIZATION, key);
    }
    if let Some(rank) = own.data_parallel_rank {
        headers.insert(DATA_PARALLEL_RANK, HeaderValue::from(rank));
    }
    set_request_id(&mut headers, own.request_id);
    headers
}

/// Worker response headers for the client.
pub fn to_client(worker: &HeaderMap, request_id: &str) -> HeaderMap {
    let mut headers = passing(worker, &NOT_TO_CLIENTS);
    set_request_id(&mut headers, request_id);
    headers
}

/// All headers except connection headers, headers that select a worker, and `dropped`. Reads each byte of `Connection`
/// once, for any number of names.
fn passing(given: &HeaderMap, dropped: &[HeaderName]) -> HeaderMap {
    let mut passing = HeaderMap::with_capacity(given.len() + 3);
    for (name, value) in given {
        if !HOP_BY_HOP.contains(name) && !dropped.contains(name) && !is_stripped(name.as_str()) {
            passing.append(name, value.clone());
        }
    }
    for value in given.get_all(header::CONNECTION) {
        for named in value.as_bytes().split(|byte| *byte == b',') {
            // Invalid names match no header.
            if let Ok(named) = HeaderName::from_bytes(named.trim_ascii()) {
                passing.remove(named);
            }
        }
    }
    passing
}

/// Names of the client's headers that select a worker, a rank or a cache source, or are Pointsman's own.
pub(crate) fn stripped_headers(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    headers.keys().map(HeaderName::as_str).filter(|name| is_stripped(name))
}

/// `name` is lower case, as all header names are.
fn is_stripped(name: &str) -> bool {
    let is_like = |(byte, of): (&u8, u8)| *byte == of || (*byte == b'_' && of == b'-');
    STRIPPED.iter().any(|prefix| {
        let start = name.as_bytes().get(..prefix.len());
        start.is_some_and(|start| start.iter().zip(prefix.bytes()).all(is_like))
    })
}

fn set_request_id(headers: &mut HeaderMap, id: &str) {
    headers.remove(REQUEST_ID);
    if let Ok(id) = HeaderValue::from_str(id) {
        headers.insert(REQUEST_ID, id);
    }
}

#[cfg(test)]
mod tests;
