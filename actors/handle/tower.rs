//! A tower layer that places requests before they are sent.
//!
//! Owns the order: placed, sent, answered. Promises that a request's booking ends with its answer's body, with an error
//! of the inner service, or with the future that serves it, whichever is first. Leaves what a request's prompt is to
//! whoever is outside of it, and the sending, by the target that it finds, to the service inside.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http_body::Body;
use tower_layer::Layer;
use tower_service::Service;

use super::body::PlacedBody;
use super::placement::Placement;
use super::request::{Prompt, RouteRequest};
use super::router::Router;
use crate::config::RouterConfigOverride;
use crate::error::RouteError;
use crate::hashing::{HashedPrompt, MmSpan};
use crate::health::Outcome;
use crate::protocol::WorkerRank;
use crate::select::Constraints;

/// A prompt that travels with its request.
#[derive(Clone, Debug)]
pub enum InputPrompt {
    /// Token ids.
    Tokens(Arc<[u32]>),
    /// Its hashes.
    Hashed(HashedPrompt),
}

/// What a request has to say of itself to be placed, put into its extensions. The fields are those of [`RouteRequest`].
///
/// ```
/// use pointsman::{InputPrompt, PlacementInput};
///
/// let prompt = InputPrompt::Tokens([1, 2, 3].into());
/// let input = PlacementInput { do_not_queue: true, ..PlacementInput::new("req-1", prompt) };
/// assert_eq!(input.as_route().request_id, Some("req-1"));
/// ```
#[derive(Clone, Debug)]
pub struct PlacementInput {
    /// Names the booking; unique among those that have not ended.
    pub request_id: String,
    /// The prompt.
    pub prompt: InputPrompt,
    /// The LoRA adapter it runs under.
    pub lora_name: Option<String>,
    /// Keeps its cache apart from others'.
    pub cache_salt: Option<String>,
    /// Images and the like in the prompt.
    pub mm_spans: Vec<MmSpan>,
    /// The customer it belongs to: the customers of a class take turns in the queue.
    pub tenant: Option<String>,
    /// Higher leaves the queue first, whatever else.
    pub strict_priority: u32,
    /// Seconds by which it goes ahead of its tenant's other requests in the queue.
    pub priority_jump: f64,
    /// How long it may take to be placed.
    pub deadline: Option<Duration>,
    /// The class that it waits in.
    pub policy_class: Option<String>,
    /// Whether it would rather be refused than wait.
    pub do_not_queue: bool,
    /// Who may serve it, and who should.
    pub constraints: Option<Constraints>,
    /// Its session.
    pub session_id: Option<String>,
    /// Output tokens that the caller expects: its blocks then count for less and less as they come.
    pub expected_output_tokens: Option<u32>,
    /// Output tokens that it may have at most.
    pub output_tokens_max: Option<u32>,
    /// Whether its answer comes whole.
    pub not_streamed: bool,
    /// Settings that are otherwise for it.
    pub overrides: Option<RouterConfigOverride>,
}

impl PlacementInput {
    /// A request with nothing but a prompt.
    #[must_use]
    pub fn new(request_id: impl Into<String>, prompt: InputPrompt) -> Self {
        Self {
            request_id: request_id.into(),
            prompt,
            lora_name: None,
            cache_salt: None,
            mm_spans: Vec::new(),
            tenant: None,
            strict_priority: 0,
            priority_jump: 0.0,
            deadline: None,
            policy_class: None,
            do_not_queue: false,
            constraints: None,
            session_id: None,
            expected_output_tokens: None,
            output_tokens_max: None,
            not_streamed: false,
            overrides: None,
        }
    }

    /// The same as a router takes it.
    #[must_use]
    pub fn as_route(&self) -> RouteRequest<'_> {
        let prompt = match &self.prompt {
            InputPrompt::Tokens(tokens) => Prompt::Tokens(tokens),
            InputPrompt::Hashed(hashed) => Prompt::Hashed(hashed),
        };
        RouteRequest {
            lora_name: self.lora_name.as_deref(),
            cache_salt: self.cache_salt.as_deref(),
            mm_spans: &self.mm_spans,
            tenant: self.tenant.as_deref(),
            strict_priority: self.strict_priority,
            priority_jump: self.priority_jump,
            deadline: self.deadline,
            policy_class: self.policy_class.as_deref(),
            do_not_queue: self.do_not_queue,
            constraints: self.constraints.as_ref(),
            session_id: self.session_id.as_deref(),
            expected_output_tokens: self.expected_output_tokens,
            output_tokens_max: self.output_tokens_max,
            not_streamed: self.not_streamed,
            overrides: self.overrides.as_ref(),
            ..RouteRequest::new(&self.request_id, prompt)
        }
    }
}

/// Where a request is to be sent: found in its extensions by the service inside of [`PlaceRequests`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacedTarget {
    /// Where the worker is, as its configuration said.
    pub endpoint: Arc<str>,
    /// The rank.
    pub rank: WorkerRank,
    /// What the engine there calls the rank; `None` where it has one rank only.
    pub rank_at_worker: Option<u32>,
    /// The decision's number.
    pub decision: u64,
    /// What the prefill is expected to skip, in tokens.
    pub cached_tokens: u32,
}

impl PlacedTarget {
    /// Where this placement is.
    #[must_use]
    pub fn of(placement: &Placement) -> Self {
        Self {
            endpoint: placement.endpoint_shared(),
            rank: placement.rank(),
            rank_at_worker: placement.rank_at_worker(),
            decision: placement.decision(),
            cached_tokens: placement.cached_tokens(),
        }
    }
}

