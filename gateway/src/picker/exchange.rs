//! Order of the messages of one request: a pure state machine.
//!
//! The picker answers nothing before the decision, then the request head, the whole body in pieces, and the trailers. It
//! passes the response through. Rules of the protocol in full-duplex mode (Gateway API Inference Extension, endpoint
//! picker protocol 1.0.0, and the behaviour of Envoy 1.40):
//!
//! - Nothing is answered after the first end mark of a body. Envoy may deliver the last piece of a long body again
//!   (envoyproxy/envoy #46237); the repetition is ignored.
//! - A body with trailers has no end mark.
//! - A response may begin before the decision, if the proxy itself responds. The request side is then over.

use bytes::Bytes;

use super::wire::{
    CommonResponse, FromProxy, HeaderMutation, HttpBody, HttpHeaders, PartResponse, ProcessingRequest,
    ProcessingResponse, Struct, ToProxy, Trailers, pieces,
};

/// What a message means.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Event {
    /// Head of the request.
    RequestHead(HttpHeaders),
    /// Piece of the request body.
    RequestPart(Bytes),
    /// End of the request, with its body.
    RequestEnd,
    /// Head of the response.
    ResponseHead(HttpHeaders),
    /// Piece of the response body.
    ResponsePart(Bytes),
    /// End of the response.
    ResponseEnd,
}

/// Progress of one side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Side {
    #[default]
    Head,
    Body,
    /// After the end mark. A request may still wait for its decision.
    Over,
}

impl Side {
    /// Begins with a head. Returns whether the head is the end.
    fn begin(&mut self, what: &'static str, ends: bool) -> Result<bool, String> {
        if *self != Self::Head {
            return Err(format!("received {what} twice"));
        }
        *self = if ends { Self::Over } else { Self::Body };
        Ok(ends)
    }

    /// Continues with a piece or trailers. Returns whether it is the end; `None` after the end mark.
    fn proceed(&mut self, what: &'static str, ends: bool) -> Result<Option<bool>, String> {
        match *self {
            Self::Head => return Err(format!("received {what} before the headers")),
            Self::Over => return Ok(None),
            Self::Body if ends => *self = Self::Over,
            Self::Body => {}
        }
        Ok(Some(ends))
    }
}

/// Exchange of one request.
#[derive(Debug, Default)]
pub(super) struct Exchange {
    request: Side,
    response: Side,
    /// Whether the request has a body.
    has_body: bool,
    /// Whether trailers end the request.
    has_trailers: bool,
    is_decided: bool,
    /// Answer to the response head.
    pub(super) response_headers: HeaderMutation,
}

impl Exchange {
    /// Meaning of a message, at most a part and an end.
    ///
    /// # Errors
    /// A repeated, early or unknown part. The exchange is unusable after an error.
    pub(super) fn received(&mut self, message: ProcessingRequest) -> Result<Vec<Event>, String> {
        let (part, end) =
            match message.request.ok_or("received a message without a known part of a request or response")? {
                FromProxy::RequestHeaders(head) => {
                    let ends = self.request.begin("request headers", head.end_of_stream)?;
                    self.has_body = !ends;
                    (Some(Event::RequestHead(head)), ends.then_some(Event::RequestEnd))
                }
                FromProxy::RequestBody(HttpBody { body, end_of_stream }) => {
                    let ends = self.request.proceed("a request body", end_of_stream)?;
                    (part(ends, body, Event::RequestPart), (ends == Some(true)).then_some(Event::RequestEnd))
                }
                FromProxy::RequestTrailers(_) => {
                    let ends = self.request.proceed("request trailers", true)?.is_some();
                    self.has_trailers |= ends;
                    (None, ends.then_some(Event::RequestEnd))
                }
                FromProxy::ResponseHeaders(head) => {
                    let ends = self.response.begin("response headers", head.end_of_stream)?;
                    (self.is_decided, self.request) = (true, Side::Over);
                    (Some(Event::ResponseHead(head)), ends.then_some(Event::ResponseEnd))
                }
                FromProxy::ResponseBody(HttpBody { body, end_of_stream }) => {
                    let ends = self.response.proceed("a response body", end_of_stream)?;
                    (part(ends, body, Event::ResponsePart), (ends == Some(true)).then_some(Event::ResponseEnd))
                }
                FromProxy::ResponseTrailers(_) => {
                    let ends = self.response.proceed("response trailers", true)?.is_some();
                    (None, ends.then_some(Event::ResponseEnd))
                }
            };
        Ok(part.into_iter().chain(end).collect())
    }

