//! Tower layer that places requests before the inner service sends them.
//!
//! The booking of a request ends with the response body, with an error of the inner service, or with the future that
//! serves it, whichever is first. Outer layers insert a [`RouteRequest<'static>`] into the extensions of a request; the
//! inner service sends the request to the [`PlacedTarget`] in its extensions.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use http_body::Body;
use tower_layer::Layer;
use tower_service::Service;

use super::body::PlacedBody;
use super::placement::Placement;
use super::router::Router;
use crate::error::RouteError;
use crate::health::Outcome;
use crate::protocol::WorkerRank;
use crate::request::RouteRequest;

/// Target of a request. The inner service of [`PlacementLayer`] finds it in the extensions.
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
            decision: placement.number(),
            cached_tokens: placement.cached_tokens(),
        }
    }
}

/// Reason why a request has no response.
#[derive(Debug, thiserror::Error)]
pub enum PlaceError<E> {
    /// The extensions of the HTTP request contain no [`RouteRequest`].
    #[error("the request extensions contain no RouteRequest")]
    MissingRequest,
    /// The placement failed.
    #[error(transparent)]
    Route(#[from] RouteError),
    /// The inner service failed; `E` is its error.
    #[error("{0}")]
    Inner(E),
}

/// Layer that places the requests of services with errors of type `E`. Cheap to clone.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::convert::Infallible;
///
/// use bytes::Bytes;
/// use http_body_util::{BodyExt as _, Full};
/// use pointsman::protocol::{WorkerConfig, WorkerId};
/// use pointsman::{PlacedTarget, PlacementLayer, Prompt, RouteRequest, Router, RouterConfig};
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
/// request.extensions_mut().insert(RouteRequest::new("req-1", Prompt::OwnedTokens([1, 2, 3].into())));
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
            let to_route =
                request.extensions_mut().remove::<RouteRequest<'static>>().ok_or(PlaceError::MissingRequest)?;
            let forecast_tokens = to_route.options.forecast_output_tokens();
            let placement = router.route(to_route).await?;
            request.extensions_mut().insert(PlacedTarget::of(&placement));
            match S::call(&mut inner, request).await {
                Ok(response) => {
                    let response = placement.wrap_response(response);
                    Ok(match forecast_tokens {
                        Some(tokens) => response.map(|body| body.expecting(tokens)),
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
