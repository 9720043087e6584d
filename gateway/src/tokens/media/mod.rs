//! Media parts of a conversation: images, audio and video.
//!
//! Finds the media parts of messages, removes their data before templating, and determines the names under which
//! vLLM's KV events identify them: the `uuid` of a part. [`layout`] expands placeholder tokens, and [`lengths`] holds
//! the learned lengths of items.
//!
//! An item without a name, of unknown length, or in a structured placeholder ends the comparable part of the prompt:
//! the tokens before it count alone.

pub(super) mod layout;
pub(super) mod lengths;
pub(super) mod placeholders;

use std::borrow::Cow;
use std::sync::LazyLock;

use aho_corasick::AhoCorasick;
use axum::body::Bytes;
use pointsman::named;
use ring::digest::{SHA256, digest};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use super::reason::NoTokens;
use crate::formats::openai::{ChatParts, MediaName};

/// Maximum number of media parts of one conversation.
const ITEMS_MAX: usize = 4_096;

named! {
/// Kind of a media part, with its type in the messages for a template.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MediaKind {
    Image = "image",
    Audio = "audio",
    Video = "video",
}
}

impl MediaKind {
    /// The kind of a part in the messages for a template.
    pub(super) fn of_part(part_type: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == part_type)
    }

    /// The kind of a client's part.
    fn of_client(part_type: &str) -> Option<Self> {
        match part_type {
            "image_url" => Some(Self::Image),
            "input_audio" | "audio_url" => Some(Self::Audio),
            "video_url" => Some(Self::Video),
            _ => None,
        }
    }
}

/// One media part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MediaItem {
    pub(super) kind: MediaKind,
    /// Identifier in KV events, if known.
    pub(super) name: Option<String>,
}

/// How names are assigned to parts without `uuid`.
#[derive(Clone, Copy)]
pub(super) struct Naming<'a> {
    /// Whether images in data URLs receive a name.
    pub(super) is_on: bool,
    /// Cache salt of the request: equal images of requests with different salts have different names.
    pub(super) salt: Option<&'a str>,
}

/// A conversation without the data of its media parts.
pub(super) struct Outline {
    /// The conversation, with parts such as `{"type":"image"}`.
    pub(super) parts: ChatParts,
    /// The removed parts, in order.
    pub(super) items: Vec<MediaItem>,
    /// Names to be inserted into the client's messages.
    pub(super) names: Vec<MediaName>,
}

#[derive(Deserialize)]
struct OutlineMessage<'a> {
    #[serde(borrow)]
    content: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct OutlinePart<'a> {
    #[serde(borrow, rename = "type")]
    kind: Option<Cow<'a, str>>,
    /// Null is a value, because its place is needed.
    #[serde(borrow, default, deserialize_with = "given")]
    uuid: Option<&'a RawValue>,
    image_url: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Url<'a> {
    #[serde(borrow)]
    url: Cow<'a, str>,
}

/// Whether messages may have media parts. False positives are possible. Keys with escapes are not recognized; such
/// prompts are routed by load.
pub(super) fn may_occur(parts: &ChatParts) -> bool {
    static KINDS: LazyLock<AhoCorasick> = LazyLock::new(|| {
        let kinds = [r#""image_url""#, r#""input_audio""#, r#""audio_url""#, r#""video_url""#];
        AhoCorasick::new(kinds).expect("a few short patterns")
    });
    KINDS.is_match(&parts.messages[..])
}

impl Outline {
    /// Finds the media parts.
    ///
    /// # Errors
    /// An unknown shape of messages, or too many parts.
    pub(super) fn read(parts: &ChatParts, naming: Naming<'_>) -> Result<Self, NoTokens> {
        let json = std::str::from_utf8(&parts.messages).map_err(|_| NoTokens::MALFORMED)?;
        let messages: Vec<OutlineMessage<'_>> = parsed(json)?;
        let mut outline = Self { parts: parts.clone(), items: Vec::new(), names: Vec::new() };
        let (mut stripped, mut copied) = (String::new(), 0);
        let start_of = |raw: &str| raw.as_ptr() as usize - json.as_ptr() as usize;
        for content in messages.iter().filter_map(|message| message.content) {
            if !content.get().starts_with('[') {
                continue;
            }
            let parts_of_message: Vec<&RawValue> = parsed(content.get())?;
            for raw in parts_of_message.into_iter().map(RawValue::get).filter(|raw| raw.starts_with('{')) {
                let part: OutlinePart<'_> = parsed(raw)?;
                let Some(kind) = part.kind.as_deref().and_then(MediaKind::of_client) else { continue };
                if outline.items.len() >= ITEMS_MAX {
                    return Err(NoTokens::TOO_LONG);
                }
                let name = outline.name(kind, &part, naming, start_of(raw), &start_of);
                outline.items.push(MediaItem { kind, name });
                let start = start_of(raw);
                stripped.extend([&json[copied..start], r#"{"type":""#, kind.name(), r#""}"#]);
                copied = start + raw.len();
            }
        }
        if !outline.items.is_empty() {
            stripped.push_str(&json[copied..]);
            outline.parts.messages = Bytes::from(stripped);
        }
        Ok(outline)
    }

    /// Identifier of a part in KV events: the client's `uuid`, or a new one for an image in a data URL.
    fn name(
        &mut self,
        kind: MediaKind,
        part: &OutlinePart<'_>,
        naming: Naming<'_>,
        part_start: usize,
        start_of: &impl Fn(&str) -> usize,
    ) -> Option<String> {
        // vLLM hashes the uuid together with these options.
        if self.parts.has_media_options {
            return None;
        }
        let given = part.uuid.map(RawValue::get);
        if let Some(uuid) = given.filter(|uuid| *uuid != "null") {
            return serde_json::from_str::<String>(uuid).ok().filter(|uuid| !uuid.is_empty());
        }
        if !naming.is_on || kind != MediaKind::Image {
            return None;
        }
        let image_url = part.image_url?.get();
        let url = match serde_json::from_str::<Url<'_>>(image_url) {
            Ok(Url { url }) => url,
            // The short form of some clients.
            Err(_) => serde_json::from_str(image_url).ok().map(Cow::<'_, str>::Owned)?,
        };
        if !url.get(..5).is_some_and(|scheme| scheme.eq_ignore_ascii_case("data:")) {
            return None;
        }
        let name = name_of(&url, naming.salt);
        let (at, json) = match given {
            Some(null) => (start_of(null)..start_of(null) + null.len(), format!("\"{name}\"")),
            None => (part_start + 1..part_start + 1, format!("\"uuid\":\"{name}\",")),
        };
        self.names.push(MediaName { at, json });
        Some(name)
    }
}

fn given<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<&'de RawValue>, D::Error> {
    Deserialize::deserialize(deserializer).map(Some)
}

fn parsed<'a, T: Deserialize<'a>>(json: &'a str) -> Result<T, NoTokens> {
    serde_json::from_str(json).map_err(|_| NoTokens::MALFORMED)
}

/// Name of an image by content: SHA-256 of the digests of salt and URL, as 64 hex digits.
fn name_of(url: &str, salt: Option<&str>) -> String {
    let (salt, url) = (digest(&SHA256, salt.unwrap_or_default().as_bytes()), digest(&SHA256, url.as_bytes()));
    let name = digest(&SHA256, &[salt.as_ref(), url.as_ref()].concat());
    name.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests;
