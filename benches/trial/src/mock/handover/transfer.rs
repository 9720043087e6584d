//! HTTP client of the block transfer between engines: claims and pushes.
//!
//! One connection per transfer. Dropping the future closes the connection, which the other engine detects.

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::client::conn::http1;
use hyper::header::{CONTENT_TYPE, HOST};
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde::{Deserialize, Serialize};
use tokio::net::TcpStream;

use super::ledger::{Claim, Grant};

/// Maximum size of a response in bytes.
const ANSWER_BYTES_MAX: usize = 64 << 10;

/// A transfer that the prefill engine sends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Push {
    pub(crate) key: String,
    /// Fingerprint of the prompt and the adapter.
    pub(crate) prompt: u64,
    pub(crate) grant: Grant,
}

/// Errors of a transfer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TransferError {
    #[error("transfer {0:?} is unknown or expired at {1}")]
    Unknown(String, String),
    /// The prefill engine holds another request under this key.
    #[error("{0}")]
    Mismatch(String),
    #[error("no transfer from {address}: {reason}")]
    Unreachable { address: String, reason: String },
}

/// Claims a transfer at the prefill engine.
pub(crate) async fn claim(address: &str, claim: &Claim) -> Result<Grant, TransferError> {
    let unreachable = |reason: String| TransferError::Unreachable { address: address.to_owned(), reason };
    let (status, body) = post(address, "/handover/claim", claim).await.map_err(unreachable)?;
    match status {
        StatusCode::OK => serde_json::from_slice(&body).map_err(|error| unreachable(error.to_string())),
        StatusCode::NOT_FOUND => Err(TransferError::Unknown(claim.key.clone(), address.to_owned())),
        StatusCode::CONFLICT => {
            let body: serde_json::Value = serde_json::from_slice(&body).unwrap_or_default();
            Err(TransferError::Mismatch(body["error"]["message"].as_str().unwrap_or("conflict").to_owned()))
        }
        status => Err(unreachable(status.to_string())),
    }
}

/// Pushes a transfer to the decode engine.
pub(crate) async fn push(address: &str, push: &Push) -> Result<(), String> {
    match post(address, "/handover/push", push).await? {
        (StatusCode::OK, _) => Ok(()),
        (status, _) => Err(status.to_string()),
    }
}

async fn post<T: Serialize>(address: &str, path: &str, body: &T) -> Result<(StatusCode, Bytes), String> {
    let body = serde_json::to_vec(body).map_err(|error| error.to_string())?;
    let stream = TcpStream::connect(address).await.map_err(|error| error.to_string())?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(|error| error.to_string())?;
    let request = Request::post(path).header(HOST, address).header(CONTENT_TYPE, "application/json");
    let request = request.body(Full::new(Bytes::from(body))).map_err(|error| error.to_string())?;
    let exchange = async move {
        let answer = sender.send_request(request).await.map_err(|error| error.to_string())?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), ANSWER_BYTES_MAX).collect().await;
        Ok((status, body.map_err(|error| error.to_string())?.to_bytes()))
    };
    // The connection is polled here and not on a task, so that it ends with this future.
    let connection = async move {
        // The exchange reports the errors of the connection.
        let _ = connection.await;
        std::future::pending().await
    };
    tokio::select! {
        biased;
        result = exchange => result,
        never = connection => never,
    }
}
