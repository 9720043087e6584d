//! Response bodies with a placement, and the layer that places requests: the booking ends in every case.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::{pending, poll_fn};
use std::io;
use std::marker::PhantomPinned;
use std::pin::{Pin, pin};
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use http_body_util::{BodyExt as _, Empty, Full};
use pointsman::protocol::{WorkerConfig, WorkerId};
use pointsman::test_support::rank;
use pointsman::{
    AnswerKind, Constraints, Outcome, PlaceError, PlacedBody, PlacedTarget, Placement, PlacementLayer, Prompt,
    RequestOptions, RouteRequest, Router, Usage,
};
use tower::{Layer as _, Service as _, ServiceExt as _, service_fn};

use crate::common::counters::Counters;
use crate::common::{assert_at_rest, config, config_with, loads, router, tokens};

type Step = Result<Frame<Bytes>, io::Error>;

/// A scripted body that is not `Unpin`.
struct Scripted {
    steps: Mutex<VecDeque<Step>>,
    /// Whether `is_end_stream` is true directly after the last frame, or only the next poll reveals the end.
    knows_its_end: bool,
    _pinned: PhantomPinned,
}

impl Scripted {
    fn new(steps: impl IntoIterator<Item = Step>, knows_its_end: bool) -> Self {
        Self { steps: Mutex::new(steps.into_iter().collect()), knows_its_end, _pinned: PhantomPinned }
    }
}

impl Body for Scripted {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Step>> {
        Poll::Ready(self.steps.lock().unwrap_or_else(PoisonError::into_inner).pop_front())
    }

    fn is_end_stream(&self) -> bool {
        self.knows_its_end && self.steps.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(77)
    }
}

/// The `n`-th frame of a streamed answer, with one token.
fn token(n: usize) -> Step {
    Ok(Frame::data(format!("data: {{\"choices\":[{{\"delta\":{{\"content\":\"t{n}\"}}}}]}}\n\n").into()))
}

fn reset() -> Step {
    Err(io::ErrorKind::ConnectionReset.into())
}

async fn place(router: &Router, id: &str) -> Placement {
    router.route(RouteRequest::new(id, Prompt::Tokens(&tokens(1, 5)))).await.expect("placed")
}

/// Reads up to this many frames.
async fn read<B: Body>(mut body: Pin<&mut PlacedBody<B>>, frames: usize) -> Vec<Result<Frame<Bytes>, B::Error>> {
    let mut read = Vec::new();
    while read.len() < frames
        && let Some(frame) = poll_fn(|cx| body.as_mut().poll_frame(cx)).await
    {
        read.push(frame);
    }
    read
}

#[tokio::test]
async fn a_body_reports_its_first_byte_its_blocks_and_its_end() {
    for knows_its_end in [false, true] {
        let router = router(config(), 1).await;
        let steps = [Ok(Frame::data(Bytes::new()))].into_iter().chain((0..9).map(token));
        let body = place(&router, "a").await.wrap_body(Scripted::new(steps, knows_its_end), AnswerKind::Events);
        let mut body = pin!(body);
        assert_eq!(body.size_hint().exact(), Some(77));
        read(body.as_mut(), 1).await;
        assert_eq!(loads(&router).await, [(1, 5, 20)], "no byte yet");
        read(body.as_mut(), 1).await;
        assert_eq!(loads(&router).await, [(1, 5, 0)], "the first byte");
        read(body.as_mut(), 2).await;
        assert_eq!((loads(&router).await, body.output_tokens()), (vec![(1, 5, 0)], 3));
        read(body.as_mut(), 1).await;
        assert_eq!(loads(&router).await, [(1, 6, 0)], "four tokens are a block");
        read(body.as_mut(), 4).await;
        assert_eq!(loads(&router).await, [(1, 7, 0)]);
        assert_eq!(body.placement().map(|placement| placement.rank()), Some(rank(0)));
        let left = if knows_its_end { 1 } else { 2 };
        assert_eq!(read(body.as_mut(), left).await.len(), 1);
        assert!(body.placement().is_none(), "complete before the body is dropped");
        assert_at_rest(&router).await;
    }
}

#[tokio::test]
async fn output_weight_decays_towards_the_expected_end() {
    let router = router(config(), 1).await;
    let placement = place(&router, "a").await;
    let body = placement.wrap_body(Scripted::new((0..8).map(token), false), AnswerKind::Events).expecting(8);
    let mut body = pin!(body);
    read(body.as_mut(), 4).await;
    assert_eq!(loads(&router).await, [(1, 3, 0)], "half of 5 + 1 blocks");
    read(body.as_mut(), 4).await;
    assert_eq!(loads(&router).await, [(1, 0, 0)], "no further output is expected");
    read(body.as_mut(), 1).await;
    assert_at_rest(&router).await;
}

