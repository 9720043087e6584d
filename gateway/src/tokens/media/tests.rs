use std::num::NonZeroU32;
use std::path::PathBuf;
use std::sync::Arc;

use axum::body::Bytes;
use pointsman::hashing::HashScheme;
use pointsman::internals::hashing::{BlockHasher, MmBlocks};
use pointsman::internals::wire::{Decoder, DecoderLimits, WireConfig};
use pointsman::protocol::{BlockHash, KvEvent, RouterEvent, WorkerId, WorkerRank};
use proptest::prelude::*;
use proptest::sample::select;

use super::layout::MediaLayout;
use super::lengths::MediaLengths;
use super::placeholders::Placeholders;
use super::*;
use crate::tokens::PromptMedia;
use crate::tokens::local::Local;
use crate::tokens::meters::TokenMeters;

/// Ids of the special tokens in `tests/data/tokens/vision.json`.
const IM_START: u32 = 563;
const VISION_START: u32 = 567;
const IMAGE_PAD: u32 = 568;
const VIDEO_PAD: u32 = 570;

const DATA_URL: &str = "data:image/png;base64,iVBORw0KGgo=";
const OFF: Naming<'_> = Naming { is_on: false, salt: None };
const ON: Naming<'_> = Naming { is_on: true, salt: None };

fn local(template: &str) -> Local {
    let data = |name: &str| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokens").join(name);
    let meters = Arc::new(TokenMeters::new("m"));
    Local::load(&data("vision.json"), Some(&data(template)), 1 << 20, || 0, meters).unwrap()
}

fn chat(messages: &serde_json::Value) -> ChatParts {
    ChatParts { messages: Bytes::from(messages.to_string()), ..ChatParts::default() }
}

fn image(url: &str, uuid: Option<&str>) -> serde_json::Value {
    let mut part = serde_json::json!({ "type": "image_url", "image_url": { "url": url } });
    if let Some(uuid) = uuid {
        part["uuid"] = uuid.into();
    }
    part
}

fn user(parts: &[serde_json::Value]) -> serde_json::Value {
    serde_json::json!({ "role": "user", "content": parts })
}

fn text(text: &str) -> serde_json::Value {
    serde_json::json!({ "type": "text", "text": text })
}

fn block_size(tokens: u32) -> NonZeroU32 {
    NonZeroU32::new(tokens).unwrap()
}

fn request_hashes(ids: &[u32], spans: &[pointsman::hashing::MmSpan], size: u32) -> Vec<BlockHash> {
    let mm = MmBlocks::split(spans, ids.len(), block_size(size)).unwrap();
    BlockHasher::new(HashScheme::new(block_size(size))).block_hashes(ids, &mm).to_vec()
}

/// A batch with one `BlockStored` in vLLM's array form: all complete blocks of the prompt, and the extra keys of each
/// block: name and offset of the item relative to the block, in the order of the items.
fn stored(ids: &[u32], items: &[(&str, usize, usize)], size: usize) -> Vec<u8> {
    use rmp::encode::{write_array_len, write_f64, write_nil, write_sint, write_str, write_uint};
    let mut out = Vec::new();
    let n_blocks = ids.len() / size;
    let len = |len: usize| u32::try_from(len).unwrap();
    write_array_len(&mut out, 2).unwrap();
    write_f64(&mut out, 0.0).unwrap();
    write_array_len(&mut out, 1).unwrap();
    write_array_len(&mut out, 9).unwrap();
    write_str(&mut out, "BlockStored").unwrap();
    write_array_len(&mut out, len(n_blocks)).unwrap();
    for block_idx in 0..n_blocks {
        write_uint(&mut out, 1_000 + block_idx as u64).unwrap();
    }
    write_nil(&mut out).unwrap();
    write_array_len(&mut out, len(n_blocks * size)).unwrap();
    for id in &ids[..n_blocks * size] {
        write_uint(&mut out, u64::from(*id)).unwrap();
    }
    write_uint(&mut out, size as u64).unwrap();
    write_nil(&mut out).unwrap(); // lora_id
    write_str(&mut out, "GPU").unwrap();
    write_nil(&mut out).unwrap(); // lora_name
    write_array_len(&mut out, len(n_blocks)).unwrap();
    for block_start in (0..n_blocks).map(|block_idx| block_idx * size) {
        let overlaps =
            |(_, start, length): &&(&str, usize, usize)| *start < block_start + size && start + length > block_start;
        let keys: Vec<_> = items.iter().filter(overlaps).collect();
        if keys.is_empty() {
            write_nil(&mut out).unwrap();
            continue;
        }
        write_array_len(&mut out, len(keys.len())).unwrap();
        for (name, start, _) in keys {
            write_array_len(&mut out, 2).unwrap();
            write_str(&mut out, name).unwrap();
            write_sint(&mut out, *start as i64 - block_start as i64).unwrap();
        }
    }
    out
}

