//! Manual reloads and the result of the last one.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;

use super::extract::ClientAddress;
use super::{Admin, error};
use crate::app::reload::{ReloadError, ReloadStatus};
use crate::formats::openai::{ApiError, ErrorType};

pub(super) async fn status(State(admin): State<Arc<Admin>>) -> Json<ReloadStatus> {
    Json(admin.reloader.status())
}

/// Same as SIGHUP, with a response.
pub(super) async fn reload(
    State(admin): State<Arc<Admin>>,
    ClientAddress(peer): ClientAddress,
) -> Result<Json<ReloadStatus>, ApiError> {
    let peer = peer.map(tracing::field::display);
    tracing::info!(target: "pointsman_gateway::audit", what = "reload", peer, "configuration reload requested by hand");
    admin.reloader.reload().await.map(Json).map_err(rejected)
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