    /// Answers to the request side, in their order: for a decision with the body that the worker shall receive. Nothing
    /// if the response has begun.
    pub(super) fn decided(
        &mut self,
        headers: HeaderMutation,
        metadata: Struct,
        body: Bytes,
    ) -> impl Iterator<Item = ProcessingResponse> {
        let is_late = std::mem::replace(&mut self.is_decided, true);
        let head = PartResponse {
            response: Some(CommonResponse {
                header_mutation: Some(headers),
                clear_route_cache: true,
                ..CommonResponse::default()
            }),
        };
        let head =
            ProcessingResponse { response: Some(ToProxy::RequestHeaders(head)), dynamic_metadata: Some(metadata) };
        let body = self.has_body.then(|| pieces(body, !self.has_trailers).map(ToProxy::RequestBody));
        let trailers = self.has_trailers.then_some(ToProxy::RequestTrailers(Trailers {}));
        let rest = body.into_iter().flatten().chain(trailers).map(ProcessingResponse::from);
        std::iter::once(head).chain(rest).take(if is_late { 0 } else { usize::MAX })
    }

    /// Answers to a message of the response side, which pass it through. To be sent before anything else is done with
    /// the message. `None`: nothing to answer.
    pub(super) fn passed(&self, message: &ProcessingRequest) -> Vec<ProcessingResponse> {
        match (&message.request, self.response) {
            (Some(FromProxy::ResponseHeaders(_)), Side::Head) => {
                let header_mutation = Some(self.response_headers.clone());
                let response = Some(CommonResponse { header_mutation, ..CommonResponse::default() });
                vec![ToProxy::ResponseHeaders(PartResponse { response }).into()]
            }
            (Some(FromProxy::ResponseBody(HttpBody { body, end_of_stream })), Side::Body) => {
                pieces(body.clone(), *end_of_stream).map(|piece| ToProxy::ResponseBody(piece).into()).collect()
            }
            (Some(FromProxy::ResponseTrailers(_)), Side::Body) => {
                vec![ToProxy::ResponseTrailers(Trailers {}).into()]
            }
            _ => Vec::new(),
        }
    }
}

