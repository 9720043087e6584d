//! One exchange with the proxy: receives a request, decides, and follows the response until its end.
//!
//! The booking begins with the decision and ends with the response, or with the stream if the client disconnects. It
//! moves if the proxy reports another endpoint than the chosen one.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::http::header::{AUTHORIZATION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode};
use http_body_util::BodyExt as _;
use tokio::sync::mpsc;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::{ReceiverStream, UnboundedReceiverStream};
use tonic::{Status, Streaming};

use super::decide::{Arrival, Picked, address, decide};
use super::exchange::{Event, Exchange};
use super::wire::{
    HeaderMutation, HttpHeaders, HttpStatus, ImmediateResponse, Metadata, ProcessingRequest, ProcessingResponse,
    Struct, ToProxy, metadata,
};
use super::{DESTINATION, LB_NAMESPACE, PickRules, PickerMeters, SERVED, SUBSET, SUBSET_NAMESPACE, TEST_SERVED};
use crate::formats::openai::{API_KEY, stripped_headers};
use crate::proxy::Answer;
use crate::proxy::context::RequestContext;

/// Address of the prefill worker, as llm-d's sidecar reads it.
const PREFILLER: &str = "x-prefiller-host-port";

/// Pieces of a request body on their way to the budget.
const PARTS_MAX: usize = 4;

/// Sender of answers to the proxy.
pub(super) type Answers = mpsc::Sender<Result<ProcessingResponse, Status>>;

type Deciding = Pin<Box<dyn Future<Output = Result<Box<Picked>, Response<Body>>> + Send>>;

/// An exchange in progress.
pub(super) struct Session {
    pub(super) context: Arc<RequestContext>,
    pub(super) meters: Arc<PickerMeters>,
    pub(super) rules: PickRules,
    pub(super) answers: Answers,
    pub(super) exchange: Exchange,
    pub(super) request_headers: HeaderMap,
    /// Present until the end of the request body.
    pub(super) parts: Option<mpsc::Sender<Bytes>>,
    /// A piece that waits for its place in `parts`.
    pub(super) waiting: Option<Bytes>,
    pub(super) deciding: Option<Deciding>,
    pub(super) picked: Option<Box<Picked>>,
    pub(super) response: Option<Following>,
}

/// A response that is read.
pub(super) struct Following {
    parts: mpsc::UnboundedSender<Bytes>,
    answer: Answer<Body>,
}

/// The exchange is over.
struct Ended;

impl Session {
    /// Serves the exchange. Returns when either side has closed it.
    pub(super) async fn run(mut self, mut inbound: Streaming<ProcessingRequest>) {
        loop {
            let ended = tokio::select! {
                biased;
                picked = poll_optional(&mut self.deciding) => {
                    self.deciding = None;
                    self.answer_request(picked).await
                }
                permit = reserve(self.parts.clone()), if self.waiting.is_some() => {
                    let part = self.waiting.take().unwrap_or_default();
                    // A closed receiver has decided without the rest of the body.
                    drop(permit.map(|permit| permit.send(part)));
                    Ok(())
                }
                message = inbound.message(), if self.waiting.is_none() => match message {
                    Ok(Some(message)) => self.receive(message).await,
                    Ok(None) => Err(Ended),
                    Err(status) => {
                        // An end without an error would let the proxy pass the request on without a pick.
                        let _ = self.answers.send(Err(status)).await;
                        Err(Ended)
                    }
                },
            };
            if ended.is_err() {
                return;
            }
        }
    }

    async fn send(&mut self, answer: impl Into<ProcessingResponse>) -> Result<(), Ended> {
        self.answers.send(Ok(answer.into())).await.map_err(|_| Ended)
    }

    async fn receive(&mut self, message: ProcessingRequest) -> Result<(), Ended> {
        for answer in self.response_answers(&message) {
            self.send(answer).await?;
        }
        let context = message.metadata_context.clone().unwrap_or_default();
        let events = match self.exchange.received(message) {
            Ok(events) => events,
            Err(error) => {
                self.meters.refused.increment(1);
                let _ = self.answers.send(Err(Status::invalid_argument(error))).await;
                return Err(Ended);
            }
        };
        for event in events {
            match event {
                Event::RequestHead(head) => self.begin(head, &context),
                Event::RequestPart(part) => self.waiting = Some(part),
                Event::RequestEnd => self.end_of_request().await,
                Event::ResponseHead(head) => self.begin_response(head, &context).await,
                Event::ResponsePart(part) => self.read_response(part).await,
                Event::ResponseEnd => self.end_response().await,
            }
        }
        Ok(())
    }

