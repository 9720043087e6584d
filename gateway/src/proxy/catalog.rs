//! Model list in OpenAI's format.
//!
//! Lists every valid model name: models, aliases, and the adapters that workers have now.

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;
use serde_json::{Value, json};

use crate::formats::openai::ApiError;
use crate::proxy::context::RequestContext;

/// Owner of all models in the list.
const OWNER: &str = "pointsman";

pub(crate) async fn list(
    State(context): State<Arc<RequestContext>>,
    headers: HeaderMap,
) -> Result<Json<Value>, ApiError> {
    context.admission.tenants.identify(headers.get(AUTHORIZATION), None)?;
    let mut data = Vec::new();
    for model in context.models.of_clients() {
        let settings = &model.settings;
        data.push(card(&context, &settings.name, None));
        data.extend(settings.aliases.iter().map(|alias| card(&context, alias, Some(&settings.name))));
    }
    let adapters = context.models.adapter_names();
    data.extend(adapters.iter().map(|(name, model)| card(&context, name, Some(&model.settings.name))));
    Ok(Json(json!({ "object": "list", "data": data })))
}

pub(crate) async fn one(
    State(context): State<Arc<RequestContext>>,
    id: Result<Path<String>, PathRejection>,
    headers: HeaderMap,
) -> Result<Json<Value>, ApiError> {
    context.admission.tenants.identify(headers.get(AUTHORIZATION), None)?;
    // A path that is not UTF-8 names no model.
    let Path(id) = id.map_err(|_| ApiError::not_found())?;
    let (model, _) = context.models.find(&id).ok_or_else(|| ApiError::model_not_found(&id))?;
    let name = &model.settings.name;
    Ok(Json(card(&context, &id, Some(name).filter(|name| **name != id))))
}

/// One entry. `parent` is the model of an alias or adapter.
fn card(context: &RequestContext, id: &str, parent: Option<&String>) -> Value {
    json!({ "id": id, "object": "model", "created": context.models.created, "owned_by": OWNER, "parent": parent })
}
