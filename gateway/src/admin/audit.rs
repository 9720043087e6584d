//! Audit log of administrative changes.
//!
//! Lines are at info under the target `pointsman_gateway::audit`. Every started change has one line, including changes
//! that failed or lost their caller. Lines contain no secrets.

use std::net::SocketAddr;

use pointsman::protocol::WorkerId;

use super::extract::ClientAddress;
use super::internal;
use crate::formats::openai::ApiError;
use crate::pools::model::Model;

/// A change of a model's workers.
#[derive(Clone)]
pub(super) struct Change {
    what: &'static str,
    model: String,
    worker: WorkerId,
    peer: Option<SocketAddr>,
}

impl Change {
    pub(super) fn new(what: &'static str, model: &Model, worker: WorkerId, ClientAddress(peer): ClientAddress) -> Self {
        Self { what, model: model.settings.name.clone(), worker, peer }
    }

    /// Runs the change to completion, even after the caller has gone, and then writes its line.
    pub(super) async fn carry_out<T: Send + 'static>(
        self,
        work: impl Future<Output = Result<(T, String), ApiError>> + Send + 'static,
    ) -> Result<T, ApiError> {
        let task = tokio::spawn(async move {
            match work.await {
                Ok((answer, detail)) => {
                    self.write("done", &detail);
                    Ok(answer)
                }
                Err(error) => {
                    self.write("failed", &error.message);
                    Err(error)
                }
            }
        });
        task.await.map_err(|_| internal("the change was interrupted"))?
    }

    /// Writes a line. Texts are logged as values, so that the log format escapes them.
    pub(super) fn write(&self, outcome: &str, detail: &str) {
        let Self { what, model, worker, peer } = self;
        let (model, peer) = (model.as_str(), peer.map(tracing::field::display));
        tracing::info!(target: "pointsman_gateway::audit", what, model, worker_id = %worker, peer, outcome, detail, "workers changed by hand");
    }
}
