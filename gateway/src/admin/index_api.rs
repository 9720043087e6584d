//! Served index: overlaps and projected loads for other routers.
//!
//! Read-only. Needs the token of the index or of operators. Queries book nothing and prompts are dropped after the
//! response. The number of queries at a time is limited, so that another router cannot exhaust this one.
//! `docs/index-api.md` documents all paths with examples.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use pointsman::hashing::{HashScheme, HashedPrompt};
use pointsman::protocol::BlockHash;
use pointsman::{Prompt, RequestOptions, RouteRequest};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::SemaphorePermit;

use super::Admin;
use super::extract::{Body, model_named};
use super::queries::{route_error, to_json};
use super::views::{self, worker_ids_as_text};
use crate::formats::openai::{ApiError, ClientPrompt};
use crate::pools::model::Model;
use crate::tokens::PromptContext;

/// Maximum number of concurrent queries.
pub(super) const INDEX_QUERIES_MAX: usize = 64;

/// A prompt of a model, in one of three forms.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct IndexQuery {
    model: String,
    tokens: Option<Vec<u32>>,
    prompt: Option<String>,
    block_hashes: Option<Arc<[BlockHash]>>,
    /// Length of the prompt in tokens, beside hashes or for loads.
    prompt_tokens: Option<usize>,
    lora_name: Option<Arc<str>>,
    cache_salt: Option<Arc<str>>,
}

/// A prompt whose tokens or hashes are known.
struct ResolvedPrompt {
    prompt: Prompt<'static>,
    tokens_source: &'static str,
    /// Complete blocks without a hash. They match nothing, and the router does not count them as load.
    unhashed_blocks: u64,
}

fn invalid(message: &str) -> ApiError {
    ApiError::invalid("invalid_prompt", None, message)
}

impl IndexQuery {
    /// `None` without a prompt.
    async fn resolve(&mut self, model: &Model) -> Result<Option<ResolvedPrompt>, ApiError> {
        let has_names = self.lora_name.is_some() || self.cache_salt.is_some();
        let length = self.prompt_tokens;
        let client_prompt = match (self.tokens.take(), self.prompt.take(), self.block_hashes.take()) {
            (None, None, None) if length.is_none() => return Ok(None),
            (None, None, hashes) if !has_names => return hashed(model, hashes.unwrap_or_default(), length).map(Some),
            (None, None, _) => {
                return Err(invalid("lora_name and cache_salt require tokens or prompt: hashes include them"));
            }
            (Some(tokens), None, None) => ClientPrompt::Tokens(tokens),
            (None, Some(text), None) => ClientPrompt::Text(text),
            (Some(_), Some(_), _) | (Some(_), _, Some(_)) | (_, Some(_), Some(_)) => {
                return Err(invalid("the body must have one of tokens, prompt and block_hashes"));
            }
        };
        if length.is_some() {
            return Err(invalid("prompt_tokens must be absent with tokens or prompt"));
        }
        let context = PromptContext { cache_salt: self.cache_salt.as_deref(), ..PromptContext::default() };
        let tokens = model.tokens.of(&client_prompt, context).await;
        let prompt = Prompt::OwnedTokens(tokens.ids.as_ref().into());
        Ok(Some(ResolvedPrompt { prompt, tokens_source: tokens.source.name(), unhashed_blocks: 0 }))
    }

    fn request(self, prompt: Prompt<'static>) -> RouteRequest<'static> {
        let options =
            RequestOptions { lora_name: self.lora_name, cache_salt: self.cache_salt, ..RequestOptions::default() };
        RouteRequest { options, ..RouteRequest::query(prompt) }
    }
}

/// A prompt by hashes; without a length, of the tokens that the hashes cover.
fn hashed(model: &Model, hashes: Arc<[BlockHash]>, length: Option<usize>) -> Result<ResolvedPrompt, ApiError> {
    let block_size = NonZeroU32::new(model.router.block_size()).unwrap_or(NonZeroU32::MIN);
    let scheme = HashScheme { is_eagle: model.router.config().is_eagle, ..HashScheme::new(block_size) };
    let length = length.unwrap_or_else(|| scheme.prompt_tokens_min(hashes.len()));
    let unhashed_blocks = scheme.block_count(length).saturating_sub(hashes.len()) as u64;
    let prompt = HashedPrompt::from_hashes(hashes, None, length, &scheme);
    let prompt = prompt.map_err(|refused| invalid(&refused.to_string()))?;
    Ok(ResolvedPrompt { prompt: Prompt::Hashed(prompt), tokens_source: "none", unhashed_blocks })
}

pub(super) async fn overlaps(
    State(admin): State<Arc<Admin>>,
    Body(mut query): Body<IndexQuery>,
) -> Result<Json<Value>, ApiError> {
    let _permit = permit(&admin)?;
    let model = model_named(&query.model, &admin)?;
    let resolved = query.resolve(&model).await?;
    let resolved = resolved.ok_or_else(|| invalid("the body must have one of tokens, prompt and block_hashes"))?;
    let tokens = resolved.prompt.prompt_tokens();
    let scores = model.router.overlap_scores(query.request(resolved.prompt), false).await.map_err(route_error)?;
    let mut ranks = to_json(&scores.ranks)?;
    worker_ids_as_text(&mut ranks);
    Ok(answer(&model, tokens, resolved.tokens_source, ranks))
}

pub(super) async fn loads(
    State(admin): State<Arc<Admin>>,
    Body(mut query): Body<IndexQuery>,
) -> Result<Json<Value>, ApiError> {
    let _permit = permit(&admin)?;
    let model = model_named(&query.model, &admin)?;
    let none = ResolvedPrompt { prompt: Prompt::Tokens(&[]), tokens_source: "none", unhashed_blocks: 0 };
    let resolved = query.resolve(&model).await?.unwrap_or(none);
    let tokens = resolved.prompt.prompt_tokens();
    let loads = model.router.potential_loads(query.request(resolved.prompt)).await.map_err(route_error)?;
    let rows = loads.iter().map(|load| {
        json!({
            "rank": views::rank_of(load.rank),
            "potential_prefill_tokens": load.potential_prefill_tokens,
            "potential_decode_blocks": load.potential_decode_blocks + resolved.unhashed_blocks,
            "active_requests": load.active_requests,
        })
    });
    Ok(answer(&model, tokens, resolved.tokens_source, rows.collect()))
}

fn answer(model: &Model, tokens: usize, tokens_source: &str, ranks: Value) -> Json<Value> {
    let config = model.router.config();
    Json(json!({
        "model": model.settings.name,
        "pool": config.pool,
        "block_size": model.router.block_size(),
        "hash": { "scheme": "xxh3-64", "seed": HashScheme::BASE_SEED, "is_eagle": config.is_eagle },
        "tokens": tokens,
        "tokens_source": tokens_source,
        "ranks": ranks,
    }))
}

fn permit(admin: &Admin) -> Result<SemaphorePermit<'_>, ApiError> {
    admin.index_queries.try_acquire().map_err(|_| {
        let message = format!("the limit of {INDEX_QUERIES_MAX} concurrent index queries is reached");
        ApiError::overloaded("index_queries_in_progress", message, Duration::from_secs(1))
    })
}
