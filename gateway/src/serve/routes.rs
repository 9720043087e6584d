//! What is answered on the clients' listener, and what on every one.
//!
//! Owns paths and methods. Leaves the answers to the modules they belong to.

use std::sync::Arc;

use axum::Router;
use axum::routing::{get, post};

use super::App;
use super::{proxy, ready};

pub(super) fn clients(app: Arc<App>) -> Router {
    let common = common(&app, app.settings.gateway.metrics_public);
    Router::new()
        .route("/v1/chat/completions", post(proxy::chat))
        .route("/v1/models", get(proxy::models))
        .with_state(app)
        .merge(common)
}

/// How the process is: the same for clients and operators.
pub(super) fn common(app: &Arc<App>, with_metrics: bool) -> Router {
    ready::routes(with_metrics).with_state(Arc::clone(app))
}
