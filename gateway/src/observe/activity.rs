//! Recent activity of one model: its last decisions, and the course of its requests over the last ten minutes.
//!
//! Written where a request is placed and where it ends; read by the live page. Bounded by [`DECISIONS_MAX`],
//! [`POINTS_MAX`] and [`NAMES_MAX`]. A write takes one lock and, once the ring is full, allocates nothing.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use ahash::AHashMap;
use parking_lot::Mutex;
use pointsman::Placement;
use pointsman::protocol::{WorkerId, WorkerRank};
use tokio::time::Instant;

use crate::formats::live::names::rank_name;
use crate::formats::live::{CourseState, DECISIONS_MAX, DecisionState, RatesState};
use crate::observe::window::Window;

/// Duration of a point of the course.
const POINT: Duration = Duration::from_secs(5);

/// Number of points: ten minutes.
const POINTS_MAX: u64 = 120;

/// Points of the present rates: the last complete ones, and the running one.
const RATE_POINTS: u64 = 3;

/// Maximum number of workers whose names are kept after they have left.
const NAMES_MAX: usize = 4096;

/// The recent activity of one model.
pub(crate) struct Activity {
    recent: Mutex<Recent>,
}

struct Recent {
    /// The newest last.
    decisions: VecDeque<Decided>,
    /// Decisions so far.
    decided: u64,
    points: Window<Point>,
    names: AHashMap<WorkerId, Arc<str>>,
}

/// One decision.
#[derive(Default)]
struct Decided {
    number: u64,
    at: Option<Instant>,
    request_id: String,
    prompt_tokens: u32,
    no_tokens: Option<&'static str>,
    /// The chosen rank with the endpoint of its worker.
    chosen: Option<(WorkerRank, Arc<str>)>,
    cached_tokens: u32,
    predicted_ttft: Option<Duration>,
    /// Error code, for a request without a rank.
    rejection: Option<&'static str>,
}

/// Requests that ended within a point of the course.
#[derive(Clone, Copy, Default)]
struct Point {
    requests: u32,
    errors: u32,
    ttft: Mean,
    itl: Mean,
}

/// Sum of durations.
#[derive(Clone, Copy, Default)]
struct Mean {
    sum: Duration,
    count: u32,
}

impl Mean {
    fn add(&mut self, duration: Duration) {
        self.sum += duration;
        self.count += 1;
    }

    fn seconds(self) -> Option<f64> {
        (self.count > 0).then(|| self.sum.as_secs_f64() / f64::from(self.count))
    }
}

/// A request whose placement is recorded.
#[derive(Clone, Copy)]
pub(crate) struct Arrived<'a> {
    pub(crate) request_id: &'a str,
    /// Prompt length; absent without tokens.
    pub(crate) prompt_tokens: Option<u32>,
    /// Reason for a prompt without tokens.
    pub(crate) no_tokens: Option<&'static str>,
}

/// The end of a request.
pub(crate) struct Ended {
    /// Whether it failed through no fault of the client.
    pub(crate) is_error: bool,
    /// Mean time between its tokens.
    pub(crate) itl: Option<Duration>,
}

impl Activity {
    pub(crate) fn new() -> Self {
        let points = Window::new(Instant::now(), POINT, POINTS_MAX);
        let recent = Recent { decisions: VecDeque::new(), decided: 0, points, names: AHashMap::new() };
        Self { recent: Mutex::new(recent) }
    }

    /// Records a placement.
    #[inline(never)]
    pub(crate) fn placed(&self, request: Arrived<'_>, placement: &Placement) {
        let mut recent = self.recent.lock();
        let (rank, cached_tokens) = (placement.rank(), placement.cached_tokens());
        let endpoint = recent.endpoint(rank.worker, placement.endpoint());
        let decided = recent.next(request);
        decided.chosen = Some((rank, endpoint));
        decided.cached_tokens = cached_tokens;
        decided.predicted_ttft = placement.predicted_ttft();
    }

    /// Records a request without a rank.
    pub(crate) fn rejected(&self, request: Arrived<'_>, code: &'static str) {
        self.recent.lock().next(request).rejection = Some(code);
    }

    /// Records the first token of a streamed response.
    pub(crate) fn first_token(&self, ttft: Duration) {
        self.recent.lock().points.at(Instant::now()).ttft.add(ttft);
    }

    /// Records the end of a request.
    #[inline(never)]
    pub(crate) fn ended(&self, ended: &Ended) {
        let mut recent = self.recent.lock();
        let point = recent.points.at(Instant::now());
        point.requests += 1;
        point.errors += u32::from(ended.is_error);
        if let Some(itl) = ended.itl {
            point.itl.add(itl);
        }
    }

    /// The last decisions, the newest first.
    pub(crate) fn decisions(&self) -> Vec<DecisionState> {
        self.recent.lock().decisions.iter().rev().map(state_of).collect()
    }

    /// Last known name of a rank.
    pub(crate) fn name_of(&self, rank: WorkerRank) -> Option<String> {
        self.recent.lock().names.get(&rank.worker).map(|endpoint| rank_name(endpoint, rank.rank))
    }