/// Block hashes of the events in a batch.
fn event_hashes(batch: &[u8], size: u32) -> Vec<BlockHash> {
    let rank = WorkerRank::new(WorkerId(1), 0);
    let limits = DecoderLimits::default();
    let config = WireConfig { rank, ranks: 0..1, block_size: block_size(size), is_eagle: false, limits };
    let mut events = Vec::new();
    let report = Decoder::new(config).decode(batch, &mut events);
    assert!(report.findings.is_empty(), "{report:?}");
    let of = |event: &RouterEvent| match &event.data {
        KvEvent::Stored { blocks, .. } => blocks.iter().map(|block| block.block_hash).collect::<Vec<_>>(),
        other => panic!("{other:?}"),
    };
    events.iter().flat_map(of).collect()
}

/// Records the length of the prompt as an engine with `image_tokens` tokens per image reports it.
fn learn(local: &Local, parts: &ChatParts, naming: Naming<'_>, prompt_tokens: usize) {
    let (_, media) = local.conversation(parts, naming, None).unwrap();
    media.unwrap().report.expect("the length is of use").record(u32::try_from(prompt_tokens).unwrap());
}

/// Tokens of a text without added ones.
fn bare(local: &Local, text: &str) -> Vec<u32> {
    let mut ids = local.text(text).unwrap();
    ids.retain(|id| !(558..=559).contains(id));
    ids
}

/// Number of equal blocks at the beginning.
fn matched(request: &[BlockHash], event: &[BlockHash]) -> usize {
    request.iter().zip(event).take_while(|(request, event)| request == event).count()
}

/// The values are fixed: a change would separate replicas of different versions.
#[test]
fn names_of_images_are_fixed_and_salted() {
    let local = local("vision.jinja");
    let name = |part: serde_json::Value, naming| {
        let Outline { items, names, .. } = Outline::read(&chat(&[user(&[part])].into()), naming).unwrap();
        (items[0].name.clone(), names.len())
    };
    let (plain, edits) = name(image(DATA_URL, None), ON);
    assert_eq!(
        (plain.as_deref(), edits),
        (Some("ae5d8c2c2aea21f0fdad1858fae48608de74642b4e6b423ca5a796c25b7a5ec8"), 1)
    );
    let salted = name(image(DATA_URL, None), Naming { is_on: true, salt: Some("tenant") }).0.unwrap();
    assert!(salted.len() == 64 && Some(&salted) != plain.as_ref());
    assert_ne!(name(image("data:image/png;base64,AAAA", None), ON).0, plain);
    // The client's name is kept. The content of other URLs may change.
    assert_eq!(name(image(DATA_URL, Some("mine")), ON), (Some("mine".to_owned()), 0));
    assert_eq!(name(image("https://x/y.png", None), ON), (None, 0));
    assert_eq!(name(image(DATA_URL, None), OFF), (None, 0));
    let audio = serde_json::json!({ "type": "input_audio", "input_audio": { "data": "AA", "format": "wav" } });
    assert_eq!(name(audio, ON), (None, 0));
    // Options of media processing change the engine's names.
    let parts = ChatParts { has_media_options: true, ..chat(&[user(&[image(DATA_URL, Some("mine"))])].into()) };
    let (_, media) = local.conversation(&parts, ON, None).unwrap();
    assert!(media.unwrap().unknown_from.is_some());
}

#[test]
fn media_that_cannot_be_expanded_end_the_comparable_part() {
    let local = local("vision.jinja");
    let video = serde_json::json!({ "type": "video_url", "video_url": { "url": "http://x/y.mp4" }, "uuid": "v" });
    let named = || image("http://x/y.png", Some("pic"));
    learn(&local, &chat(&[user(&[named()])].into()), OFF, 100);
    let unknown_from = |parts: &[serde_json::Value]| {
        let (ids, media) = local.conversation(&chat(&[user(parts)].into()), OFF, None).unwrap();
        let media = media.unwrap();
        let from = media.unknown_from.map(|from| ids[from]);
        (from, media.spans.len())
    };
    assert_eq!(unknown_from(&[named(), text("x"), named()]), (None, 2));
    assert_eq!(unknown_from(&[named(), video]), (Some(VISION_START), 2), "from the token before {VIDEO_PAD}");
    // A placeholder in the text: the items cannot be assigned.
    assert_eq!(unknown_from(&[text("<|image_pad|>"), named()]), (Some(IMAGE_PAD), 1));
    // No placeholder for the item.
    let audio = serde_json::json!({ "type": "input_audio", "input_audio": { "data": "AA" } });
    assert_eq!(local.conversation(&chat(&[user(&[audio])].into()), OFF, None).err(), Some(NoTokens::MULTIMODAL));
}

