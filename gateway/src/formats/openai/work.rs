//! Work of a request that its first prompt does not show: further prompts, further outputs, and prompts that are computed
//! although they are cached.

use std::hash::{DefaultHasher, Hash, Hasher};

use ahash::AHashSet;
use serde_json::value::RawValue;

use super::endpoint::Endpoint;
use super::error::ApiError;
use super::fields::Fields;
use crate::formats::json::{each, inner};

/// Number of prompts of a list that are compared with each other. Later ones count as distinct.
const COMPARED_MAX: usize = 1 << 14;

/// Bytes of a first text from which its tokens show the tokenizer's rate. In shorter ones special tokens prevail.
const TYPICAL_BYTES_MIN: u64 = 64;

/// Usual bytes per token of a text.
const BYTES_PER_TOKEN: u64 = 4;

/// Work beside that of the first prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FurtherWork {
    /// Outputs beside the first, of choices (`n`, `best_of`) and of prompts in a list.
    pub outputs: u32,
    /// The further distinct prompts.
    pub prompts: FurtherPrompts,
    /// Whether the engine reads no cached prefix, because the response contains the probabilities of prompt tokens.
    pub skips_cache: bool,
}

/// Length of the further distinct prompts of a list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FurtherPrompts {
    /// Of lists of token ids, in tokens.
    pub tokens: u64,
    /// Of texts, in bytes.
    pub bytes: u64,
    /// Bytes of the first prompt, if it is a text.
    pub first_bytes: u64,
}

impl FurtherPrompts {
    /// Their tokens, after a first prompt of `first_tokens`; of texts an estimate.
    pub fn estimate(&self, first_tokens: usize) -> u32 {
        let of_texts = if self.first_bytes < TYPICAL_BYTES_MIN {
            self.bytes.div_ceil(BYTES_PER_TOKEN)
        } else {
            // A token has at least one byte.
            (self.bytes.saturating_mul(first_tokens as u64) / self.first_bytes).min(self.bytes)
        };
        u32::try_from(self.tokens.saturating_add(of_texts)).unwrap_or(u32::MAX)
    }
}

impl FurtherWork {
    pub(super) fn read(endpoint: Endpoint, fields: &Fields<'_>) -> Result<Self, ApiError> {
        let prompts = match endpoint {
            Endpoint::Completions => fields.prompt.json(),
            Endpoint::Embeddings => fields.input.json(),
            Endpoint::Generate => fields.input_ids.json().or(fields.text.json()),
            _ => None,
        };
        let (count, prompts) = prompts.map_or((1, FurtherPrompts::default()), prompts_of);
        if !matches!(endpoint, Endpoint::Chat | Endpoint::Completions) {
            return Ok(Self { outputs: count - 1, prompts, skips_cache: false });
        }
        let choices = [fields.n.count()?, fields.best_of.count()?].into_iter().flatten().max().unwrap_or(1).max(1);
        // vLLM's `prompt_logprobs`, which `echo` implies for a chat, and for a completion with `logprobs`.
        let echoes_logprobs = endpoint == Endpoint::Chat || fields.logprobs.json().is_some();
        let echoes = fields.echo.flag()? == Some(true);
        Ok(Self {
            outputs: choices.saturating_mul(count) - 1,
            prompts,
            skips_cache: fields.prompt_logprobs.json().is_some() || echoes && echoes_logprobs,
        })
    }
}

/// Number of prompts, at least 1, and the distinct ones after the first.
fn prompts_of(prompts: &str) -> (u32, FurtherPrompts) {
    let (mut count, mut compared, mut further) = (0_u32, AHashSet::new(), FurtherPrompts::default());
    let _ = each(prompts, Default::default, |_, prompt: &RawValue| {
        let prompt = prompt.get();
        let (tokens, bytes) = match (inner(prompt), prompt.strip_prefix('[')) {
            (Some(text), _) => (0, text.len() as u64),
            (None, Some("]")) => (0, 0),
            (None, Some(ids)) => (1 + ids.bytes().filter(|byte| *byte == b',').count() as u64, 0),
            (None, None) => return Err(()), // a list of ids is one prompt
        };
        let mut hasher = DefaultHasher::new();
        prompt.hash(&mut hasher);
        let is_distinct = compared.len() >= COMPARED_MAX || compared.insert(hasher.finish());
        if count == 0 {
            further.first_bytes = bytes;
        } else if is_distinct {
            (further.tokens, further.bytes) = (further.tokens + tokens, further.bytes + bytes);
        }
        count = count.saturating_add(1);
        Ok(())
    });
    (count.max(1), further)
}
