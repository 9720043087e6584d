//! Access to the workers of one model: the shared client, with the API key of each worker.
//!
//! The key of a worker is that of its own `api_key_file`, else that of the model, else that of the gateway. Every request
//! to a worker takes it from here: forwarded requests, probes, polls, tokenization and aborts.

use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::body::Bytes;
use axum::http::HeaderValue;
use http_body_util::Full;
use hyper::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, USER_AGENT};
use hyper::http::request::Builder;
use hyper::{Request, StatusCode, Uri};
use parking_lot::RwLock;
use pointsman::protocol::WorkerId;
use pointsman::{BoxFuture, EngineClient, EngineGet, EngineHttpError, HttpUrl, WorkerEntry};
use tokio::sync::watch;
use tokio::time::timeout;

use super::keys::KeyFile;
use super::{Upstream, UpstreamError};

/// Access to the workers of one model. Clones share their state.
#[derive(Clone)]
pub struct WorkerAccess(Arc<Shared>);

struct Shared {
    upstream: Upstream,
    /// `worker_api_key_file` of the model.
    key_file: RwLock<Option<PathBuf>>,
    /// Workers of the model's router, once it runs.
    workers: OnceLock<watch::Receiver<Arc<[WorkerEntry]>>>,
}

impl WorkerAccess {
    /// Access with `worker_api_key_file` of the model.
    #[must_use]
    pub fn new(upstream: Upstream, key_file: Option<PathBuf>) -> Self {
        Self(Arc::new(Shared { upstream, key_file: RwLock::new(key_file), workers: OnceLock::new() }))
    }

    /// Replaces `worker_api_key_file` of the model.
    pub(crate) fn set_key_file(&self, key_file: Option<PathBuf>) {
        *self.0.key_file.write() = key_file;
    }

    /// Takes the key files of workers from here. The first call applies.
    pub(crate) fn follow(&self, workers: watch::Receiver<Arc<[WorkerEntry]>>) {
        let _ = self.0.workers.set(workers);
    }

    /// `Authorization` for a worker, if any setting names a key for it.
    ///
    /// # Errors
    /// An unusable key file.
    pub(crate) fn authorization(&self, worker: WorkerId) -> Result<Option<HeaderValue>, UpstreamError> {
        self.known_key(|workers| workers.binary_search_by_key(&worker, |entry| entry.worker).ok())
    }

    /// Whether the engine of a worker receives hints of sessions, and of priorities.
    pub(crate) fn hints(&self, worker: WorkerId) -> (bool, bool) {
        let workers = self.0.workers.get().map(watch::Receiver::borrow);
        let found = workers.and_then(|workers| {
            let config = &workers[workers.binary_search_by_key(&worker, |entry| entry.worker).ok()?].config;
            Some((config.session_hints, config.priority_hints))
        });
        found.unwrap_or_default()
    }

    fn known_key(
        &self,
        position: impl FnOnce(&[WorkerEntry]) -> Option<usize>,
    ) -> Result<Option<HeaderValue>, UpstreamError> {
        let own = self.0.workers.get().and_then(|workers| {
            let workers = workers.borrow();
            position(&workers).and_then(|n| workers[n].config.api_key_file.clone())
        });
        self.key_file(own).map(|file| self.0.upstream.0.keys.header(&file)).transpose().map_err(UpstreamError::Key)
    }

    /// The first key file in the order of precedence.
    fn key_file(&self, own: Option<PathBuf>) -> Option<KeyFile> {
        let of = |setting| move |file| KeyFile { setting, file };
        let of_model = || self.0.key_file.read().clone();
        own.map(of("api_key_file of the worker"))
            .or_else(|| of_model().map(of("worker_api_key_file of the model")))
            .or_else(|| self.0.upstream.key_file().map(of("gateway.worker_api_key_file")))
    }

    /// As [`call`](Self::call), for a response with status 200.
    ///
    /// # Errors
    /// See [`UpstreamError`]; includes any status except 200.
    pub(crate) async fn query(
        &self,
        address: (&str, &str),
        body: Bytes,
        within: Duration,
        bytes_max: usize,
    ) -> Result<Bytes, UpstreamError> {
        match self.call(address, body, within, bytes_max).await? {
            (StatusCode::OK, body) => Ok(body),
            (status, _) => Err(UpstreamError::Status(status)),
        }
    }

