//! Client of the endpoint picker that behaves like a proxy: HTTP/2, gRPC framing, and the messages of one exchange.
//!
//! Every wait has a generous limit. The client frames messages itself, so that tests can send invalid ones and can leave
//! at any point.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::client::conn::http2::{SendRequest, handshake};
use hyper::header::{CONTENT_TYPE, TE};
use hyper::rt::Executor;
use hyper::{HeaderMap as HttpHeaderMap, Request, StatusCode};
use hyper_util::rt::TokioIo;
use prost::Message;
use prost_types::value::Kind;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_stream::wrappers::ReceiverStream;

use super::messages::{
    Answer, HeaderMap, HealthCheckRequest, HealthCheckResponse, HttpBody, HttpHeaders, ImmediateResponse, Metadata,
    Part, ProcessingRequest, ProcessingResponse, ProtocolConfiguration, ServingStatus, StreamedBodyResponse,
};
use crate::common::proxy::PATIENCE;

/// Messages that wait for the connection.
const MESSAGES_MAX: usize = 4;

type Outgoing = mpsc::Sender<Result<Frame<Bytes>, io::Error>>;
type OutgoingBody = StreamBody<ReceiverStream<Result<Frame<Bytes>, io::Error>>>;

/// Tasks of a connection.
#[derive(Clone, Default)]
struct Tasks(Arc<Mutex<JoinSet<()>>>);

impl<F: Future<Output: Send> + Send + 'static> Executor<F> for Tasks {
    fn execute(&self, task: F) {
        self.0.lock().expect("lock not poisoned").spawn(async move { drop(task.await) });
    }
}

/// An HTTP/2 connection to the picker.
pub(crate) struct Connection {
    requests: SendRequest<OutgoingBody>,
    tasks: Tasks,
}

impl Connection {
    /// Connects without encryption.
    pub(crate) async fn open(address: SocketAddr) -> Self {
        Self::over(TcpStream::connect(address).await.expect("connection accepted")).await
    }

    /// Connects with TLS, and requires HTTP/2 by ALPN.
    pub(crate) async fn open_tls(address: SocketAddr, config: ClientConfig) -> io::Result<Self> {
        let stream = TcpStream::connect(address).await.expect("connection accepted");
        let name = ServerName::try_from("localhost").expect("a name");
        let stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await?;
        assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
        Ok(Self::over(stream).await)
    }