#[tokio::test]
async fn bookings_end_wherever_a_body_stops() {
    const FRAMES: usize = 12;
    let router = router(config_with(|c| c.health.outcome_failures_max = 0), 2).await;
    for stop in 0..=FRAMES {
        for knows_its_end in [false, true] {
            // Dropped after this many frames.
            let script = Scripted::new((0..FRAMES).map(token), knows_its_end);
            let body = Box::pin(place(&router, "a").await.wrap_body(script, AnswerKind::Events));
            let mut body = body;
            assert_eq!(read(body.as_mut(), stop).await.len(), stop);
            let is_over = knows_its_end && stop == FRAMES;
            assert_eq!(router.health().leases, usize::from(!is_over), "at {stop}");
            drop(body);
            assert_at_rest(&router).await;

            // Fails after this many frames, and is kept.
            let steps = (0..stop).map(token).chain([reset()]);
            let body = place(&router, "b").await.wrap_body(Scripted::new(steps, knows_its_end), AnswerKind::Events);
            let mut body = pin!(body);
            let frames = read(body.as_mut(), usize::MAX).await;
            assert_eq!(frames.iter().filter(|frame| frame.is_err()).count(), 1);
            assert_eq!((frames.len(), body.output_tokens()), (stop + 1, stop as u64));
            assert_at_rest(&router).await;
        }
    }
}

#[tokio::test]
async fn bytes_and_trailers_are_unchanged() {
    let router = router(config(), 1).await;
    let mut trailers = HeaderMap::new();
    trailers.insert("x-checksum", "7".parse().expect("a value"));
    let steps = [token(1), token(2), Ok(Frame::trailers(trailers.clone()))];
    let body = place(&router, "a").await.wrap_body(Scripted::new(steps, true), AnswerKind::Json);
    let collected = body.collect().await.expect("the body is complete");
    assert_eq!(collected.trailers(), Some(&trailers));
    let sent: Vec<u8> =
        [token(1), token(2)].into_iter().flatten().filter_map(|f| f.into_data().ok()).flatten().collect();
    assert_eq!(collected.to_bytes(), sent);
    assert_at_rest(&router).await;
    let empty = place(&router, "b").await.wrap_body(Empty::<Bytes>::new(), AnswerKind::Json);
    assert!(empty.is_end_stream() && empty.placement().is_none(), "the rank would never be chosen");
    assert_at_rest(&router).await;
}

/// Number of eligible ranks after more such bodies of one rank than the failure threshold, each read up to this many
/// frames.
async fn left_after(frames: usize, wrap: impl Fn(Placement) -> PlacedBody<Scripted>) -> usize {
    let router = router(config(), 2).await;
    let elsewhere = Constraints { excluded_ranks: [rank(1)].into(), ..Constraints::default() };
    for _ in 0..2 * router.config().health.outcome_failures_max {
        let request = RouteRequest {
            options: RequestOptions { constraints: elsewhere.clone(), ..RequestOptions::default() },
            ..RouteRequest::new("a", Prompt::Tokens(&[1]))
        };
        let Ok(placement) = router.route(request).await else { break };
        read(Box::pin(wrap(placement)).as_mut(), frames).await;
    }
    router.rank_health().await.expect("up"); // processed after the reports
    assert_at_rest(&router).await;
    router.eligible_ranks()
}

#[tokio::test]
async fn body_outcomes_are_reported_for_the_rank() {
    let after = async |frames, status: StatusCode, steps: fn() -> Vec<Step>| {
        let respond = |placed: Placement| {
            let mut response = Response::new(Scripted::new(steps(), true));
            *response.status_mut() = status;
            placed.wrap_response(response).into_body()
        };
        left_after(frames, respond).await
    };
    assert_eq!(after(usize::MAX, StatusCode::OK, || vec![token(1), token(2)]).await, 2);
    assert_eq!(after(1, StatusCode::OK, || vec![token(1), token(2)]).await, 2, "the client disconnected");
    assert_eq!(after(usize::MAX, StatusCode::BAD_REQUEST, || vec![token(1)]).await, 2);
    assert_eq!(after(usize::MAX, StatusCode::OK, || vec![token(1), reset()]).await, 1);
    let refused = after(usize::MAX, StatusCode::SERVICE_UNAVAILABLE, || vec![token(1)]).await;
    assert_eq!(refused, 2, "concurrent refusals are one back-off, not an ejection");
    assert_eq!(after(usize::MAX, StatusCode::BAD_GATEWAY, Vec::new).await, 1);
}

