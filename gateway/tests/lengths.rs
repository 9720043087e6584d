//! Lengths at the gateway: prompts above the model's context length, and output limits.

use pointsman::policy::Policy;
use pointsman_gateway::app::Gateway;
use serde_json::json;
use tokio::net::TcpStream;

use crate::common::proxy::{Act, Scripted, at_rest, gateway, post, send, settings, stream, until, worker};

const COMPLETIONS: &str = "/v1/completions";

#[tokio::test]
async fn prompts_above_the_model_length_are_rejected_before_placement() {
    let mut settings = settings(vec![worker(1, "http://127.0.0.1:9", 1)]); // no listener
    settings.models[0].workers[0].config.max_model_len = Some(8);
    let gateway = gateway(settings).await;
    let body = |tokens: u32| json!({ "model": "mock", "prompt": (1..=tokens).collect::<Vec<_>>(), "max_tokens": 1 });
    let refused = post(&gateway, COMPLETIONS, &body(9)).await;
    assert_eq!((refused.status, refused.code().as_str()), (400, "context_length_exceeded"), "{refused:?}");
    assert!(refused.text().contains("9 tokens") && refused.text().contains("8 tokens"), "{refused:?}");
    assert_eq!(post(&gateway, COMPLETIONS, &body(8)).await.status, 502, "a prompt of the maximum length is placed");
    at_rest(&gateway).await;
}

/// The next turn of a conversation arrives while the previous turn is still in progress. It follows the cached prompt
/// whatever its `max_tokens`. An explicit expected output length takes effect.
#[tokio::test]
async fn an_output_limit_does_not_change_placement() {
    for (headers, max_tokens, follows) in [
        ("", 200, true),
        ("", 4_096, true),
        ("", 32_768, true),
        ("x-pointsman-expected-output-tokens: 32768\r\n", 32_768, false),
        ("x-pointsman-expected-output-tokens: 32768\r\n", 200, true),
    ] {
        let first = "data: {\"choices\":[{\"index\":0,\"text\":\"so\"}]}\n\n";
        let hangs = move |_| [stream(&[first]), vec![Act::Hang]].concat();
        let workers = [Scripted::start(hangs).await, Scripted::start(hangs).await];
        let mut settings = settings(vec![worker(1, &workers[0].url(), 1), worker(2, &workers[1].url(), 1)]);
        settings.models[0].router.policy = Policy::Latency.into();
        let gateway = gateway(settings).await;
        let request_counts = || workers.each_ref().map(|worker| worker.requests().len());
        let turn = turn(&gateway, headers, 6_400, max_tokens).await;
        let mut head = [0; 1];
        turn.peek(&mut head).await.expect("response received");
        let home = usize::from(request_counts()[0] == 0);
        let next = self::turn(&gateway, headers, 6_600, max_tokens).await;
        until("the next turn was sent", || request_counts().iter().sum::<usize>() == 2).await;
        assert_eq!(request_counts()[home] == 2, follows, "{headers:?} and {max_tokens}: {:?}", request_counts());
        drop((turn, next));
        at_rest(&gateway).await;
    }
}

async fn turn(gateway: &Gateway, headers: &str, tokens: u32, max_tokens: u32) -> TcpStream {
    let prompt: Vec<u32> = (1..=tokens).collect();
    let body = json!({ "model": "mock", "prompt": prompt, "max_tokens": max_tokens, "stream": true });
    send(gateway.address(), "POST", COMPLETIONS, headers, body.to_string().as_bytes()).await
}
