//! Extractors for paths and bodies of administration requests.
//!
//! Invalid names and ids are rejected before any action, bodies have limits of time and size, and all rejections use
//! the client error format.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::{FromRequest, FromRequestParts, Path, Request};
use axum::http::StatusCode;
use axum::http::request::Parts;
use pointsman::protocol::WorkerId;
use serde::Deserialize;
use serde::de::{DeserializeOwned, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;
use tokio::time::timeout;

use super::auth::client_address;
use super::{Admin, BODY_BYTES_MAX, no_route};
use crate::formats::openai::{ApiError, is_deeper_than};
use crate::pools::model::Model;

/// Timeout of a body.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);

/// The model in the path, by name or alias. A `/` in a name is written `%2F`.
pub(super) struct ModelAt(pub(super) Arc<Model>);

/// The worker id in the path, registered or not.
pub(super) struct WorkerAt {
    pub(super) admin: Arc<Admin>,
    pub(super) model: Arc<Model>,
    pub(super) id: WorkerId,
    pub(super) peer: ClientAddress,
}

/// The client address.
#[derive(Clone, Copy)]
pub(crate) struct ClientAddress(pub(crate) Option<SocketAddr>);

/// A JSON body, regardless of its `Content-Type`.
pub(super) struct Body<T>(pub(super) T);

/// Maximum nesting of a body. Some parts are kept unparsed for later readers.
const DEPTH_MAX: usize = 64;

/// Distinct fields of an object, each as JSON.
pub(super) struct JsonObject(pub(super) BTreeMap<String, Box<RawValue>>);

/// A worker id as a number, or as a string of its decimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Id(pub(super) WorkerId);

impl Id {
    /// Parses decimal digits without sign or leading zeros, so that each id has one spelling.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let id: u64 = text.parse().ok()?;
        (id.to_string() == text).then_some(Self(WorkerId(id)))
    }
}

impl<'de> Deserialize<'de> for Id {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;

        impl Visitor<'_> for Either {
            type Value = Id;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a worker's id: a number from 0 to 2^64 - 1, or its digits as text")
            }

            fn visit_u64<E>(self, id: u64) -> Result<Id, E> {
                Ok(Id(WorkerId(id)))
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Id, E> {
                Id::parse(text).ok_or_else(|| E::invalid_value(serde::de::Unexpected::Str(text), &self))
            }
        }

        deserializer.deserialize_any(Either)
    }
}

impl<'de> Deserialize<'de> for JsonObject {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object;

        impl<'de> Visitor<'de> for Object {
            type Value = JsonObject;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<JsonObject, A::Error> {
                let mut fields = BTreeMap::new();
                while let Some((name, value)) = object.next_entry::<String, Box<RawValue>>()? {
                    if fields.contains_key(&name) {
                        return Err(serde::de::Error::custom(format_args!("duplicate field `{name}`")));
                    }
                    fields.insert(name, value);
                }
                Ok(JsonObject(fields))
            }
        }

        deserializer.deserialize_map(Object)
    }
}

/// Parts of a path.
#[derive(Deserialize)]
struct Named {
    model: String,
    id: Option<String>,
}

async fn named(parts: &mut Parts, admin: &Arc<Admin>) -> Result<Named, ApiError> {
    // A path that is not UTF-8 names nothing.
    Path::<Named>::from_request_parts(parts, admin).await.map(|Path(named)| named).map_err(|_| no_route())
}

/// The model with this name or alias.
pub(super) fn model_named(name: &str, admin: &Admin) -> Result<Arc<Model>, ApiError> {
    let unknown = || ApiError::new(StatusCode::NOT_FOUND, "model_not_found", "unknown model");
    admin.pools.get().models.named(name).cloned().ok_or_else(unknown)
}

impl FromRequestParts<Arc<Admin>> for ModelAt {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, admin: &Arc<Admin>) -> Result<Self, ApiError> {
        model_named(&named(parts, admin).await?.model, admin).map(Self)
    }
}

impl FromRequestParts<Arc<Admin>> for WorkerAt {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, admin: &Arc<Admin>) -> Result<Self, ApiError> {
        let named = named(parts, admin).await?;
        let model = model_named(&named.model, admin)?;
        let malformed = || {
            let message = "a worker's id must be a number from 0 to 2^64 - 1, in decimal digits without leading zeros";
            ApiError::invalid("invalid_worker_id", Some("id"), message)
        };
        let Id(id) = named.id.and_then(|id| Id::parse(&id)).ok_or_else(malformed)?;
        Ok(Self { admin: Arc::clone(admin), model, id, peer: ClientAddress(client_address(&parts.extensions)) })
    }
}

impl<S: Sync> FromRequestParts<S> for ClientAddress {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(Self(client_address(&parts.extensions)))
    }
}

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Body<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, ApiError> {
        let read = timeout(BODY_TIMEOUT, Bytes::from_request(request, state)).await.map_err(|_| too_slow())?;
        let body = read.map_err(|rejection| match rejection.status() {
            StatusCode::PAYLOAD_TOO_LARGE => {
                let message = format!("the body is longer than {BODY_BYTES_MAX} bytes");
                ApiError::new(rejection.status(), "body_too_large", message)
            }
            _ => ApiError::invalid("invalid_body", None, "the body ended early"),
        })?;
        if is_deeper_than(DEPTH_MAX, &body) {
            let message = format!("the body is nested more than {DEPTH_MAX} deep");
            return Err(ApiError::invalid("invalid_json", None, message));
        }
        serde_json::from_slice(&body).map(Self).map_err(|error| not_understood(&error))
    }
}

fn too_slow() -> ApiError {
    let message = format!("the body did not arrive within {} s", BODY_TIMEOUT.as_secs());
    ApiError::new(StatusCode::REQUEST_TIMEOUT, "body_timeout", message)
}

/// A body that is not JSON or has the wrong shape.
pub(super) fn not_understood(error: &serde_json::Error) -> ApiError {
    ApiError::invalid("invalid_json", None, format!("invalid body: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn brackets_in_strings_do_not_count_as_depth() {
        for (json, depth) in [
            ("1", 0),
            ("[]", 1),
            (r#"[[1],[2],{"a":[3]}]"#, 3),
            (r#"["[[[["]"#, 1),
            (r#"["\"[[[["]"#, 1),
            (r#"["\\",[[]]]"#, 3),
            (r#"{"a\\\"{":[]}"#, 2),
        ] {
            let json = json.as_bytes();
            assert!(!is_deeper_than(depth, json) && (depth == 0 || is_deeper_than(depth - 1, json)), "{json:?}");
        }
    }
}
