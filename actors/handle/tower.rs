//! Tower layer that places requests before the inner service sends them.
//!
//! The booking of a request ends with the response body, with an error of the inner service, or with the future that
//! serves it, whichever is first. Outer layers supply the prompt; the inner service sends the request to the target in
//! its extensions.

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

/// An owned prompt in the extensions of a request.
#[derive(Clone, Debug)]
pub enum InputPrompt {
    /// Token ids.
    Tokens(Arc<[u32]>),
    /// Hashes of the prompt.
    Hashed(HashedPrompt),
}

/// Placement options in the extensions of a request. The fields are those of [`RouteRequest`].
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
    /// Names the booking; unique among bookings that have not ended.
    pub request_id: String,
    /// The prompt.
    pub prompt: InputPrompt,
    /// LoRA adapter.
    pub lora_name: Option<String>,
    /// Cache salt: only equal salts share cached blocks.
    pub cache_salt: Option<String>,
    /// Images and other media in the prompt.
    pub mm_spans: Vec<MmSpan>,
    /// Tenant of the request. The tenants of a class are served in turn by fair queueing.
    pub tenant: Option<String>,
    /// Requests with a higher value leave the queue first, before all other criteria.
    pub strict_priority: u32,
    /// Seconds of advance over other requests of the same tenant in the queue.
    pub priority_jump: f64,
    /// Longest time until placement.
    pub deadline: Option<Duration>,
    /// Queueing class.
    pub policy_class: Option<String>,
    /// Whether to reject the request instead of queueing it.
    pub do_not_queue: bool,
    /// Required and preferred ranks.
    pub constraints: Option<Constraints>,
    /// Session id.
    pub session_id: Option<String>,
    /// Expected output tokens. The weight of the output blocks then falls with progress.
    pub expected_output_tokens: Option<u32>,
    /// Limit of output tokens.
    pub output_tokens_max: Option<u32>,
    /// Whether the response is not streamed.
    pub not_streamed: bool,
    /// Per-request overrides of the router configuration.
    pub overrides: Option<RouterConfigOverride>,
}

impl PlacementInput {
    /// A request with a prompt and default options.
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

    /// Converts to the request type of the router.
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

/// Target of a request. The inner service of [`PlaceRequests`] finds it in the extensions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacedTarget {
    /// Endpoint of the worker, from its configuration.
    pub endpoint: Arc<str>,
    /// The rank.
    pub rank: WorkerRank,
    /// Number of the rank at its engine; `None` for a worker with a single rank.
    pub rank_at_worker: Option<u32>,
    /// Number of the decision.
    pub decision: u64,
    /// Prompt tokens that the prefill is expected to skip.
    pub cached_tokens: u32,
}

impl PlacedTarget {
    /// The target of a placement.
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

/// Reason why a request has no response.
#[derive(Debug, thiserror::Error)]
pub enum PlaceError<E> {
    /// The request has no placement options.
    #[error("the request extensions contain no PlacementInput")]
    MissingInput,
    /// The placement failed.
    #[error(transparent)]
    Route(#[from] RouteError),
    /// The inner service failed; `E` is its error.
    #[error("{0}")]
    Inner(E),
}

/// Layer that creates [`PlaceRequests`] for services with errors of type `E`. Cheap to clone.
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
    /// Layer for this router. An error of the inner service counts as [`Outcome::ConnectFailed`].
    #[must_use]
    pub fn new(router: Router) -> Self {
        Self { router, outcome_of: |_| Outcome::ConnectFailed }
    }

    /// Sets the mapping from errors of the inner service to outcomes. [`Outcome::Ok`] for errors that the rank did not
    /// cause.
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

/// Service that places each request and then passes it to `S`: see [`PlacementLayer`].
///
/// It is ready when `S` is. Capacity of the router is not part of readiness, because it depends on the request: the
/// request waits or is rejected during its placement. Resources that `S` reserves in `poll_ready` stay reserved
/// meanwhile, so a concurrency limit belongs outside this layer.
///
/// Cancel-safe: dropping the future frees the booking.
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

/// Future of the response. Boxed, because the future of the placement's `async fn` has no name.
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
        // The ready service is consumed by this call; its clone must become ready first.
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