    /// Answers that pass the response through.
    fn response_answers(&mut self, message: &ProcessingRequest) -> Vec<ProcessingResponse> {
        if self.rules.is_conformance
            && let Some(served) = message.metadata_context.as_ref().and_then(served)
        {
            self.exchange.response_headers.set(TEST_SERVED, served);
        }
        self.exchange.passed(message)
    }

    fn begin(&mut self, head: HttpHeaders, context: &Metadata) {
        let (sender, receiver) = mpsc::channel(PARTS_MAX);
        self.parts = Some(sender);
        let (headers, path) = headers_of(&head);
        self.request_headers = headers.clone();
        let arrival = Arrival {
            headers,
            path: path.unwrap_or_default(),
            body: Body::from_stream(ReceiverStream::new(receiver).map(Ok::<_, Infallible>)),
            has_body: !head.end_of_stream,
            subset: context.texts(SUBSET_NAMESPACE, SUBSET),
            rules: self.rules,
        };
        self.deciding = Some(Box::pin(decide(Arc::clone(&self.context), arrival)));
    }

    /// Ends the body after the piece that waits.
    async fn end_of_request(&mut self) {
        if let Some((parts, part)) = self.parts.take().zip(self.waiting.take()) {
            // The decision reads the body meanwhile. After a decision the rest of the body is of no use.
            let mut send = Box::pin(async move { parts.send(part).await });
            tokio::select! {
                biased;
                _ = &mut send => {}
                picked = poll_optional(&mut self.deciding) => {
                    self.deciding = Some(Box::pin(std::future::ready(picked)));
                }
            }
        }
    }

    async fn answer_request(&mut self, picked: Result<Box<Picked>, Response<Body>>) -> Result<(), Ended> {
        match picked {
            Ok(mut picked) => {
                self.meters.picked.increment(1);
                let body = std::mem::take(&mut picked.body);
                let (headers, metadata) = self.destination(&picked, body.len());
                for (name, value) in &picked.limits {
                    self.exchange.response_headers.set_value(name, value);
                }
                let answers: Vec<_> = self.exchange.decided(headers, metadata, body).collect();
                for answer in answers {
                    self.send(answer).await?;
                }
                self.picked = Some(picked);
                Ok(())
            }
            Err(response) => {
                self.meters.refused.increment(1);
                let immediate = immediate(response).await;
                let _ = self.send(immediate).await;
                Err(Ended)
            }
        }
    }

    /// Headers and metadata that name the endpoints.
    fn destination(&self, picked: &Picked, body_len: usize) -> (HeaderMutation, Struct) {
        let mut headers = HeaderMutation::default();
        let endpoints = picked.destination.endpoints.join(",");
        // The sidecar of the decode worker reads it.
        let prefill = picked.prefill.as_ref().map(|prefill| address(prefill.endpoint()));
        let is_kept = |name: &str| {
            name == DESTINATION || name == "x-data-parallel-rank" || (name == PREFILLER && prefill.is_some())
        };
        let removed = stripped_headers(&self.request_headers).filter(|name| !is_kept(name));
        headers.remove_headers.extend(removed.map(str::to_owned));
        if let Some(prefill) = prefill {
            headers.set(PREFILLER, prefill);
        }
        headers.set(DESTINATION, endpoints.clone());
        match picked.placement.rank_at_worker() {
            Some(rank) => headers.set("x-data-parallel-rank", rank.to_string()),
            None => headers.remove_headers.push("x-data-parallel-rank".to_owned()),
        }
        headers.set("x-request-id", picked.request_id.clone());
        if let Some(trace) = picked.trace_header() {
            headers.set("traceparent", Bytes::copy_from_slice(trace.as_bytes()));
        }
        if picked.has_body {
            headers.set(CONTENT_LENGTH.as_str(), body_len.to_string());
            headers.remove_headers.push(CONTENT_ENCODING.as_str().to_owned());
        }
        match &picked.destination.authorization {
            Some(key) => headers.set_value(&AUTHORIZATION, key),
            // The key of a tenant is meant for the picker.
            None if !self.context.admission.tenants.is_empty() => {
                headers.remove_headers.push(AUTHORIZATION.as_str().to_owned())
            }
            None => {}
        }
        if !self.context.admission.tenants.is_empty() {
            headers.remove_headers.push(API_KEY.as_str().to_owned());
        }
        (headers, metadata(LB_NAMESPACE, DESTINATION, &endpoints))
    }

