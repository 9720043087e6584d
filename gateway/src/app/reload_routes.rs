//! Manual reloads and the result of the last one.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::get;
use axum::{Json, Router};

use super::reload::{ReloadError, ReloadStatus, Reloader};
use crate::admin::{ClientAddress, error};
use crate::formats::openai::{ApiError, ErrorType};

/// Routes for the administration listener.
pub(super) fn routes(reloader: Arc<Reloader>) -> Router {
    Router::new().route("/admin/reload", get(status).post(reload)).with_state(reloader)
}

async fn status(State(reloader): State<Arc<Reloader>>) -> Json<ReloadStatus> {
    Json(reloader.status())
}

/// Same as SIGHUP, with a response.
async fn reload(
    State(reloader): State<Arc<Reloader>>,
    ClientAddress(peer): ClientAddress,
) -> Result<Json<ReloadStatus>, ApiError> {
    let peer = peer.map(tracing::field::display);
    tracing::info!(target: "pointsman_gateway::audit", what = "reload", peer, "configuration reload requested by hand");
    reloader.reload().await.map(Json).map_err(rejected)
}

fn rejected(rejected: ReloadError) -> ApiError {
    let message = rejected.to_string().trim_end().to_owned();
    match rejected {
        ReloadError::Fixed => error(StatusCode::CONFLICT, ErrorType::InvalidRequest, "config_fixed", message),
        ReloadError::Draining => error(StatusCode::SERVICE_UNAVAILABLE, ErrorType::Server, "draining", message),
        ReloadError::Lost => error(StatusCode::INTERNAL_SERVER_ERROR, ErrorType::Server, "internal", message),
        ReloadError::Settings(_) | ReloadError::Unfit(_) | ReloadError::Gateway(_) => {
            error(StatusCode::UNPROCESSABLE_ENTITY, ErrorType::InvalidRequest, "config_rejected", message)
        }
    }
}
