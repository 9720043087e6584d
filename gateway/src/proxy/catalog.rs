//! Model list in OpenAI's format, and in Anthropic's for clients that send `anthropic-version`.
//!
//! Lists every valid model name: models, aliases, and the adapters that workers have now.

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::header::AUTHORIZATION;
use axum::http::{HeaderMap, Response};
use axum::response::IntoResponse as _;
use jiff::Timestamp;
use serde_json::{Value, json};

use crate::formats::openai::{API_KEY, ApiError, request_id};
use crate::pools::model::Model;
use crate::proxy::context::RequestContext;
use crate::proxy::refusal::rendered_error;

/// Owner of all models in the list.
const OWNER: &str = "pointsman";

/// Header of Anthropic's clients.
const ANTHROPIC_VERSION: &str = "anthropic-version";

pub(crate) async fn list(State(context): State<Arc<RequestContext>>, headers: HeaderMap) -> Response<axum::body::Body> {
    let cards = Cards::of(&context, &headers);
    cards.respond(|| {
        let mut data = Vec::new();
        for model in context.models.of_clients() {
            let names = std::iter::once(&model.settings.name).chain(&model.settings.aliases);
            data.extend(names.map(|name| cards.card(name, model)));
        }
        data.extend(context.models.adapter_names().iter().map(|(name, model)| cards.card(name, model)));
        if !cards.is_anthropic {
            return Ok(json!({ "object": "list", "data": data }));
        }
        let id = |card: Option<&Value>| card.map(|card| card["id"].clone());
        let (first_id, last_id) = (id(data.first()), id(data.last()));
        Ok(json!({ "data": data, "has_more": false, "first_id": first_id, "last_id": last_id }))
    })
}

pub(crate) async fn one(
    State(context): State<Arc<RequestContext>>,
    id: Result<Path<String>, PathRejection>,
    headers: HeaderMap,
) -> Response<axum::body::Body> {
    let cards = Cards::of(&context, &headers);
    cards.respond(|| {
        // A path that is not UTF-8 names no model.
        let Path(id) = id.map_err(|_| ApiError::not_found())?;
        let (model, _) = context.models.find(&id).ok_or_else(|| ApiError::model_not_found(&id))?;
        Ok(cards.card(&id, model))
    })
}

/// Entries of the list for one client.
struct Cards<'a> {
    context: &'a RequestContext,
    headers: &'a HeaderMap,
    is_anthropic: bool,
}

impl<'a> Cards<'a> {
    fn of(context: &'a RequestContext, headers: &'a HeaderMap) -> Self {
        Self { context, headers, is_anthropic: headers.contains_key(ANTHROPIC_VERSION) }
    }

    /// The response to an authenticated client.
    fn respond(&self, body: impl FnOnce() -> Result<Value, ApiError>) -> Response<axum::body::Body> {
        let keys = (self.headers.get(AUTHORIZATION), self.headers.get(API_KEY));
        let client = self.context.admission.tenants.identify(keys.0, keys.1);
        match client.and_then(|_| body()) {
            Ok(body) => Json(body).into_response(),
            Err(error) => rendered_error(error, self.is_anthropic, request_id(self.headers).unwrap_or_default()),
        }
    }

    /// One entry, with the name of the model, of an alias or of an adapter.
    fn card(&self, id: &str, model: &Model) -> Value {
        let (created, name, length) = (self.context.models.created, &model.settings.name, model.router.max_model_len());
        if self.is_anthropic {
            let created = i64::try_from(created).ok().and_then(|created| Timestamp::from_second(created).ok());
            let created = created.unwrap_or_default().to_string();
            return json!({
                "type": "model", "id": id, "display_name": id, "created_at": created, "lifecycle": "active",
                "max_input_tokens": length,
            });
        }
        let parent = Some(name).filter(|name| **name != id);
        json!({
            "id": id, "object": "model", "created": created, "owned_by": OWNER, "root": name, "parent": parent,
            "max_model_len": length,
        })
    }
}
