//! Legs of SGLang that end early.

use pointsman::{Prompt, RouteRequest};
use pointsman_gateway::app::Gateway;
use pointsman_gateway::formats::handover::Protocol;
use pointsman_gateway::settings::DisaggregationSettings;
use serde_json::Value as Json;

use super::pools::{body, scripted};
use super::prompt;
use crate::common::proxy::{Act, FINE, FINE_JSON, Scripted, answer, at_rest, eventually, post, send, until};

async fn engines(
    prefill: impl Fn(usize) -> Vec<Act> + Send + Sync + 'static,
    decode: impl Fn(usize) -> Vec<Act> + Send + Sync + 'static,
) -> (Gateway, Scripted, Scripted) {
    let (prefill, decode) = (Scripted::start(prefill).await, Scripted::start(decode).await);
    let settings = DisaggregationSettings {
        protocol: Protocol::Sglang,
        prefill_attempts_max: 1,
        ..DisaggregationSettings::default()
    };
    (scripted(&prefill, &decode, 1, settings).await, prefill, decode)
}

/// `rid` of the first leg, and those of the aborts.
fn ids(engine: &Scripted) -> (Json, Vec<Json>) {
    let requests = engine.requests();
    let rid = |body: &[u8]| serde_json::from_slice::<Json>(body).expect("JSON")["rid"].clone();
    let aborts = requests.iter().filter(|request| request.head.starts_with("POST /abort_request "));
    (requests.first().map_or(Json::Null, |leg| rid(&leg.body)), aborts.map(|abort| rid(&abort.body)).collect())
}

async fn aborted(engine: &Scripted) {
    until("the leg is aborted", || !ids(engine).1.is_empty()).await;
    let (rid, aborts) = ids(engine);
    assert!(rid.is_string(), "{rid}");
    assert_eq!(aborts, [rid]);
}

/// One response for the leg, and one for each abort.
fn first(leg: Vec<Act>) -> impl Fn(usize) -> Vec<Act> + Send + Sync + 'static {
    move |n| if n == 0 { leg.clone() } else { answer("200 OK", "{}") }
}

/// Waits until the gateway has the response of the prefill leg: its booking has no prefill any more.
async fn prefill_ended(gateway: &Gateway) {
    let router = gateway.router("prefill").expect("the model exists");
    eventually("the prefill leg has ended", async || {
        let loads = router.potential_loads(RouteRequest::query(Prompt::Tokens(&[1]))).await;
        loads.expect("the router responds").iter().all(|load| load.potential_prefill_tokens <= 1)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_before_a_whole_response_aborts_the_decode_leg_after_the_hand_over() {
    let (gateway, prefill, decode) = engines(first(answer("200 OK", FINE_JSON)), first(vec![Act::Hang])).await;
    let request = body(&prompt(601, 4), 5, false).to_string();
    let client = send(gateway.address(), "POST", "/v1/completions", "", request.as_bytes()).await;
    until("both legs are sent", || !prefill.requests().is_empty() && !decode.requests().is_empty()).await;
    prefill_ended(&gateway).await;
    drop(client);
    aborted(&decode).await;
    assert_eq!(ids(&prefill).1, Vec::<Json>::new(), "its leg has ended");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_leg_aborts_the_other() {
    for prefill_fails in [true, false] {
        let (failed, hangs) = (answer("500 Internal Server Error", "{}"), vec![Act::Hang]);
        let (of_prefill, of_decode) = if prefill_fails { (failed, hangs) } else { (hangs, failed) };
        let (gateway, prefill, decode) = engines(first(of_prefill), first(of_decode)).await;
        let answer = post(&gateway, "/v1/completions", &body(&prompt(602, 4), 5, true)).await;
        assert!(answer.status >= 500, "{}", answer.text());
        aborted(if prefill_fails { &decode } else { &prefill }).await;
        at_rest(&gateway).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn complete_requests_are_not_aborted() {
    for (is_stream, fine) in [(true, FINE), (false, FINE_JSON)] {
        let (gateway, prefill, decode) = engines(first(answer("200 OK", fine)), first(answer("200 OK", fine))).await;
        let answer = post(&gateway, "/v1/completions", &body(&prompt(603, 4), 5, is_stream)).await;
        assert_eq!((answer.status, answer.text()), (200, fine));
        at_rest(&gateway).await;
        let (of_prefill, of_decode) = (ids(&prefill), ids(&decode));
        assert_eq!(of_prefill.0, of_decode.0, "both legs have one id");
        assert!(of_prefill.1.is_empty() && of_decode.1.is_empty(), "{of_prefill:?} {of_decode:?}");
    }
}