#[tokio::test]
async fn missing_end_marks_count_if_required() {
    let done = || Ok(Frame::data("data: [DONE]\n\n".into()));
    let error = || Ok(Frame::data("data: {\"error\":{\"code\":500}}\n\n".into()));
    let after = async |steps: &dyn Fn() -> Vec<Step>, blames| {
        let wrap = |placed: Placement| {
            let body = placed.wrap_body(Scripted::new(steps(), true), AnswerKind::Events).requiring_end_mark();
            if blames { body } else { body.without_blame() }
        };
        left_after(usize::MAX, wrap).await
    };
    assert_eq!(after(&|| vec![token(1), done()], true).await, 2);
    assert_eq!(after(&|| vec![token(1), token(2)], true).await, 1);
    assert_eq!(after(&|| vec![token(1), token(2)], false).await, 2);
    assert_eq!(after(&|| vec![token(1), error(), done()], true).await, 1);
}

#[tokio::test]
async fn cached_tokens_are_reported_once_from_usage() {
    let counters = Counters::default();
    let _recording = counters.record();
    let usage =
        "\"usage\":{\"prompt_tokens\":20,\"completion_tokens\":2,\"prompt_tokens_details\":{\"cached_tokens\":8}}";
    let router = router(config(), 1).await;
    let events = Full::<Bytes>::from(format!("data: {{{usage}}}\n\ndata: {{{usage}}}\n\n"));
    let json = Full::<Bytes>::from(format!("{{\"choices\":[],{usage}}}"));
    for (answer, content_type) in [(events, "text/event-stream"), (json, "application/json")] {
        let response = Response::builder().header("content-type", content_type).body(answer);
        let response = place(&router, "a").await.wrap_response(response.expect("well-formed"));
        let mut body = pin!(response.into_body());
        read(body.as_mut(), usize::MAX).await;
        let said = Usage { prompt_tokens: Some(20), output_tokens: Some(2), cached_tokens: Some(8) };
        assert_eq!(body.usage(), Some(said));
        assert_at_rest(&router).await;
    }
    assert_eq!(counters.get("pointsman_cached_tokens_total", &["delivered"]), 2 * 8, "once per response");
}

/// Time after the last token does not count, and a response that is not streamed has no pace.
#[tokio::test(start_paused = true)]
async fn streamed_responses_are_compared_with_the_target_of_their_pace() {
    let counters = Counters::default();
    let _recording = counters.record();
    let router = router(config(), 1).await;
    let kinds = [AnswerKind::Events, AnswerKind::Events, AnswerKind::Json];
    for (target_ms, kind) in [19, 20, 1].into_iter().zip(kinds) {
        let options =
            RequestOptions { itl_target: Some(Duration::from_millis(target_ms)), ..RequestOptions::default() };
        let prompt = tokens(1, 5);
        let request = RouteRequest { options, ..RouteRequest::new("a", Prompt::Tokens(&prompt)) };
        let placed = router.route(request).await.expect("placed");
        let mut body = pin!(placed.wrap_body(Scripted::new((0..6).map(token), false), kind));
        for _ in 0..6 {
            read(body.as_mut(), 1).await;
            tokio::time::advance(Duration::from_millis(20)).await; // also after the last token
        }
        read(body.as_mut(), 1).await;
        assert_at_rest(&router).await;
    }
    let count = |target, outcome| counters.get("pointsman_targets_total", &[target, outcome]);
    let counts = ["itl", "ttft"].map(|target| [count(target, "met"), count(target, "missed")]);
    assert_eq!(counts, [[1, 1], [0, 0]]);
}

fn asking(id: &str) -> Request<()> {
    let mut request = Request::new(());
    let prompt = Prompt::OwnedTokens(tokens(1, 5).into());
    request.extensions_mut().insert(RouteRequest::new(id.to_owned(), prompt));
    request
}