    async fn over(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> Self {
        let tasks = Tasks::default();
        let handshake = handshake(tasks.clone(), TokioIo::new(stream)).await;
        let (requests, connection) = handshake.expect("HTTP/2 preface accepted");
        // An error of the connection is also one of its calls.
        tasks.execute(connection);
        Self { requests, tasks }
    }

    /// Begins a call with these messages. `stays_open`: more messages follow.
    async fn call(&mut self, path: &str, messages: &[Vec<u8>], stays_open: bool) -> Call {
        let (outgoing, frames) = mpsc::channel(MESSAGES_MAX);
        let mut outgoing = Some(outgoing);
        for message in messages {
            outgoing.as_ref().expect("present").send(Ok(framed(message))).await.expect("few messages");
        }
        if !stays_open {
            outgoing = None;
        }
        let request = Request::post(format!("http://picker{path}"))
            .header(CONTENT_TYPE, "application/grpc")
            .header(TE, "trailers")
            .body(StreamBody::new(ReceiverStream::new(frames)))
            .expect("a valid request");
        let response = timeout(PATIENCE, self.requests.send_request(request)).await.expect("head before the timeout");
        let (head, incoming) = response.expect("a response head").into_parts();
        assert_eq!(head.status, StatusCode::OK);
        assert_eq!(head.headers[CONTENT_TYPE], "application/grpc");
        // A response without messages may have its status in the head.
        let trailers = head.headers.contains_key("grpc-status").then_some(head.headers);
        Call { outgoing, incoming, received: BytesMut::new(), trailers }
    }

    /// Begins the exchange of one request.
    pub(crate) async fn process(&mut self) -> Exchange {
        let call = self.call("/envoy.service.ext_proc.v3.ExternalProcessor/Process", &[], true).await;
        Exchange { call, is_first: true, end: None }
    }

    /// Checks the health of a service.
    pub(crate) async fn check(&mut self, service: &str) -> ServingStatus {
        let request = HealthCheckRequest { service: service.to_owned() }.encode_to_vec();
        let mut call = self.call("/grpc.health.v1.Health/Check", &[request], false).await;
        let reply = call.next::<HealthCheckResponse>().await.expect("a reply");
        assert_eq!(call.status().await, (0, String::new()));
        reply.status()
    }

    /// Watches the health of a service. The messages are of type [`HealthCheckResponse`].
    pub(crate) async fn watch(&mut self, service: &str) -> Call {
        let request = HealthCheckRequest { service: service.to_owned() }.encode_to_vec();
        self.call("/grpc.health.v1.Health/Watch", &[request], false).await
    }

    /// Closes the socket at once, like a proxy that is killed.
    pub(crate) async fn kill(self) {
        let mut tasks = std::mem::take(&mut *self.tasks.0.lock().expect("lock not poisoned"));
        tasks.shutdown().await;
    }
}

/// A gRPC call.
pub(crate) struct Call {
    /// Absent after the end of the messages to the server.
    outgoing: Option<Outgoing>,
    incoming: Incoming,
    received: BytesMut,
    trailers: Option<HttpHeaderMap>,
}

/// An uncompressed message with its prefix.
fn framed(message: &[u8]) -> Frame<Bytes> {
    let mut frame = BytesMut::with_capacity(5 + message.len());
    frame.put_u8(0);
    frame.put_u32(u32::try_from(message.len()).expect("a short message"));
    frame.put_slice(message);
    Frame::data(frame.freeze())
}

impl Call {
    async fn send(&mut self, message: &[u8]) {
        let outgoing = self.outgoing.as_ref().expect("the call is open");
        let sent = timeout(PATIENCE, outgoing.send(Ok(framed(message)))).await.expect("sent before the timeout");
        // The server may have ended the call, which its status reports.
        let _ = sent;
    }

    /// The next message; `None` at the end.
    pub(crate) async fn next<M: Message + Default>(&mut self) -> Option<M> {
        loop {
            if let Some(message) = self.message() {
                return Some(M::decode(message).expect("a valid message"));
            }
            let frame = timeout(PATIENCE, self.incoming.frame()).await.expect("frame before the timeout")?;
            match frame.expect("the stream is intact").into_data() {
                Ok(data) => self.received.extend_from_slice(&data),
                Err(frame) => self.trailers = frame.into_trailers().ok(),
            }
        }
    }

    /// The first complete message among the received bytes.
    fn message(&mut self) -> Option<Bytes> {
        let mut prefix = self.received.get(..5)?;
        assert_eq!(prefix.get_u8(), 0, "not compressed");
        let length = prefix.get_u32() as usize;
        self.received.get(5..5 + length)?;
        self.received.advance(5);
        Some(self.received.split_to(length).freeze())
    }

    /// Waits for the end of the call, without further messages. Returns its status and message.
    pub(crate) async fn status(&mut self) -> (i32, String) {
        assert_eq!(self.next::<ProcessingResponse>().await, None);
        let trailers = self.trailers.as_ref().expect("trailers");
        let text = |name| trailers.get(name).map_or("", |value| value.to_str().expect("text"));
        (text("grpc-status").parse().expect("a status"), text("grpc-message").replace("%20", " "))
    }
}

/// How a request ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// With its head.
    Head,
    /// With a part of its body.
    Body,
    Trailers,
}

/// The exchange of one request.
pub(crate) struct Exchange {
    call: Call,
    is_first: bool,
    /// Absent while the request continues.
    end: Option<End>,
}

