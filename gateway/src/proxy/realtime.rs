//! Switch of protocols: the bytes of a client and of its worker, piped in both directions.
//!
//! The attempts choose the worker by load and forward the handshake; after the switch the gateway reads no byte. The
//! booking lasts until either side closes.

use axum::body::Body;
use axum::http::header::{CONNECTION, UPGRADE};
use axum::http::{HeaderValue, Response, StatusCode};
use axum::response::IntoResponse as _;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use pointsman::Outcome;
use tokio::io::copy_bidirectional;

use super::account::Account;
use super::attempts::WorkerResponse;
use crate::formats::openai::{ApiError, to_client};

/// Response to a client whose worker has switched protocols. `client` is the connection of the client after its response.
pub(super) fn switch(
    mut account: Account,
    begin: WorkerResponse,
    client: Option<OnUpgrade>,
    request_id: &str,
) -> Response<Body> {
    let WorkerResponse { placement, mut sent, mut head, .. } = begin;
    let Some((client, worker)) = client.zip(head.extensions.remove::<OnUpgrade>()) else {
        let error = ApiError::worker_failed();
        return account.complete_with(Some(error.code), error.into_response());
    };
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    *response.headers_mut() = to_client(&head.headers, request_id);
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("upgrade"));
    response.headers_mut().extend(head.headers.get(UPGRADE).map(|protocol| (UPGRADE, protocol.clone())));
    account.answered(StatusCode::SWITCHING_PROTOCOLS);
    account.access.is_answered_by_worker = true;
    tokio::spawn(async move {
        if let (Ok(client), Ok(worker)) = tokio::join!(client, worker) {
            placement.outcome(Outcome::Ok);
            // Either side may break off.
            let _ = copy_bidirectional(&mut TokioIo::new(client), &mut TokioIo::new(worker)).await;
        }
        sent.completed();
        account.complete();
    });
    response
}
