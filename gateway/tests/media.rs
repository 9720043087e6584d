//! Images in chats: requests with the same picture go to the rank that holds it.

use std::path::PathBuf;
use std::sync::Arc;

use axum::body::Bytes;
use pointsman::hashing::{HashScheme, MmSpan};
use pointsman::internals::hashing::{BlockHasher, MmBlocks};
use pointsman::policy::Policy;
use pointsman::protocol::{
    BlockHash, EngineHash, KvEvent, RouterEvent, StorageTier, StoredBlock, WorkerId, WorkerRank,
};
use pointsman::{Prompt, RequestOptions, RouteRequest};
use pointsman_gateway::app::Gateway;
use pointsman_gateway::formats::openai::{ChatParts, ClientPrompt};
use pointsman_gateway::net::upstream::Upstream;
use pointsman_gateway::settings::{Settings, TokenSourceChoice, TokensSettings};
use pointsman_gateway::tokens::{PromptContext, PromptTokens, Tokens};
use serde_json::{Value, json};

use crate::common::authority::client_trusting;
use crate::common::proxy::{PATIENCE, Scripted, answer, at_rest, gateway, post, settings, worker};

const CHAT: &str = "/v1/chat/completions";
const BLOCK_SIZE: u32 = 4;
/// Placeholder of an image in `tests/data/tokens/vision.json`, and the length of each image of this engine.
const IMAGE_PAD: u32 = 568;
const IMAGE_TOKENS: usize = 21;
const DATA_URL: &str = "data:image/png;base64,iVBORw0KGgo=";

fn tokens_settings(media_uuids: bool) -> TokensSettings {
    let data = |name: &str| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokens").join(name);
    TokensSettings {
        source: TokenSourceChoice::Local,
        tokenizer_file: Some(data("vision.json")),
        chat_template_file: Some(data("vision.jinja")),
        parity_check: false,
        wait_ms: 60_000,
        media_uuids,
        ..TokensSettings::default()
    }
}

fn with_workers(workers: &[Scripted; 2], media_uuids: bool) -> Settings {
    let mut settings = settings(vec![worker(1, &workers[0].url(), 1), worker(2, &workers[1].url(), 1)]);
    let model = &mut settings.models[0];
    model.tokens = tokens_settings(media_uuids);
    model.router.policy = Policy::Kv.into();
    model.router.block_size = Some(BLOCK_SIZE);
    settings
}

fn body(parts: &Value) -> Value {
    json!({ "model": "mock", "messages": [{ "role": "user", "content": parts }] })
}

/// A conversation about one picture.
fn question(url: &str, uuid: Option<&str>) -> Value {
    let mut image = json!({ "type": "image_url", "image_url": { "url": url } });
    if let Some(uuid) = uuid {
        image["uuid"] = uuid.into();
    }
    body(&json!([{ "type": "text", "text": "Look at this picture" }, image, { "type": "text", "text": "Who is it?" }]))
}

/// The tokens of a chat as a gateway without any responses computes them.
async fn tokens_of(chat: &Value) -> PromptTokens<'static> {
    let upstream = Upstream::new(client_trusting(&[]), PATIENCE).into();
    let tokens = Tokens::start(&tokens_settings(true), "mock", upstream, Arc::new(|_, _| None)).await;
    let messages = Bytes::from(chat["messages"].to_string());
    let prompt = ClientPrompt::Chat(Box::new(ChatParts { messages, ..ChatParts::default() }));
    let tokens = tokens.expect("the files can be used").of(&prompt, PromptContext::default()).await;
    PromptTokens {
        ids: tokens.ids.into_owned().into(),
        source: tokens.source,
        missing: tokens.missing,
        tokens_min: tokens.tokens_min,
        media: tokens.media,
    }
}

/// Prompt of the engine: the tokens with one picture of [`IMAGE_TOKENS`] tokens, and the position of the picture.
async fn engine_prompt(chat: &Value) -> (Vec<u32>, usize) {
    let estimated = tokens_of(chat).await;
    let start = estimated.media.unknown_from.expect("one picture of unknown length");
    let after = estimated.ids[start..].iter().position(|id| *id != IMAGE_PAD).expect("text after it");
    let picture = [IMAGE_PAD; IMAGE_TOKENS];
    ([&estimated.ids[..start], &picture, &estimated.ids[start + after..]].concat(), start)
}

fn hashes(ids: &[u32], spans: &[MmSpan]) -> Arc<[BlockHash]> {
    let block_size = BLOCK_SIZE.try_into().expect("not zero");
    let mm = MmBlocks::split(spans, ids.len(), block_size).expect("valid spans");
    BlockHasher::new(HashScheme::new(block_size)).block_hashes(ids, &mm)
}

/// The picture in the engine's prompt.
fn span(name: &str, (_, start): &(Vec<u32>, usize)) -> MmSpan {
    MmSpan { mm_hash: MmSpan::hash_of_id(name).expect("a name"), start: *start, end: start + IMAGE_TOKENS }
}