/// Answer to a request.
#[derive(Debug)]
pub(crate) struct Pick {
    /// Headers that are set.
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) removed_headers: Vec<String>,
    /// Endpoints in the metadata, in their order.
    pub(crate) endpoints: Vec<String>,
    /// Pieces of the body; absent if the request has no body.
    pub(crate) pieces: Vec<StreamedBodyResponse>,
}

impl Pick {
    /// The chosen endpoint.
    pub(crate) fn endpoint(&self) -> &str {
        &self.endpoints[0]
    }

    pub(crate) fn body(&self) -> Vec<u8> {
        self.pieces.iter().flat_map(|piece| piece.body.clone()).collect()
    }
}

/// Headers of a head with these pseudo-headers in front.
fn head(pseudo: &[(&str, &str)], headers: &[(&str, &str)], end_of_stream: bool) -> HttpHeaders {
    let headers = pseudo.iter().chain(headers).copied();
    HttpHeaders { headers: Some(HeaderMap::of(headers)), end_of_stream }
}

impl Exchange {
    /// Sends a message of any content.
    pub(crate) async fn send_bytes(&mut self, message: &[u8]) {
        self.call.send(message).await;
    }

    pub(crate) async fn send(&mut self, part: Part) {
        self.send_with(part, None).await;
    }

    pub(crate) async fn send_with(&mut self, part: Part, metadata_context: Option<Metadata>) {
        let protocol_config = std::mem::take(&mut self.is_first).then_some(ProtocolConfiguration::FULL_DUPLEX);
        let request = ProcessingRequest { request: Some(part), metadata_context, protocol_config };
        self.call.send(&request.encode_to_vec()).await;
    }

    /// Sends the head of a request.
    pub(crate) async fn begin(
        &mut self,
        (method, path): (&str, &str),
        headers: &[(&str, &str)],
        ends: bool,
        metadata: Option<Metadata>,
    ) {
        let pseudo = [(":method", method), (":path", path), (":scheme", "http"), (":authority", "gateway")];
        self.end = ends.then_some(End::Head);
        self.send_with(Part::RequestHeaders(head(&pseudo, headers, ends)), metadata).await;
    }

    /// Sends a part of the request body.
    pub(crate) async fn body(&mut self, body: &[u8], ends: bool) {
        self.end = ends.then_some(End::Body);
        self.send(Part::RequestBody(HttpBody { body: Bytes::copy_from_slice(body), end_of_stream: ends })).await;
    }

    /// Sends a complete request with a JSON body.
    pub(crate) async fn post(&mut self, path: &str, body: &[u8], metadata: Option<Metadata>) {
        self.begin(("POST", path), &[("content-type", "application/json")], false, metadata).await;
        self.body(body, true).await;
    }

    /// Sends the head of a response, with the endpoint that served it.
    pub(crate) async fn respond(&mut self, status: &str, content_type: &str, ends: bool, served: Option<&str>) {
        let head = head(&[(":status", status)], &[("content-type", content_type)], ends);
        let metadata = served.map(|served| Metadata::text("envoy.lb", "x-gateway-destination-endpoint-served", served));
        self.send_with(Part::ResponseHeaders(head), metadata).await;
    }

    /// Sends a part of the response body.
    pub(crate) async fn response_body(&mut self, body: &[u8], ends: bool) {
        self.send(Part::ResponseBody(HttpBody { body: Bytes::copy_from_slice(body), end_of_stream: ends })).await;
    }

    /// The next answer and its metadata.
    pub(crate) async fn answer(&mut self) -> (Answer, Option<prost_types::Struct>) {
        let answer = self.call.next::<ProcessingResponse>().await.expect("an answer before the end");
        (answer.response.expect("a known answer"), answer.dynamic_metadata)
    }