/// Why a request was not answered.
#[derive(Debug, thiserror::Error)]
pub enum PlaceError<E> {
    /// Nobody has said what is to be placed.
    #[error("the request has no PlacementInput among its extensions")]
    MissingInput,
    /// It was not placed.
    #[error(transparent)]
    Route(#[from] RouteError),
    /// The service inside has failed; `E` is its error.
    #[error("{0}")]
    Inner(E),
}

/// Makes [`PlaceRequests`] of services whose errors are `E`. Cheap to clone.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::convert::Infallible;
///
/// use bytes::Bytes;
/// use http_body_util::{BodyExt as _, Full};
/// use pointsman::protocol::{WorkerConfig, WorkerId};
/// use pointsman::{InputPrompt, PlacedTarget, PlacementInput, PlacementLayer, Router, RouterConfig};
/// use tower::{Layer as _, ServiceExt as _, service_fn};
///
/// let worker = WorkerConfig::at("http://10.0.0.1:8000");
/// let router = Router::builder(RouterConfig::default()).worker(WorkerId(1), worker).start().await?;
/// // In truth a client, that sends the request to its target.
/// let client = service_fn(async |request: http::Request<()>| {
///     let target = request.extensions().get::<PlacedTarget>().expect("it has been placed");
///     Ok::<_, Infallible>(http::Response::new(Full::<Bytes>::from(format!("from {}", target.endpoint))))
/// });
/// let mut request = http::Request::new(());
/// request.extensions_mut().insert(PlacementInput::new("req-1", InputPrompt::Tokens([1, 2, 3].into())));
/// let response = PlacementLayer::new(router.clone()).layer(client).oneshot(request).await?;
/// assert_eq!(router.health().leases, 1);
/// assert_eq!(response.into_body().collect().await?.to_bytes(), "from http://10.0.0.1:8000");
/// assert_eq!(router.health().leases, 0);
/// # Ok(())
/// # }
/// ```
pub struct PlacementLayer<E> {
    router: Router,
    outcome_of: fn(&E) -> Outcome,
}

impl<E> PlacementLayer<E> {
    /// Places by this router. An error of the service inside counts as [`Outcome::ConnectFailed`].
    #[must_use]
    pub fn new(router: Router) -> Self {
        Self { router, outcome_of: |_| Outcome::ConnectFailed }
    }

    /// What the service's errors say of a rank's health. [`Outcome::Ok`] for those that say nothing against it.
    #[must_use]
    pub fn outcomes(mut self, outcome_of: fn(&E) -> Outcome) -> Self {
        self.outcome_of = outcome_of;
        self
    }
}

impl<E> Clone for PlacementLayer<E> {
    fn clone(&self) -> Self {
        Self { router: self.router.clone(), outcome_of: self.outcome_of }
    }
}

impl<E> std::fmt::Debug for PlacementLayer<E> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PlacementLayer").field("router", &self.router).finish_non_exhaustive()
    }
}

impl<S, E> Layer<S> for PlacementLayer<E> {
    type Service = PlaceRequests<S, E>;

    fn layer(&self, inner: S) -> PlaceRequests<S, E> {
        PlaceRequests { layer: self.clone(), inner }
    }
}

/// A service that places each request, then has `S` send it: see [`PlacementLayer`].
///
/// It is ready when `S` is. Whether there is room for a request is another question, which depends on the request: it
/// waits, or is refused, while it is placed. What `S` sets aside when it is ready is kept for the request meanwhile; a
/// limit of requests in flight is therefore better put outside.
///
/// Cancel-safe: dropping the future frees what was booked.
pub struct PlaceRequests<S, E> {
    layer: PlacementLayer<E>,
    inner: S,
}

impl<S: Clone, E> Clone for PlaceRequests<S, E> {
    fn clone(&self) -> Self {
        Self { layer: self.layer.clone(), inner: self.inner.clone() }
    }
}

impl<S: std::fmt::Debug, E> std::fmt::Debug for PlaceRequests<S, E> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PlaceRequests").field("inner", &self.inner).finish_non_exhaustive()
    }
}

/// The answer to come. Boxed: placing is an `async fn`, whose future has no name.
pub type PlaceFuture<B, E> = Pin<Box<dyn Future<Output = Result<http::Response<PlacedBody<B>>, PlaceError<E>>> + Send>>;

impl<S, R, B> Service<http::Request<R>> for PlaceRequests<S, S::Error>
where
    S: Service<http::Request<R>, Response = http::Response<B>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: 'static,
    R: Send + 'static,
    B: Body,
{
    type Response = http::Response<PlacedBody<B>>;
    type Error = PlaceError<S::Error>;
    type Future = PlaceFuture<B, S::Error>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx).map_err(PlaceError::Inner)
    }

    fn call(&mut self, mut request: http::Request<R>) -> Self::Future {
        // The one that was ready goes; its successor has yet to become so.
        let successor = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, successor);
        let PlacementLayer { router, outcome_of } = self.layer.clone();
        Box::pin(async move {
            let input = request.extensions_mut().remove::<PlacementInput>().ok_or(PlaceError::MissingInput)?;
            let placement = router.route(input.as_route()).await?;
            request.extensions_mut().insert(PlacedTarget::of(&placement));
            match S::call(&mut inner, request).await {
                Ok(response) => {
                    let response = placement.wrap_response(response);
                    Ok(match input.expected_output_tokens {
                        Some(expected) => {
                            let expected = expected.min(input.output_tokens_max.unwrap_or(expected));
                            response.map(|body| body.expecting(expected))
                        }
                        None => response,
                    })
                }
                Err(error) => {
                    placement.outcome(outcome_of(&error));
                    Err(PlaceError::Inner(error))
                }
            }
        })
    }
}