#[tokio::test]
async fn the_inner_service_receives_the_placement() {
    let two = WorkerConfig { data_parallel_start_rank: 6, data_parallel_size: 2, ..WorkerConfig::at("http://a") };
    let router = Router::builder(config()).worker(WorkerId(7), two).start().await.expect("valid");
    let client = service_fn(async |request: Request<()>| {
        assert!(request.extensions().get::<RouteRequest<'static>>().is_none(), "placement taken");
        let target = request.extensions().get::<PlacedTarget>().expect("placed").clone();
        let first = target.rank_at_worker.map(|number| target.rank.rank - number);
        Ok::<_, Infallible>(Response::new(Full::<Bytes>::from(format!("{} {first:?}", target.endpoint))))
    });
    let mut service = PlacementLayer::new(router.clone()).layer(client);
    let response = service.ready().await.expect("ready").call(asking("a")).await.expect("answered");
    assert_eq!(router.health().leases, 1, "the response was not read");
    assert_eq!(
        response.into_body().collect().await.expect("whole").to_bytes(),
        "http://a Some(6)",
        "counted from the first request"
    );
    assert_at_rest(&router).await;
}

#[tokio::test]
async fn the_options_of_a_request_reach_the_router() {
    let router = router(config(), 3).await;
    let constraints = Constraints { excluded_ranks: [rank(0), rank(1)].into(), ..Constraints::default() };
    let mut request = asking("a");
    let options = RequestOptions { constraints, ..RequestOptions::default() };
    let prompt = Prompt::OwnedTokens([1].into());
    request.extensions_mut().insert(RouteRequest { options, ..RouteRequest::new("a", prompt) });
    let client = service_fn(async |request: Request<()>| {
        let target = request.extensions().get::<PlacedTarget>().expect("placed");
        assert_eq!(target.rank, rank(2));
        Ok::<_, Infallible>(Response::new(Empty::<Bytes>::new()))
    });
    let layer = PlacementLayer::new(router.clone());
    layer.layer(client).oneshot(request).await.expect("answered");
    assert_at_rest(&router).await;

    let options = RequestOptions { policy_class: Some("none".into()), ..RequestOptions::default() };
    let to_route = RouteRequest { options, ..asked(asking("b")) };
    let mut request = Request::new(());
    request.extensions_mut().insert(to_route);
    let refused = layer.layer(client).oneshot(request).await.expect_err("unknown class");
    assert!(matches!(refused, PlaceError::Route(_)), "{refused}");
    let refused = layer.layer(client).oneshot(Request::new(())).await.expect_err("nothing to place");
    assert!(matches!(refused, PlaceError::MissingRequest), "{refused}");
    assert_at_rest(&router).await;
}

fn asked(mut request: Request<()>) -> RouteRequest<'static> {
    request.extensions_mut().remove().expect("present")
}

#[tokio::test]
async fn a_failed_service_frees_its_booking_and_counts_against_the_rank() {
    let failing = service_fn(async |_: Request<()>| Err::<Response<Empty<Bytes>>, _>(io::Error::other("no route")));
    for (layer_of, left) in [
        (PlacementLayer::new as fn(Router) -> PlacementLayer<io::Error>, 0), // by default a connect failure
        (|router| PlacementLayer::new(router).outcomes(|_| Outcome::Ok), 2),
    ] {
        let router = router(config(), 2).await;
        let service = layer_of(router.clone()).layer(failing);
        for _ in 0..2 * router.config().health.outcome_failures_max {
            let refused = service.clone().oneshot(asking("a")).await.expect_err("the service fails");
            assert!(matches!(&refused, PlaceError::Inner(error) if error.to_string() == "no route"), "{refused}");
            assert_at_rest(&router).await;
        }
        router.rank_health().await.expect("up"); // processed after the reports
        assert_eq!(router.eligible_ranks(), left);
    }
}

/// Polls a future once.
async fn poll_once<F: Future>(mut future: Pin<&mut F>) -> bool {
    poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx).is_ready())).await
}

#[tokio::test]
async fn dropped_futures_free_everything() {
    let worker = WorkerConfig { max_num_batched_tokens: Some(10), ..WorkerConfig::at("http://a") };
    let router = Router::builder(config_with(|c| c.queue.threshold = Some(0.5)));
    let router = router.worker(WorkerId(0), worker).start().await.expect("valid");
    let hung = service_fn(async |_: Request<()>| pending::<Result<Response<Empty<Bytes>>, Infallible>>().await);
    let service = PlacementLayer::new(router.clone()).layer(hung);
    let mut sending = Box::pin(service.clone().oneshot(asking("a")));
    crate::common::until("booking", async || {
        assert!(!poll_once(sending.as_mut()).await, "the service hangs");
        router.health().leases == 1 && loads(&router).await != [(0, 0, 0)]
    })
    .await;
    let mut waiting = Box::pin(service.clone().oneshot(asking("b")));
    crate::common::until("request in the queue", async || {
        assert!(!poll_once(waiting.as_mut()).await, "the rank is busy");
        router.pending().await.expect("up").iter().any(|class| class.depth.requests == 1)
    })
    .await;
    assert_eq!(router.health().leases, 2);
    drop(waiting);
    assert_eq!(router.health().leases, 1);
    assert!(router.pending().await.expect("up").iter().all(|class| class.depth.requests == 0));
    drop(sending);
    assert_at_rest(&router).await;
}