/// Stores the prompt on the worker.
async fn store(gateway: &Gateway, worker: u64, ids: &[u32], spans: &[MmSpan]) {
    let block =
        |(n, block_hash): (u64, &BlockHash)| StoredBlock { engine_hash: EngineHash(n), block_hash: *block_hash };
    let blocks = (0..).zip(hashes(ids, spans).iter()).map(block).collect();
    let data = KvEvent::Stored { parent: None, blocks };
    let event = RouterEvent { rank: WorkerRank::new(WorkerId(worker), 0), tier: StorageTier::Device, data };
    let router = gateway.router("mock").expect("model is served");
    router.apply_events(vec![event]).await.expect("router is up");
    router.flush().await.expect("router is up");
}

/// Workers whose responses report the length of the engine's prompt.
async fn workers(prompt_tokens: usize) -> [Scripted; 2] {
    let response = json!({
        "choices": [{ "index": 0, "message": { "role": "assistant", "content": "fine" } }],
        "usage": { "prompt_tokens": prompt_tokens, "completion_tokens": 1, "total_tokens": prompt_tokens + 1 },
    });
    let script = move |_| answer("200 OK", &response.to_string());
    [Scripted::start(script.clone()).await, Scripted::start(script).await]
}

fn request_counts(workers: &[Scripted; 2]) -> [usize; 2] {
    workers.each_ref().map(|worker| worker.requests().len())
}

async fn send(gateway: &Gateway, chat: &Value) {
    let response = post(gateway, CHAT, chat).await;
    assert_eq!(response.status, 200, "{response:?}");
    at_rest(gateway).await;
}

/// Cached blocks of the chat on worker 2, as far as the gateway without learned lengths can know.
async fn cached_blocks(gateway: &Gateway, chat: &Value) -> u32 {
    let tokens = tokens_of(chat).await;
    let options = RequestOptions { mm_spans: tokens.media.spans.clone(), ..RequestOptions::default() };
    let request = RouteRequest { options, ..RouteRequest::query(Prompt::Tokens(&tokens.ids)) };
    let router = gateway.router("mock").expect("model is served");
    let scores = router.overlap_scores(request, false).await.expect("router is up");
    let of_worker = scores.ranks.iter().find(|scores| scores.rank.worker == WorkerId(2));
    of_worker.expect("registered").device_blocks
}

#[tokio::test]
async fn requests_with_the_same_picture_go_where_it_is_cached() {
    let known = question("https://x/y.png", Some("pic-1"));
    let prompt = engine_prompt(&known).await;
    let workers = workers(prompt.0.len()).await;
    let gateway = gateway(with_workers(&workers, false)).await;
    // The text before the picture is cached on worker 1, the whole prompt with the picture on worker 2.
    store(&gateway, 1, &prompt.0[..prompt.1], &[]).await;
    send(&gateway, &known).await;
    assert_eq!(request_counts(&workers), [1, 0], "only the text counts, and only worker 1 holds it");
    store(&gateway, 2, &prompt.0, &[span("pic-1", &prompt)]).await;
    for n in 1..=4 {
        send(&gateway, &known).await;
        assert_eq!(request_counts(&workers), [1, n], "the response has shown the length of the picture");
    }
    // Another picture, and a picture at a URL without a name, match up to the picture.
    let text_blocks = u32::try_from(prompt.1).expect("short") / BLOCK_SIZE;
    for other in [question("https://x/y.png", Some("pic-2")), question("https://x/y.png", None)] {
        assert_eq!(cached_blocks(&gateway, &other).await, text_blocks);
    }
    let sent = workers[1].requests()[0].text().to_owned();
    assert!(sent.ends_with(&known.to_string()), "the body is forwarded unchanged: {sent}");
}

#[tokio::test]
async fn images_in_data_urls_receive_names_by_content() {
    let unnamed = question(DATA_URL, None);
    let name = tokens_of(&unnamed).await.media.names[0].json.replace(['"', ',', ':'], "").replace("uuid", "");
    let prompt = engine_prompt(&unnamed).await;
    let workers = workers(prompt.0.len()).await;
    let gateway = gateway(with_workers(&workers, true)).await;
    send(&gateway, &unnamed).await;
    store(&gateway, 2, &prompt.0, &[span(&name, &prompt)]).await;
    let before = request_counts(&workers);
    for n in 1..=3 {
        send(&gateway, &unnamed).await;
        assert_eq!(request_counts(&workers), [before[0], before[1] + n]);
    }
    let sent = |worker: &Scripted| worker.requests().last().map(|request| request.text().to_owned());
    let sent = sent(&workers[1]).expect("a request");
    assert!(sent.contains(&format!(r#""uuid":"{name}""#)), "{sent}");
    // The client's name is kept.
    send(&gateway, &question(DATA_URL, Some("mine"))).await;
    let all: Vec<String> =
        workers.iter().flat_map(Scripted::requests).map(|request| request.text().to_owned()).collect();
    assert_eq!(all.iter().filter(|sent| sent.contains(r#""uuid":"mine""#)).count(), 1);
}