    /// The answers to the request.
    pub(crate) async fn pick(&mut self) -> Pick {
        let end = self.end.expect("the request is complete");
        let (answer, metadata) = self.answer().await;
        let Answer::RequestHeaders(answer) = answer else { panic!("not the head: {answer:?}") };
        let common = answer.response.expect("a response");
        assert_eq!((common.status, common.body_mutation), (0, None), "CONTINUE without a body");
        assert!(common.clear_route_cache);
        let mutation = common.header_mutation.expect("headers");
        let headers = mutation.set();
        let named = destination(&metadata.expect("metadata"));
        assert_eq!(headers["x-gateway-destination-endpoint"], named, "header and metadata are equal");
        let endpoints = named.split(',').map(str::to_owned).collect();
        let mut pick = Pick { headers, removed_headers: mutation.remove_headers, endpoints, pieces: Vec::new() };
        while end != End::Head && !pick.pieces.last().is_some_and(|piece| piece.end_of_stream) {
            match self.answer().await {
                (Answer::RequestBody(answer), None) => pick.pieces.push(answer.piece()),
                (Answer::RequestTrailers(trailers), None) if end == End::Trailers => {
                    assert_eq!(trailers.header_mutation, None);
                    break;
                }
                other => panic!("not a part of the request: {other:?}"),
            }
        }
        pick
    }

    /// The response in place of a worker's, after which the call ends.
    pub(crate) async fn immediate(&mut self) -> Refusal {
        let (answer, metadata) = self.answer().await;
        let Answer::Immediate(answer) = answer else { panic!("not an immediate response: {answer:?}") };
        assert_eq!((metadata, self.call.status().await), (None, (0, String::new())));
        let ImmediateResponse { status, headers, body, .. } = answer;
        let body: serde_json::Value = serde_json::from_slice(&body).expect("JSON");
        Refusal {
            status: status.expect("a status").code,
            headers: headers.expect("headers").set(),
            code: body["error"]["code"].as_str().expect("a code").to_owned(),
        }
    }

    /// The headers that the answer to the response head sets.
    pub(crate) async fn response_headers(&mut self) -> BTreeMap<String, String> {
        let (answer, metadata) = self.answer().await;
        let Answer::ResponseHeaders(answer) = answer else { panic!("not the response head: {answer:?}") };
        let common = answer.response.expect("a response");
        assert_eq!((common.status, common.body_mutation, metadata), (0, None, None));
        common.header_mutation.map_or_else(BTreeMap::new, |mutation| mutation.set())
    }

    /// A piece of the response.
    pub(crate) async fn response_piece(&mut self) -> StreamedBodyResponse {
        let (answer, _) = self.answer().await;
        let Answer::ResponseBody(answer) = answer else { panic!("not a piece of the response: {answer:?}") };
        answer.piece()
    }

    /// Ends the messages to the picker in order, and waits for the end of the call.
    pub(crate) async fn finish(mut self) -> (i32, String) {
        self.half_close();
        self.status().await
    }

    /// The end of the call by the picker.
    pub(crate) async fn status(&mut self) -> (i32, String) {
        self.call.status().await
    }

    /// Ends the messages to the picker in order. Answers can still be read.
    pub(crate) fn half_close(&mut self) {
        self.call.outgoing = None;
    }

    /// Drops the call, which resets the stream.
    pub(crate) fn leave(self) {
        drop(self);
    }

    /// Resets the stream with an error.
    pub(crate) async fn reset(self) {
        let outgoing = self.call.outgoing.as_ref().expect("the call is open");
        outgoing.send(Err(io::Error::other("reset by the test"))).await.expect("the call is open");
    }
}

/// Endpoints in the metadata `envoy.lb` of an answer.
fn destination(metadata: &prost_types::Struct) -> String {
    let Some(Kind::StructValue(namespace)) = &metadata.fields["envoy.lb"].kind else { panic!("{metadata:?}") };
    let Some(Kind::StringValue(named)) = &namespace.fields["x-gateway-destination-endpoint"].kind else {
        panic!("{metadata:?}")
    };
    named.clone()
}

/// A response in place of a worker's.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub(crate) status: i32,
    pub(crate) headers: BTreeMap<String, String>,
    /// Code of the error in the body.
    pub(crate) code: String,
}
