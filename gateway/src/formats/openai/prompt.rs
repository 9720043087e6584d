//! Prompt extraction by endpoint.
//!
//! Selects the prompt fields, and detects fields that make the engine's tokens differ from the prompt's. Shapes that no
//! engine accepts are rejected; unknown shapes only lose the overlap. [`prompt`](crate::tokens) renders templates and
//! tokenizes.

use axum::body::Bytes;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::client_prompt::{ChatParts, ChatStyle, ClientPrompt};
use super::endpoint::Endpoint;
use super::error::ApiError;
use super::fields::{Fields, Given, missing, unquoted};
use super::responses;
use crate::formats::json::each;

/// Extracts the prompt.
pub(super) fn read(
    endpoint: Endpoint,
    fields: &Fields<'_>,
    body: &Bytes,
    style: ChatStyle,
) -> Result<ClientPrompt, ApiError> {
    let prompt = match endpoint {
        Endpoint::Chat => chat(fields, body, true, style)?,
        Endpoint::Completions => match (fields.prompt.json(), fields.prompt_embeds.json()) {
            (None, Some(_)) => ClientPrompt::Opaque("embeddings"),
            _ => text_or_tokens(fields.prompt, "prompt")?,
        },
        // Embedding models may have chat templates; engines then accept messages in place of input.
        Endpoint::Embeddings if fields.input.json().is_none() && fields.messages.json().is_some() => {
            chat(fields, body, false, style)?
        }
        Endpoint::Embeddings => text_or_tokens(fields.input, "input")?,
        Endpoint::Responses => responses::read(fields, body, style)?,
        // The prompt is in the converted chat.
        Endpoint::Messages | Endpoint::CountTokens => return Ok(ClientPrompt::Opaque("messages")),
        Endpoint::Generate => generate(fields)?,
        // Many short prompts, none of which decides the placement, or no prompt.
        _ => return Ok(ClientPrompt::Opaque(endpoint.name())),
    };
    Ok(match opaque(endpoint, fields, &prompt) {
        Some(reason) => ClientPrompt::Opaque(reason),
        None => prompt,
    })
}

/// Reason why the worker's tokens or block hashes differ from those of the prompt alone.
fn opaque(endpoint: Endpoint, fields: &Fields<'_>, prompt: &ClientPrompt) -> Option<&'static str> {
    let suffix = if endpoint == Endpoint::Completions { fields.suffix } else { Given::default() };
    let media = [fields.multi_modal_data, fields.multimodal_data, fields.image_data, fields.video_data];
    let given: [(&str, &[Given<'_>]); 8] = [
        ("embeddings", &[fields.prompt_embeds, fields.input_embeds]),
        ("multimodal", &media),
        ("multimodal", &[fields.audio_data, fields.features, fields.content_parts]),
        ("adapter", &[fields.lora_path]),
        ("extra_key", &[fields.extra_key]),
        ("session", &[fields.session_params]),
        ("suffix", &[suffix]),
        ("truncated", &[fields.truncate_prompt_tokens]),
    ];
    let has = |fields: &[Given<'_>]| fields.iter().any(|given| given.json().is_some());
    if let Some((reason, _)) = given.into_iter().find(|(_, fields)| has(fields)) {
        return Some(reason);
    }
    // Special tokens are added to plain text, and by the template for chats; a request may reverse this.
    let usual = match prompt {
        ClientPrompt::Text(_) => "true",
        ClientPrompt::Chat(_) => "false",
        ClientPrompt::Tokens(_) | ClientPrompt::Opaque(_) => return None,
    };
    fields.add_special_tokens.json().is_some_and(|given| given != usual).then_some("special_tokens")
}

fn chat(fields: &Fields<'_>, body: &Bytes, generates: bool, style: ChatStyle) -> Result<ClientPrompt, ApiError> {
    let messages = fields.messages.list(body)?.ok_or_else(|| missing("messages"))?;
    let add_generation_prompt = fields.add_generation_prompt.flag()?;
    Ok(ClientPrompt::Chat(Box::new(ChatParts {
        messages,
        tools: fields.tools.list(body)?,
        documents: fields.documents.list(body)?,
        template_kwargs: fields.chat_template_kwargs.object(body)?,
        reasoning_effort: fields.reasoning_effort.part(body),
        add_generation_prompt: if generates { add_generation_prompt } else { add_generation_prompt.or(Some(false)) },
        continue_final_message: fields.continue_final_message.flag()?,
        has_own_template: fields.chat_template.json().is_some(),
        is_sglang: style.is_sglang,
        has_media_options: [fields.mm_processor_kwargs, fields.media_io_kwargs]
            .iter()
            .any(|given| given.json().is_some_and(|json| json != "{}")),
    })))
}

/// `/generate` of SGLang, which also accepts batches, and `/inference/v1/generate` of vLLM (reference: SGLang,
/// `GenerateReqInput`; vLLM, `GenerateRequest`).
fn generate(fields: &Fields<'_>) -> Result<ClientPrompt, ApiError> {
    let prompts = [(fields.input_ids, "input_ids"), (fields.token_ids, "token_ids"), (fields.text, "text")];
    match prompts.into_iter().find(|(given, _)| given.json().is_some()) {
        Some((given, name)) => text_or_tokens(given, name),
        None if fields.input_embeds.json().is_some() => Ok(ClientPrompt::Opaque("embeddings")),
        None => Err(missing("input_ids")),
    }
}

/// Text, ids, or a list of either. The first list element decides the placement; the others are further work.
fn text_or_tokens(given: Given<'_>, field: &'static str) -> Result<ClientPrompt, ApiError> {
    let raw = given.json().ok_or_else(|| missing(field))?;
    let shape = || given.wrong("a string, a list of strings, a list of token ids or a list of such lists");
    let ids = || {
        let message = format!("{field} must have token ids from 0 to {}", u32::MAX);
        ApiError::invalid("invalid_token_id", Some(field), message)
    };
    let Some(list) = raw.strip_prefix('[') else {
        return if raw.starts_with('"') { unquoted(raw, field).map(ClientPrompt::Text) } else { Err(shape()) };
    };
    match list.trim_ascii_start().as_bytes().first() {
        Some(b'"') => first(raw).map(ClientPrompt::Text).ok_or_else(shape),
        Some(b'0'..=b'9' | b'-') => token_ids(raw).map(ClientPrompt::Tokens).ok_or_else(ids),
        Some(b'[') => {
            let first: Option<&RawValue> = first(raw);
            first.and_then(|first| token_ids(first.get())).map(ClientPrompt::Tokens).ok_or_else(ids)
        }
        // Engines accept images beside text in this form.
        Some(b'{') if field == "input" => Ok(ClientPrompt::Opaque("multimodal")),
        Some(b']') => Err(ApiError::invalid("invalid_value", Some(field), format!("{field} must not be empty"))),
        _ => Err(shape()),
    }
}

/// Token ids. Engines also accept whole numbers with a fraction, such as `1.0`.
fn token_ids(list: &str) -> Option<Vec<u32>> {
    let whole =
        |number: f64| (number.fract() == 0.0 && (0.0..=u32::MAX.into()).contains(&number)).then_some(number as u32);
    let lax = || serde_json::from_str::<Vec<f64>>(list).ok()?.into_iter().map(whole).collect();
    serde_json::from_str(list).ok().or_else(lax)
}

/// First element of a list; the others are skipped.
fn first<'a, T: Deserialize<'a>>(list: &'a str) -> Option<T> {
    let mut first = None;
    let _ = each(list, Default::default, |_, element| {
        first = Some(element);
        Err(())
    });
    first
}
