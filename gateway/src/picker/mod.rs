//! Endpoint picker: the choice of the gateway for proxies that speak Envoy's external processing protocol.
//!
//! `[picker]` adds a listener of gRPC with the services `envoy.service.ext_proc.v3.ExternalProcessor` and
//! `grpc.health.v1.Health`. `exchange` has the order of the messages, `decide` the decision, `session` one
//! exchange. Requests are prepared, placed and accounted as those of the proxy.

mod decide;
mod exchange;
#[cfg(test)]
pub(crate) mod hostile;
mod parts_body;
mod session;
mod wire;

use std::future::{Future, Ready, ready};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::routing::post;
use metrics::Counter;
use tokio::sync::mpsc;
use tokio::time::sleep;
use tokio_stream::wrappers::ReceiverStream;
use tonic::codec::Streaming;
use tonic::server::{Grpc, ServerStreamingService, StreamingService, UnaryService};
use tonic::{Response, Status};
use tonic_prost::ProstCodec;

use crate::observe::requests::PICKS;
use crate::pools::latest::Latest;
use crate::pools::readiness;
use crate::pools::serving::Pools;
use crate::proxy::context::RequestContext;
use crate::settings::PickerSettings;
use exchange::Exchange;
use session::Session;
use wire::{HealthCheckRequest, HealthCheckResponse, ProcessingRequest, ProcessingResponse};

/// Namespace of the answer in the proxy's metadata.
const LB_NAMESPACE: &str = "envoy.lb";
/// Header and metadata key of the chosen endpoints.
const DESTINATION: &str = "x-gateway-destination-endpoint";
/// Metadata key of the endpoint that served the request.
const SERVED: &str = "x-gateway-destination-endpoint-served";
/// Namespace and key of the endpoints to which the proxy limits the choice.
const SUBSET_NAMESPACE: &str = "envoy.lb.subset_hint";
const SUBSET: &str = "x-gateway-destination-endpoint-subset";
/// Headers of the conformance suite of the Gateway API Inference Extension: endpoints that the client selects, and the
/// endpoint that served the request.
const TEST_SELECTION: &str = "test-epp-endpoint-selection";
const TEST_SERVED: &str = "x-conformance-test-served-endpoint";

/// Answers that wait for the proxy to read them.
const ANSWERS_MAX: usize = 16;

/// Interval of the readiness checks of a health watch.
const WATCH_INTERVAL: Duration = Duration::from_secs(1);

/// Counters of exchanges by their result.
pub(crate) struct PickerMeters {
    picked: Counter,
    refused: Counter,
    moved: Counter,
}

impl PickerMeters {
    fn new() -> Self {
        let counter = |result: &'static str| metrics::counter!(PICKS.name, "result" => result);
        Self { picked: counter("picked"), refused: counter("refused"), moved: counter("moved") }
    }
}

/// Routes of the picker's listener.
pub(crate) fn routes(context: Latest<RequestContext>, pools: Latest<Pools>, settings: &PickerSettings) -> Router {
    let process = Process {
        context,
        meters: Arc::new(PickerMeters::new()),
        rules: PickRules { has_fallback: settings.fallback, is_conformance: settings.conformance },
    };
    let health = Health { pools };
    let watch = health.clone();
    Router::new()
        .route(
            "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
            post(move |request: Request<Body>| {
                let process = process.clone();
                async move {
                    Grpc::new(ProstCodec::<ProcessingResponse, ProcessingRequest>::default())
                        .streaming(process, request)
                        .await
                }
            }),
        )
        .route(
            "/grpc.health.v1.Health/Check",
            post(move |request: Request<Body>| {
                let health = health.clone();
                async move {
                    Grpc::new(ProstCodec::<HealthCheckResponse, HealthCheckRequest>::default())
                        .unary(health, request)
                        .await
                }
            }),
        )
        .route(
            "/grpc.health.v1.Health/Watch",
            post(move |request: Request<Body>| {
                let health = watch.clone();
                async move {
                    Grpc::new(ProstCodec::<HealthCheckResponse, HealthCheckRequest>::default())
                        .server_streaming(health, request)
                        .await
                }
            }),
        )
}