    async fn begin_response(&mut self, head: HttpHeaders, context: &Metadata) {
        self.deciding = None; // the proxy has responded itself
        let Some(mut picked) = self.picked.take() else { return };
        if let Some(served) = served(context).filter(|served| picked.destination.endpoints.first() != Some(served)) {
            self.meters.moved.increment(1);
            if !picked.move_to(&self.context, &served).await {
                return;
            }
        }
        let status = status_of(&head);
        let (headers, _) = headers_of(&head);
        let (parts, received) = mpsc::unbounded_channel();
        let body = Body::from_stream(UnboundedReceiverStream::new(received).map(Ok::<_, Infallible>));
        let answer = picked.follow(&self.context, (status, headers), body);
        self.response = answer.map(|answer| Following { parts, answer });
    }

    async fn read_response(&mut self, part: Bytes) {
        let Some(Following { parts, answer }) = &mut self.response else { return };
        if parts.send(part).is_ok() {
            // An invalid response is cut off for clients of the gateway. Here it only ends the reading.
            if !matches!(answer.frame().await, Some(Ok(_))) {
                self.response = None;
            }
        }
    }

    async fn end_response(&mut self) {
        if let Some(Following { parts, mut answer }) = self.response.take() {
            drop(parts);
            while let Some(Ok(_)) = answer.frame().await {}
        }
    }
}

/// Completes with the future, if there is one.
async fn poll_optional(deciding: &mut Option<Deciding>) -> Result<Box<Picked>, Response<Body>> {
    match deciding {
        Some(deciding) => deciding.as_mut().await,
        None => std::future::pending().await,
    }
}

async fn reserve(parts: Option<mpsc::Sender<Bytes>>) -> Option<mpsc::OwnedPermit<Bytes>> {
    parts?.reserve_owned().await.ok()
}

/// Endpoint that served the response, as the proxy reports it.
fn served(context: &Metadata) -> Option<String> {
    context.texts(LB_NAMESPACE, SERVED)?.into_iter().next()
}

/// Headers without pseudo-headers, and the path.
fn headers_of(head: &HttpHeaders) -> (HeaderMap, Option<String>) {
    let (mut headers, mut path) = (HeaderMap::new(), None);
    for header in head.headers.iter().flat_map(|headers| &headers.headers) {
        if header.key == ":path" {
            path = Some(String::from_utf8_lossy(header.bytes()).into_owned());
        } else if !header.key.starts_with(':')
            && let (Ok(name), Ok(value)) =
                (HeaderName::from_bytes(header.key.as_bytes()), HeaderValue::from_bytes(header.bytes()))
        {
            headers.append(name, value);
        }
    }
    (headers, path)
}

fn status_of(head: &HttpHeaders) -> StatusCode {
    let mut headers = head.headers.iter().flat_map(|headers| &headers.headers);
    let status = headers.find(|header| header.key == ":status");
    status.and_then(|header| StatusCode::from_bytes(header.bytes()).ok()).unwrap_or(StatusCode::BAD_GATEWAY)
}

/// The response that the proxy sends to the client in place of a worker's.
async fn immediate(response: Response<Body>) -> ToProxy {
    let (head, body) = response.into_parts();
    let mut headers = HeaderMutation::default();
    for (name, value) in &head.headers {
        if *name != CONTENT_LENGTH {
            headers.set_value(name, value);
        }
    }
    if !head.headers.contains_key(CONTENT_TYPE) {
        headers.set(CONTENT_TYPE.as_str(), "application/json");
    }
    let body = body.collect().await.map(http_body_util::Collected::to_bytes).unwrap_or_default();
    let status = Some(HttpStatus { code: i32::from(head.status.as_u16()) });
    ToProxy::Immediate(ImmediateResponse { status, headers: Some(headers), body, details: "pointsman".to_owned() })
}
