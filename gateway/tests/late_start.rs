//! A router that subscribes after the engine has dropped its first events: answers show the old conversations.

use pointsman::protocol::WorkerId;
use pointsman::{Prompt, RouteRequest, Router, RouterConfig, StreamState};
use pointsman_trial::mock::{MockConfig, MockEngine};
use serde_json::json;

use crate::common::proxy::{published, request, until};

const BLOCK_SIZE: u32 = 4;
const CONVERSATIONS: u32 = 8;

/// The prompt of a turn: the first blocks are common, each turn adds three.
fn prompt(conversation: u32, turn: u32) -> Vec<u32> {
    (0..20 + 12 * turn).map(|at| if at < 8 { at } else { conversation * 1_000 + at }).collect()
}

/// Sends a prompt to the engine. Returns the number of cached tokens.
async fn complete(engine: &MockEngine, prompt: &[u32]) -> u32 {
    let body = json!({ "prompt": prompt, "max_tokens": 2 }).to_string();
    let answer = request(engine.address(), "POST", "/v1/completions", "", body.as_bytes()).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
    u32::try_from(cached.expect("reported")).expect("tokens of a prompt")
}

/// Sends a prompt through the router. Returns the predicted and the delivered cached tokens.
async fn route(router: &Router, engine: &MockEngine, prompt: &[u32]) -> (u32, u32) {
    let placement = router.route(RouteRequest::new("turn", Prompt::Tokens(prompt))).await.expect("placed");
    let delivered = complete(engine, prompt).await;
    let applied = || router.kv_sources()[0].applied.map_or(0, |last| last + 1);
    until("the events are applied", || applied() == engine.sequence_next(0)).await;
    placement.delivered_cached_tokens(delivered);
    let predicted = placement.cached_tokens();
    drop(placement);
    router.flush().await.expect("up");
    (predicted, delivered)
}

#[tokio::test]
async fn old_conversations_are_predicted_from_their_second_turn() {
    let config = MockConfig {
        block_size: BLOCK_SIZE,
        kv_blocks: 1_000,
        replay_messages_max: 2,
        max_model_len: Some(400),
        time_scale: 0.0,
        ..MockConfig::default()
    };
    let engine = MockEngine::start(config).await.expect("the engine starts");
    for turn in 0..3 {
        for conversation in 0..CONVERSATIONS {
            complete(&engine, &prompt(conversation, turn)).await;
        }
    }
    let config = RouterConfig { block_size: Some(BLOCK_SIZE), ..RouterConfig::default() };
    let router = Router::builder(config).worker(WorkerId(1), published(&engine)).start().await.expect("starts");
    until("the first events are lost", || router.kv_sources()[0].state == StreamState::Cold).await;
    for turn in 3..6 {
        for conversation in 0..CONVERSATIONS {
            let (predicted, delivered) = route(&router, &engine, &prompt(conversation, turn)).await;
            assert_eq!(delivered, 20 + 12 * (turn - 1));
            // Only the common blocks are known from other conversations.
            assert!(if turn == 3 { predicted <= 8 } else { predicted == delivered }, "{predicted} in turn {turn}");
        }
    }
    // A repetition of the whole prompt: the last block is computed.
    let (predicted, delivered) = route(&router, &engine, &prompt(0, 5)).await;
    assert_eq!((predicted, delivered), (76, 76));
}
