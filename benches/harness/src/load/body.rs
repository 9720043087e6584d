//! Request bodies of the load generator.
//!
//! Equal prefixes of tokens give equal prefixes of the request body, for both APIs. Completions contain the prompt as
//! token ids, so its length is exactly that of the workload. Chats only support text: every token id is a made-up word
//! of six letters, in a single user message. A tokenizer splits most of these words into several tokens, and the chat
//! template adds some. The records contain the endpoint's own count.
//!
//! `max_tokens` is a typical client limit, a power of two from 1,024 to 32,768, and independent of the output length.
//! The length of the workload is `min_tokens`, at which mock engines stop. With `ignore_eos` among the extra fields,
//! engines generate up to the limit, so `max_tokens` is the workload's length in that case.

use std::fmt::Write;
use std::str::FromStr;

use clap::ValueEnum;
use pointsman_trial::workload::Request;
use serde::Serialize;
use serde_json::{Map, Value};

/// Maximum size of a token in bytes in either form: its number and a comma, or a word and a space.
const TOKEN_BYTES: u64 = 7;

/// Approximate size of a body without its prompt, in bytes.
const FRAME_BYTES: u64 = 1_024;

/// Fields that an [`Extra`] must not contain.
const OWN_FIELDS: [&str; 7] = ["model", "prompt", "messages", "max_tokens", "min_tokens", "stream", "stream_options"];

/// Minimum of `max_tokens` as a power of two, and the number of powers.
const CEILING_LOG2: (u32, u64) = (10, 6);

/// An API of OpenAI.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Api {
    /// POST /v1/completions, with the prompt as token ids
    #[default]
    Completions,
    /// POST /v1/chat/completions, with the prompt as text of one word per token
    Chat,
}

impl Api {
    /// Path of the requests.
    #[must_use]
    pub fn path(self) -> &'static str {
        match self {
            Self::Completions => "/v1/completions",
            Self::Chat => "/v1/chat/completions",
        }
    }
}

/// Additional fields of every request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Extra(Map<String, Value>);

impl FromStr for Extra {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let fields = serde_json::from_str(text);
        let fields: Map<String, Value> = fields.map_err(|error| format!("must be a JSON object: {error}"))?;
        match OWN_FIELDS.into_iter().find(|field| fields.contains_key(*field)) {
            Some(field) => Err(format!("{field} is set by another flag")),
            None => Ok(Self(fields)),
        }
    }
}

/// Settings common to all request bodies.
#[derive(Clone, Debug)]
pub struct Form {
    /// API of the requests.
    pub api: Api,
    /// Name of the model.
    pub model: String,
    /// Exclusive upper bound of token ids.
    pub vocabulary: u32,
    /// Additional fields.
    pub extra: Extra,
}

#[derive(Serialize)]
struct Body<'a> {
    model: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    messages: Option<[Message<'a>; 1]>,
    max_tokens: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    min_tokens: Option<u32>,
    stream: bool,
    stream_options: StreamOptions,
    #[serde(flatten)]
    extra: &'a Map<String, Value>,
}

#[derive(Serialize)]
struct Message<'a> {
    role: &'static str,
    content: &'a str,
}

#[derive(Serialize)]
struct StreamOptions {
    include_usage: bool,
}

impl Form {
    /// Upper bound of the size of the body that [`write`](Self::write) creates for `request`.
    #[must_use]
    pub fn bytes_max(request: &Request) -> u64 {
        FRAME_BYTES + TOKEN_BYTES * request.prompt_tokens()
    }

    /// Serializes the body of `request`.
    ///
    /// # Errors
    /// JSON serialization failed, which is not expected.
    pub fn write(&self, request: &Request) -> serde_json::Result<Vec<u8>> {
        let mut tokens = request.tokens();
        tokens.iter_mut().for_each(|token| *token %= self.vocabulary);
        let text = match self.api {
            Api::Completions => String::new(),
            Api::Chat => words(&tokens),
        };
        let is_exact = self.extra.0.get("ignore_eos") == Some(&Value::Bool(true));
        let body = Body {
            model: &self.model,
            prompt: (self.api == Api::Completions).then_some(&tokens),
            messages: (self.api == Api::Chat).then_some([Message { role: "user", content: &text }]),
            max_tokens: if is_exact { request.output_tokens } else { ceiling(request) },
            min_tokens: (!is_exact).then_some(request.output_tokens),
            stream: true,
            stream_options: StreamOptions { include_usage: true },
            extra: &self.extra.0,
        };
        serde_json::to_vec(&body)
    }
}

