//! What is answered on the clients' listener.
//!
//! Owns paths and methods. Leaves the answers to the modules they belong to.

use std::sync::Arc;

use axum::Router;
use axum::routing::{get, post};

use super::App;
use super::{proxy, ready};

pub(super) fn clients(app: Arc<App>) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(proxy::chat))
        .route("/v1/models", get(proxy::models))
        .merge(ready::routes(app.settings.gateway.metrics_public))
        .with_state(app)
}
