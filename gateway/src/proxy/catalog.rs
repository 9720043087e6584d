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

use crate::app::App;
use crate::formats::openai::ApiError;

/// Owner of all models in the list.
const OWNER: &str = "pointsman";

pub(crate) async fn list(State(app): State<Arc<App>>, headers: HeaderMap) -> Result<Json<Value>, ApiError> {
    app.tenants.identify(headers.get(AUTHORIZATION))?;
    let mut data = Vec::new();
    for model in app.models.of_clients() {
        let settings = &model.settings;
        data.push(card(&app, &settings.name, None));
        data.extend(settings.aliases.iter().map(|alias| card(&app, alias, Some(&settings.name))));
    }
    let adapters = app.models.adapter_names();
    data.extend(adapters.iter().map(|(name, model)| card(&app, name, Some(&model.settings.name))));
    Ok(Json(json!({ "object": "list", "data": data })))
}

pub(crate) async fn one(
    State(app): State<Arc<App>>,
    id: Result<Path<String>, PathRejection>,
    headers: HeaderMap,
) -> Result<Json<Value>, ApiError> {
    app.tenants.identify(headers.get(AUTHORIZATION))?;
    // A path that is not UTF-8 names no model.
    let Path(id) = id.map_err(|_| ApiError::not_found())?;
    let (model, _) = app.models.find(&id).ok_or_else(|| ApiError::model_not_found(&id))?;
    let name = &model.settings.name;
    Ok(Json(card(&app, &id, Some(name).filter(|name| **name != id))))
}

/// One entry. `parent` is the model of an alias or adapter.
fn card(app: &App, id: &str, parent: Option<&String>) -> Value {
    json!({ "id": id, "object": "model", "created": app.created, "owned_by": OWNER, "parent": parent })
}
