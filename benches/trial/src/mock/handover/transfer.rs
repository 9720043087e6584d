//! HTTP client of the block transfer between engines: claims and pushes.
//!
//! One connection per transfer. Dropping the future closes the connection, which the other engine detects.

use bytes::Bytes;
use hyper::StatusCode;
use serde::{Deserialize, Serialize};

use super::ledger::{Claim, Grant};
use crate::driver::{Failure, HttpClient};

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
pub(super) async fn claim(client: &HttpClient, address: &str, claim: &Claim) -> Result<Grant, TransferError> {
    let unreachable = |reason: String| TransferError::Unreachable { address: address.to_owned(), reason };
    let unknown = || TransferError::Unknown(claim.key.clone(), address.to_owned());
    match post(client, address, "/handover/claim", claim).await {
        Ok((StatusCode::OK, body)) => serde_json::from_slice(&body).map_err(|error| unreachable(error.to_string())),
        Ok((StatusCode::NOT_FOUND, _)) | Err(Failure::Timeout(_)) => Err(unknown()),
        Ok((StatusCode::CONFLICT, body)) => {
            let body: serde_json::Value = serde_json::from_slice(&body).unwrap_or_default();
            Err(TransferError::Mismatch(body["error"]["message"].as_str().unwrap_or("conflict").to_owned()))
        }
        Ok((status, _)) => Err(unreachable(status.to_string())),
        Err(failure) => Err(unreachable(failure.to_string())),
    }
}

/// Pushes a transfer to the decode engine. Returns whether it took the blocks.
pub(super) async fn push(client: &HttpClient, address: &str, push: &Push) -> bool {
    matches!(post(client, address, "/handover/push", push).await, Ok((StatusCode::OK, _)))
}

async fn post<T: Serialize>(
    client: &HttpClient,
    address: &str,
    path: &str,
    body: &T,
) -> Result<(StatusCode, Bytes), Failure> {
    let invalid = |_| Failure::Connect(format!("invalid address {address:?}"));
    let uri = format!("http://{address}{path}").parse().map_err(invalid)?;
    client.fetch(&uri, Some(serde_json::to_vec(body).expect("transfers are plain data").into())).await
}