/// Limit of the output tokens, derived from the prompt, so that it is equal in every run.
fn ceiling(request: &Request) -> u32 {
    let own = request.prompt.last().map_or(0, |segment| segment.id);
    let drawn = own.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    let (least, powers) = CEILING_LOG2;
    (1 << (least + (drawn % powers) as u32)).max(request.output_tokens)
}

/// One word per token, separated by spaces: three syllables of 70 each, sufficient for any vocabulary below 343,000.
fn words(tokens: &[u32]) -> String {
    const CONSONANTS: [char; 14] = ['b', 'd', 'f', 'g', 'k', 'l', 'm', 'n', 'p', 'r', 's', 't', 'v', 'z'];
    const VOWELS: [char; 5] = ['a', 'e', 'i', 'o', 'u'];
    let syllable = |number: u32| {
        let number = (number % 70) as usize;
        [CONSONANTS[number / 5], VOWELS[number % 5]]
    };
    let mut text = String::with_capacity(tokens.len() * 7);
    for (position, token) in tokens.iter().enumerate() {
        let space = if position > 0 { " " } else { "" };
        let [[a, b], [c, d], [e, f]] = [token / 4_900, token / 70, *token].map(syllable);
        write!(text, "{space}{a}{b}{c}{d}{e}{f}").expect("strings take everything");
    }
    text
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use pointsman_trial::workload::{Segment, VOCABULARY};

    use super::*;

    fn request(own: u64) -> Request {
        let prompt = vec![Segment { id: 1, tokens: 40 }, Segment { id: own, tokens: 10 }];
        Request { arrival_us: 0, prompt, output_tokens: 9, session: None }
    }

    fn written(api: Api, vocabulary: u32, own: u64) -> (Value, usize) {
        let extra = "{\"ignore_eos\": true}".parse().expect("an object");
        let body = Form { api, model: "m".to_owned(), vocabulary, extra }.write(&request(own)).expect("written");
        (serde_json::from_slice(&body).expect("JSON"), body.len())
    }

    #[test]
    fn chat_bodies_share_prefixes_like_their_tokens() {
        let text = |own| {
            let (body, bytes) = written(Api::Chat, VOCABULARY, own);
            assert!(body.get("prompt").is_none() && bytes as u64 <= Form::bytes_max(&request(own)));
            assert_eq!((&body["messages"][0]["role"], &body["messages"][1]), (&"user".into(), &Value::Null));
            body["messages"][0]["content"].as_str().expect("text").to_owned()
        };
        let (first, second) = (text(2), text(3));
        assert_eq!((first.split(' ').count(), first.len()), (50, 50 * 7 - 1));
        assert_eq!(first[..40 * 7], second[..40 * 7]);
        assert_ne!(first[40 * 7..], second[40 * 7..]);
    }

    #[test]
    fn every_token_has_a_unique_word() {
        let all: Vec<u32> = (0..VOCABULARY).collect();
        assert_eq!(words(&all).split(' ').collect::<BTreeSet<_>>().len(), all.len());
    }

    #[test]
    fn max_tokens_is_independent_of_the_output_length() {
        let of = |own, extra: &str| {
            let extra = extra.parse().expect("an object");
            let form = Form { api: Api::Completions, model: "m".to_owned(), vocabulary: VOCABULARY, extra };
            let body: Value = serde_json::from_slice(&form.write(&request(own)).expect("written")).expect("JSON");
            (body["max_tokens"].clone(), body["min_tokens"].clone())
        };
        let ceilings: BTreeSet<u64> = (2..200).filter_map(|own| of(own, "{}").0.as_u64()).collect();
        assert_eq!(ceilings, [1_024, 2_048, 4_096, 8_192, 16_384, 32_768].into());
        assert_eq!(of(2, "{}"), of(2, "{}"));
        assert_eq!(of(2, "{}").1, 9);
        assert_eq!(of(2, "{\"ignore_eos\": true}"), (9.into(), Value::Null));
    }
}