    /// Sends JSON of the gateway itself to `path` of a worker and returns status and body, of at most `bytes_max`.
    ///
    /// # Errors
    /// See [`UpstreamError`].
    pub(crate) async fn call(
        &self,
        (endpoint, path): (&str, &str),
        body: Bytes,
        within: Duration,
        bytes_max: usize,
    ) -> Result<(StatusCode, Bytes), UpstreamError> {
        let url = [endpoint.trim_end_matches('/'), path].concat();
        let address = || UpstreamError::Address(url.clone());
        let uri: Uri = url.parse().map_err(|_| address())?;
        let key = self.known_key(|workers| workers.iter().position(|entry| entry.config.endpoint == endpoint))?;
        let request = authorized(Request::post(uri).header(CONTENT_TYPE, "application/json"), key);
        let request = request.body(Full::new(body)).map_err(|_| address())?;
        let answered = self.0.upstream.receive(request, bytes_max);
        timeout(within, answered).await.unwrap_or(Err(UpstreamError::Timeout(within)))
    }

    async fn poll(&self, request: EngineGet) -> Result<Vec<u8>, EngineHttpError> {
        let EngineGet { url, api_key_file, timeout: _, bytes_max } = request;
        let refused = |rule: &str| HttpUrl::refused(&url, rule);
        let uri: Uri = url.parse().map_err(|_| refused("it is no address"))?;
        let key_file = self.key_file(api_key_file);
        let key = match &key_file {
            Some(file) => {
                let key = self.0.upstream.0.keys.fresh_header(file).await;
                Some(key.map_err(|error| EngineHttpError::Key(error.to_string()))?)
            }
            None => None,
        };
        let mut is_repeated = false;
        loop {
            let builder = Request::get(uri.clone()).header(USER_AGENT, "pointsman").header(ACCEPT, "*/*");
            let request = authorized(builder, key.clone()).body(Full::new(Bytes::new()));
            let request = request.map_err(|_| refused("it is no address"))?;
            match self.0.upstream.receive(request, bytes_max).await {
                Ok((StatusCode::OK, body)) => return Ok(body.into()),
                Ok((status, _)) => {
                    return Err(engine_error(UpstreamError::Status(status), key_file.map(|file| file.setting)));
                }
                // The engine may have closed a connection of the pool during its reuse.
                Err(UpstreamError::Broken(_) | UpstreamError::Closed(_)) if !is_repeated => is_repeated = true,
                Err(error) => return Err(engine_error(error, key_file.map(|file| file.setting))),
            }
        }
    }
}

impl From<Upstream> for WorkerAccess {
    fn from(upstream: Upstream) -> Self {
        Self::new(upstream, None)
    }
}

impl EngineClient for WorkerAccess {
    fn get(&self, request: EngineGet) -> BoxFuture<'_, Result<Vec<u8>, EngineHttpError>> {
        Box::pin(async move {
            let within = request.timeout;
            timeout(within, self.poll(request)).await.unwrap_or(Err(EngineHttpError::Timeout(within)))
        })
    }
}

impl fmt::Debug for WorkerAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorkerAccess").field("key_file", &self.0.key_file).finish_non_exhaustive()
    }
}

fn authorized(request: Builder, key: Option<HeaderValue>) -> Builder {
    match key {
        Some(key) => request.header(AUTHORIZATION, key),
        None => request,
    }
}

/// The error of a poll with the key of this setting.
fn engine_error(error: UpstreamError, setting: Option<&str>) -> EngineHttpError {
    match error {
        UpstreamError::NoDescriptor => EngineHttpError::NoDescriptor,
        UpstreamError::Connect(error) => EngineHttpError::Connect(error.cause),
        UpstreamError::Timeout(within) => EngineHttpError::Timeout(within),
        UpstreamError::Broken(reason) | UpstreamError::Closed(reason) => EngineHttpError::Broken(reason),
        UpstreamError::Status(status @ (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN)) => {
            let advice = match setting {
                Some(setting) => format!("the engine rejects the API key of {setting}"),
                None => "the engine requires an API key; set gateway.worker_api_key_file, worker_api_key_file of the \
                         model, or api_key_file of the worker"
                    .to_owned(),
            };
            EngineHttpError::Unauthorized { status: status.as_u16(), advice }
        }
        UpstreamError::Status(status) => EngineHttpError::Status(status.as_u16()),
        UpstreamError::TooLong(bytes) => EngineHttpError::TooLong(bytes),
        UpstreamError::Address(url) => EngineHttpError::Url(HttpUrl::refused(&url, "it is no address")),
        UpstreamError::Key(error) => EngineHttpError::Key(error.to_string()),
    }
}