    /// Rates of the last seconds, and the course of the last ten minutes.
    pub(crate) fn course(&self) -> (RatesState, CourseState) {
        let (now, recent) = (Instant::now(), self.recent.lock());
        let last = recent.points.slot_at(now);
        let first = recent.points.oldest().unwrap_or(last).max((last + 1).saturating_sub(POINTS_MAX));
        let mut points = vec![Point::default(); (last - first + 1) as usize];
        for (slot, point) in recent.points.recent(now) {
            points[(slot - first) as usize] = *point;
        }
        let mut sum = Point::default();
        for point in points.iter().rev().take(RATE_POINTS as usize) {
            sum.requests += point.requests;
            sum.errors += point.errors;
            (sum.ttft.sum, sum.ttft.count) = (sum.ttft.sum + point.ttft.sum, sum.ttft.count + point.ttft.count);
            (sum.itl.sum, sum.itl.count) = (sum.itl.sum + point.itl.sum, sum.itl.count + point.itl.count);
        }
        let since = POINT.as_secs_f64() * (last + 1).saturating_sub(RATE_POINTS) as f64;
        let seconds = (now.duration_since(recent.points.begun).as_secs_f64() - since).max(1.0);
        let rates = RatesState {
            requests_per_second: f64::from(sum.requests) / seconds,
            error_share: (sum.requests > 0).then(|| f64::from(sum.errors) / f64::from(sum.requests)),
            ttft_seconds: sum.ttft.seconds(),
            itl_seconds: sum.itl.seconds(),
        };
        let milliseconds = |mean: Mean| mean.seconds().map(|seconds| (seconds * 1e5).round() / 1e2);
        let course = CourseState {
            point_seconds: POINT.as_secs(),
            requests: points.iter().map(|point| point.requests).collect(),
            errors: points.iter().map(|point| point.errors).collect(),
            ttft_ms: points.iter().map(|point| milliseconds(point.ttft)).collect(),
            itl_ms: points.iter().map(|point| milliseconds(point.itl)).collect(),
        };
        (rates, course)
    }
}

impl Recent {
    /// A new decision, in the memory of the oldest one.
    fn next(&mut self, request: Arrived<'_>) -> &mut Decided {
        let full = self.decisions.len() >= DECISIONS_MAX;
        let mut request_id = if full { self.decisions.pop_front() } else { None }.unwrap_or_default().request_id;
        request_id.clear();
        request_id.push_str(request.request_id);
        self.decided += 1;
        self.decisions.push_back(Decided {
            number: self.decided,
            at: Some(Instant::now()),
            request_id,
            prompt_tokens: request.prompt_tokens.unwrap_or_default(),
            no_tokens: request.no_tokens,
            ..Decided::default()
        });
        let newest = self.decisions.len() - 1;
        &mut self.decisions[newest]
    }

    fn endpoint(&mut self, worker: WorkerId, endpoint: &str) -> Arc<str> {
        if let Some(known) = self.names.get(&worker).filter(|known| ***known == *endpoint) {
            return Arc::clone(known);
        }
        if self.names.len() >= NAMES_MAX {
            self.names.clear();
        }
        let endpoint: Arc<str> = endpoint.into();
        self.names.insert(worker, Arc::clone(&endpoint));
        endpoint
    }
}

fn state_of(decided: &Decided) -> DecisionState {
    let chosen = decided.chosen.as_ref();
    DecisionState {
        number: decided.number,
        request_id: decided.request_id.clone(),
        age_seconds: decided.at.map_or(0.0, |at| at.elapsed().as_secs_f64()),
        prompt_tokens: decided.prompt_tokens.into(),
        no_tokens: decided.no_tokens.map(str::to_owned),
        cached_tokens: decided.cached_tokens.into(),
        chosen: chosen.map(|(rank, endpoint)| rank_name(endpoint, rank.rank)),
        chosen_id: chosen.map(|(rank, _)| rank.to_string()),
        predicted_ttft_seconds: decided.predicted_ttft.map(|ttft| ttft.as_secs_f64()),
        rejection: decided.rejection.map(str::to_owned),
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    fn arrived(request_id: &str) -> Arrived<'_> {
        Arrived { request_id, prompt_tokens: Some(9), no_tokens: None }
    }

    #[tokio::test(start_paused = true)]
    async fn the_last_decisions_are_kept() {
        let activity = Activity::new();
        for n in 0..50 {
            activity.rejected(arrived(&format!("request-{n}")), "no_workers");
            advance(Duration::from_secs(1)).await;
        }
        let decisions = activity.decisions();
        assert_eq!(decisions.len(), DECISIONS_MAX);
        let newest = &decisions[0];
        assert_eq!((newest.number, newest.request_id.as_str(), newest.age_seconds), (50, "request-49", 1.0));
        assert_eq!((newest.rejection.as_deref(), newest.chosen.as_ref()), (Some("no_workers"), None));
        assert_eq!(decisions[DECISIONS_MAX - 1].request_id, "request-30");
    }

    #[tokio::test(start_paused = true)]
    async fn the_course_covers_ten_minutes() {
        let activity = Activity::new();
        for second in 0..1_000 {
            activity.first_token(Duration::from_millis(200));
            let is_error = second % 10 == 0;
            activity.ended(&Ended { is_error, itl: (!is_error).then_some(Duration::from_millis(10)) });
            advance(Duration::from_secs(1)).await;
        }
        let (rates, course) = activity.course();
        assert_eq!((course.requests.len() as u64, course.point_seconds), (POINTS_MAX, 5));
        assert_eq!(course.requests[..3], [5, 5, 5]);
        assert_eq!(course.requests.last(), Some(&0), "the running point");
        assert_eq!((course.ttft_ms[0], course.itl_ms[0]), (Some(200.0), Some(10.0)));
        assert!((rates.requests_per_second - 1.0).abs() < 0.01, "{rates:?}");
        assert_eq!((rates.error_share, rates.ttft_seconds), (Some(0.1), Some(0.2)));
    }
}
