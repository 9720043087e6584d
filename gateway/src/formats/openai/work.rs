//! Work of a request that its first prompt does not show: further prompts, further outputs, and prompts that are computed
//! although they are cached.

use std::hash::{DefaultHasher, Hash, Hasher};

use serde_json::value::RawValue;

use super::endpoint::Endpoint;
use super::error::ApiError;
use super::fields::Fields;
use crate::formats::json::{each, inner};

/// Work beside that of the first prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct FurtherWork {
    /// Outputs beside the first, of choices (`n`, `best_of`) and of prompts in a list.
    pub outputs: u32,
    /// Length of the further distinct prompts, as a multiple of the first.
    pub prompt_share: f64,
    /// Whether the engine reads no cached prefix, because the response contains the probabilities of prompt tokens.
    pub skips_cache: bool,
}

impl FurtherWork {
    pub(super) fn read(endpoint: Endpoint, fields: &Fields<'_>) -> Result<Self, ApiError> {
        let prompts = match endpoint {
            Endpoint::Completions => fields.prompt.json(),
            Endpoint::Embeddings => fields.input.json(),
            _ => None,
        };
        let (prompts, prompt_share) = prompts.map_or((1, 0.0), prompts_of);
        if !matches!(endpoint, Endpoint::Chat | Endpoint::Completions) {
            return Ok(Self { outputs: prompts - 1, prompt_share, skips_cache: false });
        }
        let choices = [fields.n.count()?, fields.best_of.count()?].into_iter().flatten().max().unwrap_or(1).max(1);
        // vLLM's `prompt_logprobs`, which `echo` implies for a chat, and for a completion with `logprobs`.
        let echoes_logprobs = endpoint == Endpoint::Chat || fields.logprobs.json().is_some();
        let echoes = fields.echo.json() == Some("true");
        Ok(Self {
            outputs: choices.saturating_mul(prompts) - 1,
            prompt_share,
            skips_cache: fields.prompt_logprobs.json().is_some() || echoes && echoes_logprobs,
        })
    }

    /// Tokens of the further prompts, after a first one of `first_tokens`.
    #[must_use]
    pub fn prompt_tokens(&self, first_tokens: usize) -> u32 {
        (first_tokens as f64 * self.prompt_share).round() as u32
    }
}

/// Number of prompts, at least 1, and the length of the distinct ones after the first, as a multiple of the first: in
/// tokens if they are given, else in bytes.
fn prompts_of(prompts: &str) -> (u32, f64) {
    let mut sizes = Vec::<(u64, u32)>::new();
    let _ = each(
        prompts,
        || (),
        |_, prompt: &RawValue| {
            let prompt = prompt.get();
            let size = match (inner(prompt), prompt.strip_prefix('[')) {
                (Some(text), _) => text.len(),
                (None, Some("]")) => 0,
                (None, Some(ids)) => 1 + ids.bytes().filter(|byte| *byte == b',').count(),
                (None, None) => return Err(()), // a list of ids is one prompt
            };
            let mut hasher = DefaultHasher::new();
            prompt.hash(&mut hasher);
            sizes.push((hasher.finish(), u32::try_from(size).unwrap_or(u32::MAX)));
            Ok(())
        },
    );
    let (count, first) = (u32::try_from(sizes.len()).unwrap_or(u32::MAX), sizes.first().copied());
    let Some((_, first_size)) = first else { return (1, 0.0) };
    sizes.sort_unstable();
    sizes.dedup();
    let sum: u64 = sizes.iter().map(|(_, size)| u64::from(*size)).sum();
    (count, (sum - u64::from(first_size)) as f64 / f64::from(first_size.max(1)))
}
