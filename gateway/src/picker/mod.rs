//! Endpoint picker: the choice of the gateway for proxies that speak Envoy's external processing protocol.
//!
//! `[picker]` adds a listener of gRPC with the services `envoy.service.ext_proc.v3.ExternalProcessor` and
//! `grpc.health.v1.Health`. `exchange` has the order of the messages, `decide` the decision, `session` one
//! exchange. Requests are prepared, placed and accounted as those of the proxy.

mod decide;
mod exchange;
mod session;
#[cfg(test)]
pub(crate) mod tests;
mod wire;

use std::future::ready;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use axum::routing::post;
use metrics::Counter;
use tokio::sync::mpsc;
use tokio::time::sleep;
use tokio_stream::wrappers::ReceiverStream;
use tonic::codec::Streaming;
use tonic::server::Grpc;
use tonic::{Request as Call, Response, Status};
use tonic_prost::ProstCodec;
use tower::service_fn;

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

/// Messages of a streamed reply.
type Replies<T> = ReceiverStream<Result<T, Status>>;

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
    let rules = PickRules { has_fallback: settings.fallback, is_conformance: settings.conformance };
    let (meters, watched) = (Arc::new(PickerMeters::new()), pools.clone());
    let process = async move |request: Request| {
        let start = |call: Call<Streaming<ProcessingRequest>>| {
            let answers = process(context.get(), Arc::clone(&meters), rules, call.into_inner());
            ready(Ok::<_, Status>(Response::new(answers)))
        };
        Grpc::new(ProstCodec::<ProcessingResponse, _>::default()).streaming(service_fn(start), request).await
    };
    let check = async move |request: Request| {
        let reply = async |call: Call<HealthCheckRequest>| {
            Ok::<_, Status>(Response::new(health(&pools.get(), &call.into_inner().service).await))
        };
        Grpc::new(ProstCodec::<HealthCheckResponse, _>::default()).unary(service_fn(reply), request).await
    };
    let watch = async move |request: Request| {
        let start = |call: Call<HealthCheckRequest>| {
            let replies = watch(watched.clone(), call.into_inner().service);
            ready(Ok::<_, Status>(Response::new(replies)))
        };
        Grpc::new(ProstCodec::<HealthCheckResponse, _>::default()).server_streaming(service_fn(start), request).await
    };
    Router::new()
        .route("/envoy.service.ext_proc.v3.ExternalProcessor/Process", post(process))
        .route("/grpc.health.v1.Health/Check", post(check))
        .route("/grpc.health.v1.Health/Watch", post(watch))
}

/// Settings of each pick.
#[derive(Clone, Copy)]
struct PickRules {
    /// Whether a second endpoint is named.
    has_fallback: bool,
    /// Whether the client may select endpoints.
    is_conformance: bool,
}

/// `ExternalProcessor.Process`.
fn process(
    context: Arc<RequestContext>,
    meters: Arc<PickerMeters>,
    rules: PickRules,
    inbound: Streaming<ProcessingRequest>,
) -> Replies<ProcessingResponse> {
    let (answers, receiver) = mpsc::channel(ANSWERS_MAX);
    let session = Session {
        context,
        meters,
        rules,
        answers: answers.clone(),
        exchange: Exchange::default(),
        request_headers: axum::http::HeaderMap::new(),
        parts: None,
        waiting: None,
        deciding: None,
        picked: None,
        response: None,
    };
    tokio::spawn(async move {
        tokio::select! {
            biased;
            () = session.run(inbound) => {}
            // The proxy has closed the stream: the booking ends now.
            () = answers.closed() => {}
        }
    });
    ReceiverStream::new(receiver)
}

/// `grpc.health.v1.Health`: `liveness` always serves, other services when `/ready` is 200.
async fn health(pools: &Pools, service: &str) -> HealthCheckResponse {
    let is_serving = service == "liveness" || readiness::is_ready(pools).await;
    HealthCheckResponse { status: if is_serving { 1 } else { 2 } }
}

/// Replies of a health watch, one per change.
fn watch(pools: Latest<Pools>, service: String) -> Replies<HealthCheckResponse> {
    let (replies, receiver) = mpsc::channel(1);
    tokio::spawn(async move {
        let mut last = None;
        loop {
            // An open watch would delay the shutdown. Read before the reply, so that the last one is `NOT_SERVING`.
            let is_draining = pools.get().readiness.is_draining();
            let reply = health(&pools.get(), &service).await;
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
    ReceiverStream::new(receiver)
}