/// `ExternalProcessor.Process`.
#[derive(Clone)]
struct Process {
    context: Latest<RequestContext>,
    meters: Arc<PickerMeters>,
    rules: PickRules,
}

/// Settings of each pick.
#[derive(Clone, Copy)]
struct PickRules {
    /// Whether a second endpoint is named.
    has_fallback: bool,
    /// Whether the client may select endpoints.
    is_conformance: bool,
}

impl StreamingService<ProcessingRequest> for Process {
    type Response = ProcessingResponse;
    type ResponseStream = ReceiverStream<Result<ProcessingResponse, Status>>;
    type Future = Ready<Result<Response<Self::ResponseStream>, Status>>;

    fn call(&mut self, request: tonic::Request<Streaming<ProcessingRequest>>) -> Self::Future {
        let (answers, receiver) = mpsc::channel(ANSWERS_MAX);
        let session = Session {
            context: self.context.get(),
            meters: Arc::clone(&self.meters),
            rules: self.rules,
            answers: answers.clone(),
            exchange: Exchange::default(),
            request_headers: axum::http::HeaderMap::new(),
            parts: None,
            waiting: None,
            deciding: None,
            picked: None,
            response: None,
        };
        let inbound = request.into_inner();
        tokio::spawn(async move {
            tokio::select! {
                biased;
                () = session.run(inbound) => {}
                // The proxy has closed the stream: the booking ends now.
                () = answers.closed() => {}
            }
        });
        ready(Ok(Response::new(ReceiverStream::new(receiver))))
    }
}

/// `grpc.health.v1.Health`: `liveness` always serves, other services when `/ready` is 200.
#[derive(Clone)]
struct Health {
    pools: Latest<Pools>,
}

impl Health {
    async fn reply(&self, service: &str) -> HealthCheckResponse {
        HealthCheckResponse::of(service == "liveness" || readiness::is_ready(&self.pools.get()).await)
    }
}

impl UnaryService<HealthCheckRequest> for Health {
    type Response = HealthCheckResponse;
    type Future = Pin<Box<dyn Future<Output = Result<Response<HealthCheckResponse>, Status>> + Send>>;

    fn call(&mut self, request: tonic::Request<HealthCheckRequest>) -> Self::Future {
        let health = self.clone();
        Box::pin(async move { Ok(Response::new(health.reply(&request.into_inner().service).await)) })
    }
}

impl ServerStreamingService<HealthCheckRequest> for Health {
    type Response = HealthCheckResponse;
    type ResponseStream = ReceiverStream<Result<HealthCheckResponse, Status>>;
    type Future = Ready<Result<Response<Self::ResponseStream>, Status>>;

    fn call(&mut self, request: tonic::Request<HealthCheckRequest>) -> Self::Future {
        let (health, service) = (self.clone(), request.into_inner().service);
        let (replies, receiver) = mpsc::channel(1);
        tokio::spawn(async move {
            let mut last = None;
            loop {
                // An open watch would delay the shutdown. Read before the reply, so that the last one is `NOT_SERVING`.
                let is_draining = health.pools.get().readiness.is_draining();
                let reply = health.reply(&service).await;
                if last.as_ref() != Some(&reply) {
                    last = Some(reply.clone());
                    if replies.send(Ok(reply)).await.is_err() {
                        return;
                    }
                }
                if is_draining {
                    return;
                }
                tokio::select! {
                    biased;
                    () = sleep(WATCH_INTERVAL) => {}
                    () = replies.closed() => return,
                }
            }
        });
        ready(Ok(Response::new(ReceiverStream::new(receiver))))
    }
}