#[test]
fn templates_without_parts_have_placeholders_first() {
    let mut local = local("text.jinja");
    let parts = chat(&[user(&[text("a"), image("http://x/y.png", Some("pic")), text("b")])].into());
    assert_eq!(local.conversation(&parts, OFF, None).err(), Some(NoTokens::MULTIMODAL));
    assert!(!local.set_placeholder("<image>"), "not in this tokenizer");
    assert!(local.set_placeholder("<|vision_start|>"));
    let (ids, media) = local.conversation(&parts, OFF, None).unwrap();
    let prefix = [&[IM_START][..], &bare(&local, "user\n")].concat();
    assert_eq!((&ids[..prefix.len()], media.unwrap().unknown_from), (&prefix[..], Some(prefix.len())));
}

/// The data of media does not count in the limit of a prompt.
#[test]
fn large_images_have_tokens() {
    let local = local("vision.jinja");
    let url = format!("data:image/png;base64,{}", "A".repeat(5 << 20));
    let parts = chat(&[user(&[text("a"), image(&url, None)])].into());
    assert!(local.conversation(&parts, ON, None).unwrap().1.unwrap().names.len() == 1);
    let long = chat(&[user(&[text(&"a".repeat(5 << 20)), image(DATA_URL, None)])].into());
    assert_eq!(local.conversation(&long, ON, None).err(), Some(NoTokens::TOO_LONG));
}

#[test]
fn an_estimate_ends_at_the_context_length() {
    let span = |start, end| pointsman::hashing::MmSpan { mm_hash: 1, start, end };
    let tokens = |unknown_from| crate::tokens::PromptTokens {
        ids: vec![1; 20].into(),
        source: crate::tokens::TokenSource::Local,
        missing: None,
        tokens_min: None,
        media: PromptMedia { spans: vec![span(2, 6), span(8, 20)], unknown_from, ..PromptMedia::default() },
    };
    let limited = |unknown_from, max| {
        let limited = tokens(unknown_from).with_estimate_up_to(max);
        (limited.ids.len(), limited.media.spans)
    };
    assert_eq!(limited(Some(8), Some(12)), (12, vec![span(2, 6), span(8, 12)]));
    assert_eq!(limited(Some(8), Some(4)), (8, vec![span(2, 6)]));
    assert_eq!(limited(Some(8), None).0, 20);
    assert_eq!(limited(None, Some(12)).0, 20, "known lengths are not changed");
}

proptest! {
    /// With known lengths, the hashes equal those of an event with the same items, for any positions and block size.
    #[test]
    fn known_items_have_the_hashes_of_events(
        pieces in prop::collection::vec((prop::collection::vec(0_u32..500, 0..9), 0_usize..4, any::<bool>()), 1..8),
        size in select(&[1_usize, 4, 16][..]),
        is_learned in any::<bool>(),
    ) {
        const NAMES: [&str; 4] = ["a", "b", "img-3", "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"];
        static PLACEHOLDERS: LazyLock<Placeholders> =
            LazyLock::new(|| Placeholders::of(&local("vision.jinja").tokenizer, None).unwrap());
        let placeholders = &*PLACEHOLDERS;
        let lengths = Arc::new(MediaLengths::new());
        let length_of = |name: usize| 1 + name * 5;
        let (mut template, mut engine, mut items, mut placed) = (vec![], vec![], vec![], vec![]);
        for (tokens, name, has_item) in &pieces {
            template.extend_from_slice(tokens);
            engine.extend_from_slice(tokens);
            if *has_item {
                items.push(MediaItem { kind: MediaKind::Image, name: Some(NAMES[*name].to_owned()) });
                placed.push((NAMES[*name], engine.len(), length_of(*name)));
                template.push(IMAGE_PAD);
                engine.resize(engine.len() + length_of(*name), IMAGE_PAD);
            }
        }
        prop_assume!(!items.is_empty());
        let learned = if is_learned { NAMES.len() } else { 2 };
        for (n, name) in NAMES.into_iter().enumerate().take(learned) {
            let item = [MediaItem { kind: MediaKind::Image, name: Some(name.to_owned()) }];
            let layout = MediaLayout::of(&[7, IMAGE_PAD], &item, placeholders, true, &lengths).unwrap();
            layout.report.unwrap().record(u32::try_from(1 + length_of(n)).unwrap());
        }
        let layout = MediaLayout::of(&template, &items, placeholders, true, &lengths).unwrap();
        let request = request_hashes(&layout.ids, &layout.spans, size as u32);
        let event = if engine.len() < size { vec![] } else { event_hashes(&stored(&engine, &placed, size), size as u32) };
        let first_unknown = placed.iter().find(|(name, ..)| NAMES[learned..].contains(name));
        match first_unknown {
            None => prop_assert_eq!((request, layout.unknown_from), (event, None)),
            Some((_, start, _)) => {
                prop_assert_eq!(layout.unknown_from, Some(*start));
                prop_assert_eq!(matched(&request, &event), start / size);
            }
        }
    }
}
