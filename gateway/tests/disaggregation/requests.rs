//! Which requests have two legs, and what operators and clients see of them.

use pointsman_gateway::formats::handover::Protocol;
use pointsman_gateway::settings::{DisaggregationSettings, Settings};
use pointsman_trial::mock::{EngineRole, MockConfig};
use serde_json::json;

use super::pools::{BLOCK_SIZE, Pools, Size, body, completion, scripted};
use super::prompt;
use crate::common::admin;
use crate::common::proxy::{self, FINE_JSON, Scripted, answer, post, until};

fn with_admin(settings: &mut Settings) {
    settings.admin = admin::settings().admin;
}

const PAIR: Size = Size { prefills: 1, decodes: 1, ranks: 1 };

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_cannot_request_the_prefill_model() {
    let pools = Pools::start(Protocol::VllmNixl, PAIR, |_| {}).await;
    let mut request = body(&prompt(1, 4), 2, false);
    request["model"] = "mock-prefill".into();
    let answer = post(&pools.gateway, "/v1/completions", &request).await;
    assert_eq!((answer.status, answer.code().as_str()), (404, "model_not_found"));
    let list = proxy::get(&pools.gateway, "/v1/models").await.json();
    let names: Vec<_> = list["data"].as_array().expect("a list").iter().map(|model| &model["id"]).collect();
    assert_eq!(names, ["mock"]);
    // The only model for clients needs no name.
    let request = json!({ "prompt": prompt(1, 4), "max_tokens": 2 });
    let answer = post(&pools.gateway, "/v1/completions", &request).await;
    assert_eq!((answer.status, answer.header("x-pointsman-prefill")), (200, Some("remote")), "{}", answer.text());
    pools.at_rest().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_leg_has_the_key_of_its_pool() {
    let keys = ["key-of-decode-0123", "key-of-prefill-012"]; // in the order of the models
    for protocol in [Protocol::VllmNixl, Protocol::VllmMooncake, Protocol::Sglang] {
        let configure = |config: &mut MockConfig| {
            let key = keys[usize::from(config.role == EngineRole::Prefill)];
            config.api_key = Some(key.to_owned());
        };
        let change = |settings: &mut Settings| {
            for (model, key) in settings.models.iter_mut().zip(keys) {
                model.worker_api_key_file = Some(admin::file(key.as_bytes()));
            }
        };
        let pools = Pools::start_with(protocol, PAIR, configure, change).await;
        let answer = pools.complete(&prompt(5, 4), 2, true).await;
        assert_eq!((answer.status, answer.header("x-pointsman-prefill")), (200, Some("remote")), "{}", answer.text());
        pools.at_rest().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_without_hand_over_stay_on_the_decode_rank() {
    let pools = Pools::start(Protocol::VllmNixl, PAIR, |_| {}).await;
    let mut request = body(&prompt(2, 4), 3, false);
    request["echo"] = true.into();
    let answer = post(&pools.gateway, "/v1/completions", &request).await;
    assert_eq!((answer.status, answer.header("x-pointsman-prefill")), (200, Some("unsplit")), "{}", answer.text());
    pools.at_rest().await;
    assert_eq!(Pools::sum(&pools.prefills, |sums| sums.legs_prefill + sums.aggregated), 0);
    assert_eq!(Pools::sum(&pools.decodes, |sums| sums.aggregated), 1);
    assert_eq!(pools.prefills("unsplit").await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prompts_shorter_than_a_block_are_computed_again() {
    let pools = Pools::start(Protocol::VllmNixl, PAIR, |_| {}).await;
    let answer = pools.complete(&[1, 2, 3], 4, true).await;
    assert_eq!((answer.status, answer.header("x-pointsman-prefill")), (200, Some("remote")), "{}", answer.text());
    pools.at_rest().await;
    assert_eq!(Pools::sum(&pools.prefills, |sums| sums.blocks_held_total), 0, "no block is complete");
    assert_eq!(Pools::sum(&pools.decodes, |sums| sums.aggregated), 1, "without parameters");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prompts_cached_on_the_decode_rank_skip_the_prefill_leg() {
    let change = |settings: &mut Settings| {
        settings.models[0].disaggregation.as_mut().expect("set").skip = true;
    };
    let pools = Pools::start(Protocol::VllmNixl, PAIR, change).await;
    let prompt = prompt(3, 20);
    let first = pools.complete(&prompt, 2, false).await;
    assert_eq!(first.header("x-pointsman-prefill"), Some("remote"), "{}", first.text());
    pools.until_indexed("mock", &prompt, 20).await;
    let second = pools.complete(&prompt, 2, false).await;
    assert_eq!(second.header("x-pointsman-prefill"), Some("skipped"), "{}", second.text());
    assert_eq!(completion(&second).1, Some(u64::from(20 * BLOCK_SIZE)), "its own cache counts");
    assert_eq!((pools.prefills("remote").await, pools.prefills("skipped").await), (1, 1));
    pools.at_rest().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_complete_context_leg_is_the_whole_response() {
    let pools = Pools::start(Protocol::TensorrtLlm, PAIR, |_| {}).await;
    for is_stream in [false, true] {
        let answer = pools.complete(&prompt(4, 4), 1, is_stream).await;
        assert_eq!(answer.header("x-pointsman-prefill"), Some("complete"), "{}", answer.text());
        assert!(!completion(&answer).0.is_empty());
        assert!(!answer.text().contains("disaggregated_params") && !answer.text().contains("prompt_token_ids"));
        assert_eq!(answer.text().ends_with("data: [DONE]\n\n"), is_stream);
    }
    pools.at_rest().await;
    assert_eq!(Pools::sum(&pools.decodes, |sums| sums.legs_decode + sums.aggregated), 0);
    assert_eq!(pools.prefills("complete").await, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_the_prefill_engine_rejects_has_no_decode_leg() {
    let rejection = "{\"error\":{\"message\":\"no\"}}";
    let prefill = Scripted::start(move |_| answer("400 Bad Request", rejection)).await;
    let decode = Scripted::start(|_| answer("200 OK", FINE_JSON)).await;
    let gateway = scripted(&prefill, &decode, 1, DisaggregationSettings::default()).await;
    let answer = post(&gateway, "/v1/completions", &body(&prompt(10, 4), 5, false)).await;
    assert_eq!((answer.status, answer.text()), (400, rejection));
    assert_eq!((prefill.requests().len(), decode.requests().len()), (1, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn explanations_have_both_decisions() {
    let pools = Pools::start(Protocol::VllmNixl, PAIR, with_admin).await;
    let prompt = prompt(6, 8);
    assert_eq!(pools.complete(&prompt, 2, false).await.status, 200);
    pools.until_indexed("mock-prefill", &prompt, 8).await;
    let address = pools.gateway.admin_address().expect("the admin listener is configured");
    let authorization = format!("authorization: Bearer {}\r\n", admin::TOKEN);
    let query = json!({ "tokens": prompt }).to_string();
    let explained =
        proxy::request(address, "POST", "/admin/models/mock/explain", &authorization, query.as_bytes()).await;
    assert_eq!(explained.status, 200, "{}", explained.text());
    let explained = explained.json();
    assert_eq!(explained["prefill"]["model"], "mock-prefill");
    assert!(explained["explanation"].is_object() && explained["prefill"]["explanation"].is_object(), "{explained}");
    pools.at_rest().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefill_pool_without_workers_is_not_needed() {
    let pools = Pools::start(Protocol::VllmNixl, Size { prefills: 0, ..PAIR }, with_admin).await;
    let answer = pools.complete(&prompt(7, 4), 2, true).await;
    assert_eq!((answer.status, answer.header("x-pointsman-prefill")), (200, Some("fallback")), "{}", answer.text());
    pools.at_rest().await;
    until("the decode engine is idle", || pools.decodes.iter().all(|engine| engine.is_quiet())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_legs_have_the_request_id_and_a_rank() {
    let prefilled = "{\"choices\":[{\"finish_reason\":\"length\",\"text\":\"a\"}],\"kv_transfer_params\":{}}";
    let prefill = Scripted::start(move |_| answer("200 OK", prefilled)).await;
    let decode = Scripted::start(|_| answer("200 OK", FINE_JSON)).await;
    for protocol in [Protocol::VllmNixl, Protocol::TensorrtLlm] {
        let disaggregation = DisaggregationSettings { protocol, ..DisaggregationSettings::default() };
        let gateway = scripted(&prefill, &decode, 2, disaggregation).await;
        let body = body(&prompt(9, 4), 5, false).to_string();
        let headers = "x-request-id: of-the-client\r\n";
        let answer = proxy::request(gateway.address(), "POST", "/v1/completions", headers, body.as_bytes()).await;
        assert_eq!((answer.status, answer.text()), (200, FINE_JSON), "{protocol}");
        for engine in [&prefill, &decode] {
            let leg = engine.requests().pop().expect("a leg");
            assert_eq!(leg.header("x-request-id"), Some("of-the-client"), "{protocol}");
            assert!(["0", "1"].map(Some).contains(&leg.header("x-data-parallel-rank")), "{protocol}: {}", leg.head);
        }
    }
}