/// Event of a piece of a body, unless it is empty or after the end mark.
fn part(ends: Option<bool>, body: Bytes, event: fn(Bytes) -> Event) -> Option<Event> {
    (ends.is_some() && !body.is_empty()).then(|| event(body))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::wire::PIECE_BYTES_MAX;
    use super::*;

    fn message(request: FromProxy) -> ProcessingRequest {
        ProcessingRequest { request: Some(request), metadata_context: None }
    }

    fn head(end_of_stream: bool) -> HttpHeaders {
        HttpHeaders { headers: None, end_of_stream }
    }

    fn piece(body: &[u8], end_of_stream: bool) -> HttpBody {
        HttpBody { body: Bytes::copy_from_slice(body), end_of_stream }
    }

    /// How a body ends.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum End {
        /// With the head.
        Head,
        /// With the last piece.
        Piece,
        /// With an empty piece after the last one.
        Empty,
        /// With trailers.
        Trailers,
    }

    /// Messages of a side: head, piece of a body, trailers.
    type Kinds = (fn(HttpHeaders) -> FromProxy, fn(HttpBody) -> FromProxy, FromProxy);

    /// Messages of one side of an exchange.
    fn side(body: &[Vec<u8>], end: End, (head_of, piece_of, trailers): Kinds) -> Vec<ProcessingRequest> {
        let mut messages = vec![message(head_of(head(end == End::Head)))];
        if end == End::Head {
            return messages;
        }
        for (n, bytes) in body.iter().enumerate() {
            messages.push(message(piece_of(piece(bytes, end == End::Piece && n + 1 == body.len()))));
        }
        if end == End::Empty || end == End::Piece && body.is_empty() {
            messages.push(message(piece_of(piece(b"", true))));
        }
        if end == End::Trailers {
            messages.push(message(trailers));
        }
        messages
    }

    /// The body of answers, whether it has ended, and the length of its longest piece.
    fn body_of(
        answers: &[ProcessingResponse],
        of: fn(&ToProxy) -> Option<&super::super::wire::PartResponse>,
    ) -> (Vec<u8>, usize, usize) {
        let (mut body, mut ends, mut longest) = (Vec::new(), 0, 0);
        for answer in answers.iter().filter_map(|answer| of(answer.response.as_ref().expect("an answer"))) {
            let mutation = answer.response.as_ref().and_then(|common| common.body_mutation.as_ref());
            let streamed = mutation.and_then(|mutation| mutation.streamed_response.as_ref()).expect("a piece");
            assert_eq!(ends, 0, "nothing after the end mark");
            body.extend_from_slice(&streamed.body);
            ends += usize::from(streamed.end_of_stream);
            longest = longest.max(streamed.body.len());
        }
        (body, ends, longest)
    }

    fn end() -> impl Strategy<Value = End> {
        prop_oneof![Just(End::Head), Just(End::Piece), Just(End::Empty), Just(End::Trailers)]
    }

    fn body() -> impl Strategy<Value = Vec<Vec<u8>>> {
        proptest::collection::vec(
            prop_oneof![Just(0usize), 1usize..40, Just(PIECE_BYTES_MAX), Just(PIECE_BYTES_MAX + 1), Just(200_000)]
                .prop_map(|len| (0..len).map(|n| n as u8).collect()),
            0..5,
        )
    }

    proptest! {
        /// Every message of a complete exchange is answered in order, bodies are whole, and pieces are short.
        #[test]
        fn answers_are_complete_and_in_order(
            request in body(), request_end in end(), response in body(), response_end in end(),
            edited: Option<[u8; 3]>, repeats: bool,
        ) {
            let request_side = (FromProxy::RequestHeaders as fn(_) -> _, FromProxy::RequestBody as fn(_) -> _,
                FromProxy::RequestTrailers(Trailers {}));
            let mut exchange = Exchange::default();
            let (mut received, mut heads, mut has_ended) = (Vec::new(), 0, false);
            let mut messages = side(&request, request_end, request_side);
            if repeats && request_end == End::Piece {
                let last = messages.last().expect("a message").clone();
                messages.push(last); // envoyproxy/envoy #46237
            }
            for message in messages {
                prop_assert_eq!(exchange.passed(&message), Vec::new(), "no answer before the decision");
                for event in exchange.received(message).expect("allowed") {
                    prop_assert!(!has_ended, "{event:?} after the end");
                    match event {
                        Event::RequestHead(_) => heads += 1,
                        Event::RequestPart(part) => received.extend_from_slice(&part),
                        Event::RequestEnd => has_ended = true,
                        event => prop_assert!(false, "{event:?}"),
                    }
                }
            }
            prop_assert!(has_ended && heads == 1);
            let has_body = request_end != End::Head;
            prop_assert_eq!(&received, &if has_body { request.concat() } else { Vec::new() });

            let sent = edited.map_or(received, |edited| edited.to_vec());
            let answers: Vec<_> =
                exchange.decided(HeaderMutation::default(), Struct::default(), sent.clone().into()).collect();
            prop_assert!(matches!(answers[0].response, Some(ToProxy::RequestHeaders(_))));
            prop_assert!(answers[0].dynamic_metadata.is_some());
            let (body, ends, longest) = body_of(&answers, |answer| match answer {
                ToProxy::RequestBody(body) => Some(body),
                _ => None,
            });
            prop_assert_eq!(body, if has_body { sent } else { Vec::new() });
            prop_assert_eq!(ends, usize::from(matches!(request_end, End::Piece | End::Empty)));
            prop_assert!(longest <= PIECE_BYTES_MAX);
            let trailers = answers.iter().position(|answer| matches!(answer.response, Some(ToProxy::RequestTrailers(_))));
            prop_assert_eq!(trailers, (request_end == End::Trailers).then_some(answers.len() - 1));
            let again = exchange.decided(HeaderMutation::default(), Struct::default(), Bytes::new()).count();
            prop_assert_eq!(again, 0);

            let response_side = (FromProxy::ResponseHeaders as fn(_) -> _, FromProxy::ResponseBody as fn(_) -> _,
                FromProxy::ResponseTrailers(Trailers {}));
            let (mut answers, mut read, mut has_ended) = (Vec::new(), Vec::new(), false);
            for message in side(&response, response_end, response_side) {
                answers.extend(exchange.passed(&message));
                for event in exchange.received(message).expect("allowed") {
                    match event {
                        Event::ResponseHead(_) => prop_assert!(read.is_empty()),
                        Event::ResponsePart(part) => read.extend_from_slice(&part),
                        Event::ResponseEnd => has_ended = true,
                        event => prop_assert!(false, "{event:?}"),
                    }
                }
            }
            prop_assert!(has_ended && matches!(answers[0].response, Some(ToProxy::ResponseHeaders(_))));
            let (body, ends, longest) = body_of(&answers, |answer| match answer {
                ToProxy::ResponseBody(body) => Some(body),
                _ => None,
            });
            prop_assert_eq!(&body, &read);
            prop_assert_eq!(body, if response_end == End::Head { Vec::new() } else { response.concat() });
            prop_assert_eq!(ends, usize::from(matches!(response_end, End::Piece | End::Empty)));
            prop_assert!(longest <= PIECE_BYTES_MAX);
        }
    }
}
