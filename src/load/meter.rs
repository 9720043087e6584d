//! Speed meter: learns a rank's engine speed from the reports of its bookings.
//!
//! Tracks which bookings are in prefill and which generate, and since when. Learns the prefill rate, the step time, the
//! output length of requests, and the bias of predictions. Each prefill counts once, at its first report of completion; each generated token
//! counts in at most one sample; changes are published immediately. [`LearnedRate`] and [`LearnedStep`] do the
//! arithmetic. A booking that the meter did not see booked is ignored.
//!
//! A request receives one token per step, so the number of steps between two reports equals its number of new tokens.
//! Engines compute prefills in the same steps, which then take longer. Therefore only time without a prefill in
//! progress counts, divided by the steps made in it. A prefill without a report (the response is not streamed) is
//! assumed to end as modelled.
//!
//! The engine reports the cached tokens of a prompt after its first token. As long as the reports show more of them than
//! predicted, for example after a late start beside warm engines, the rate is learned at the end of a request, from the
//! tokens that the engine computed.

use std::sync::Arc;
use std::time::Duration;

use ahash::AHashMap;

use super::{
    EngineSpeed, LearnedBias, LearnedRate, LearnedStep, PeerLoad, PrefillLoadHint, RankLoad, SpeedCell, StepSample,
};
use crate::protocol::{BookingId, Timestamp};

/// Observes the bookings of one rank.
///
/// Each call costs one lookup in a map of the bookings; a call that completes a sample has the cost of [`LearnedStep`].
///
/// ```
/// use std::sync::Arc;
/// use pointsman::internals::load::{EngineSpeed, PrefillLoadHint, RankLoad, SpeedCell, SpeedMeter};
/// use pointsman::internals::protocol::BookingId;
/// use pointsman::protocol::Timestamp;
///
/// let cell = Arc::new(SpeedCell::default());
/// let mut meter = SpeedMeter::new(Arc::clone(&cell), 64);
/// meter.booked(BookingId(1), PrefillLoadHint::new(8_000, 0, true, None), Timestamp(0));
/// meter.load_is(RankLoad { requests: 1, active_blocks: 125, read_blocks: 125, prefill_tokens: 8_000 }, Timestamp(0));
/// let mut now = 1_000_000_000; // 8,000 tokens in a second
/// meter.reported(BookingId(1), true, 0, Timestamp(now));
/// for blocks in 1..=50 {
///     now += 64 * 9_000_000; // 9 ms a token
///     meter.reported(BookingId(1), true, blocks, Timestamp(now));
/// }
/// assert!((0.0085..0.0095).contains(&cell.speed_or(EngineSpeed::prior(64)).step(1.0, 125.0)));
/// assert_eq!(cell.work_tokens_per_second(), None);
/// meter.ended(BookingId(1), Some(0), Timestamp(now)); // without cached tokens
/// let rate = cell.work_tokens_per_second();
/// assert!(rate.is_some_and(|rate| (9_000.0..10_000.0).contains(&rate)));
/// // The prediction was right, so the next first token is a sample.
/// meter.booked(BookingId(2), PrefillLoadHint::new(8_000, 0, true, None), Timestamp(now));
/// meter.reported(BookingId(2), true, 0, Timestamp(now + 500_000_000));
/// assert!(cell.work_tokens_per_second() > rate);
/// assert_eq!(cell.output_tokens(), Some(3_232.0)); // 50 blocks, and half a block
/// ```
#[derive(Debug)]
pub struct SpeedMeter {
    block_size: u32,
    rate: LearnedRate,
    step: LearnedStep,
    output: MeanOutput,
    /// Of the time to first token, and between tokens.
    bias: [LearnedBias; 2],
    cell: Arc<SpeedCell>,
    bookings: AHashMap<BookingId, Watched>,
    /// Whether the last reported cached tokens were at most the predicted ones; `None` before the first response.
    is_exact: Option<bool>,
    /// Prefills in progress whose end will be reported.
    prefills: usize,
    /// Modelled end of the other prefills.
    unreported_until: Timestamp,
    load: RankLoad,
    sums: Sums,
    own_time: OwnTime,
    /// Load of the rank by other replicas, and their time with prefills until `sums.until`.
    peers: PeerLoad,
    peers_busy: (Duration, u32),
}

/// Time of the engine that own prefills receive: all of it, unless other replicas have prefills there.
#[derive(Clone, Copy, Debug)]
struct OwnTime {
    now: Timestamp,
    /// Share of time with prefills of other replicas.
    share: f64,
}

#[derive(Clone, Copy, Debug)]
struct Watched {
    booked: Timestamp,
    /// The same in own time.
    booked_own: Timestamp,
    prefill: Option<PrefillLoadHint>,
    is_prefilling: bool,
    /// Output blocks at the last report.
    blocks: u32,
    /// Predicted times in seconds without correction: to the first token, and between tokens.
    predicted: [Option<f64>; 2],
    /// Start of the current output interval; `None` before the first report.
    seen: Option<OutputReport>,
    /// The first token, until the end of the request.
    first_token: Option<FirstToken>,
}

/// Samples at the first token of a request.
#[derive(Clone, Copy, Debug)]
struct FirstToken {
    /// Own time of the prefill, and the time of a decode step in seconds.
    prefill: Option<(PrefillLoadHint, Duration, f64)>,
    /// Predicted and observed time to it in seconds.
    ttft: Option<(f64, f64)>,
}

/// State at an output report.
#[derive(Clone, Copy, Debug)]
struct OutputReport {
    blocks: u32,
    sums: Sums,
}

/// Sums since the start of the meter, over time without a prefill in progress.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    /// Wall-clock end of the sums.
    until: Timestamp,
    seconds: f64,
    /// Running requests multiplied by seconds.
    request_seconds: f64,
    /// Held blocks multiplied by seconds.
    block_seconds: f64,
    /// Number of prefill completions after which no other prefill was in progress.
    prefill_ends: u64,
}

/// Time of a prefill that is in progress for longer than modelled.
const PREFILL_SECONDS_LEAST: f64 = 0.01;

/// Maximum share of a sample's time with a prefill in progress; samples above it are discarded.
const PREFILL_SHARE_MAX: f64 = 0.5;

/// Minimum length of an output interval.
const INTERVAL_MIN: Duration = Duration::from_millis(5);

/// Steps per prefill that do not count: half a step before the prefill starts, and at least one step that computes it.
const STEPS_IN_PREFILL: f64 = 1.5;

impl Default for OwnTime {
    fn default() -> Self {
        Self { now: Timestamp::default(), share: 1.0 }
    }
}

impl SpeedMeter {
    /// Starts with the published speed, which has the weight of a prior: the meter may replace a previous one. Blocks
    /// have `block_size` tokens in all reports.
    #[must_use]
    pub fn new(cell: Arc<SpeedCell>, block_size: u32) -> Self {
        let block_size = block_size.max(1);
        let known = cell.speed_or(EngineSpeed::prior(block_size));
        Self {
            block_size,
            rate: LearnedRate::from_known(known.work_tokens_per_second),
            step: LearnedStep::from_known(&known, block_size),
            output: MeanOutput::from_known(cell.output_tokens()),
            bias: cell.bias().map(|factor| LearnedBias::from_known(factor.unwrap_or(1.0))),
            cell,
            bookings: AHashMap::new(),
            is_exact: None,
            prefills: 0,
            unreported_until: Timestamp::default(),
            load: RankLoad::default(),
            sums: Sums::default(),
            own_time: OwnTime::default(),
            peers: PeerLoad::default(),
            peers_busy: (Duration::ZERO, 0),
        }
    }

    /// Sets the load of the rank by other replicas at `now`. Must be called before the reports of an instant.
    pub fn peers_are(&mut self, peers: PeerLoad, now: Timestamp) {
        self.peers = peers;
        self.run_to(now);
    }

    /// Sets the modelled time of the own prefills; must be called after each change. Own and other prefills progress
    /// together, so the rate is learned from the own share of the time, and steps from the time without prefills of
    /// either side.
    pub fn prefill_is(&mut self, own: Duration, now: Timestamp) {
        self.run_to(now);
        let seconds = |modelled: Duration, prefills: f64| modelled.as_secs_f64() + PREFILL_SECONDS_LEAST * prefills;
        let own_seconds = seconds(own, self.prefills as f64);
        let peer_seconds = seconds(self.peers.prefill_left(own, now), f64::from(self.peers.prefills));
        self.own_time.share = if own_seconds > 0.0 { own_seconds / (own_seconds + peer_seconds) } else { 1.0 };
    }

    /// Records a booked request with its prefill.
    pub fn booked(&mut self, booking: BookingId, hint: Option<PrefillLoadHint>, now: Timestamp) {
        self.run_to(now);
        let prefill = hint.filter(|hint| hint.is_reported());
        if let Some(expected) = hint.filter(|hint| !hint.is_reported()).and_then(PrefillLoadHint::expected_duration) {
            self.unreported_until = self.unreported_until.max(now) + expected;
            self.sums.prefill_ends += u64::from(self.prefills == 0);
        }
        self.prefills += usize::from(prefill.is_some());
        let before = self.bookings.insert(
            booking,
            Watched {
                booked: now,
                booked_own: self.own_time.now,
                prefill,
                is_prefilling: prefill.is_some(),
                blocks: 0,
                predicted: [None; 2],
                seen: None,
                first_token: None,
            },
        );
        if before.is_some_and(|before| before.is_prefilling) {
            self.prefill_ended();
        }
    }

    /// Sets the predicted times of a booked request in seconds, without correction: to its first token, and between
    /// tokens.
    pub fn predicted(&mut self, booking: BookingId, predicted: [Option<f64>; 2]) {
        if let Some(watched) = self.bookings.get_mut(&booking) {
            watched.predicted = predicted;
        }
    }

    /// Records the mean time between the tokens of a request, at its end.
    pub fn paced(&mut self, booking: BookingId, itl: Duration, now: Timestamp) {
        let predicted = self.bookings.get_mut(&booking).and_then(|watched| watched.predicted[1].take());
        if let Some(predicted) = predicted {
            self.learn_bias(1, predicted, itl.as_secs_f64(), now);
        }
    }

    /// Learns from a prediction. An outdated factor counts as far as its age allows.
    fn learn_bias(&mut self, which: usize, predicted: f64, observed: f64, now: Timestamp) {
        let aged = self.cell.bias_at(now);
        let aged = [aged.ttft, aged.itl][which];
        if self.cell.bias()[which].is_some_and(|published| published != aged) {
            self.bias[which] = LearnedBias::from_known(aged);
        }
        self.bias[which].observe(predicted, observed);
        self.cell.publish_bias(which, self.bias[which].factor(), now);
    }

    /// Records a request's report: whether its first token was sent, and its output blocks so far. Repeated, late and
    /// unknown reports are harmless.
    pub fn reported(&mut self, booking: BookingId, prefill_completed: bool, output_blocks: u32, now: Timestamp) {
        let is_generating = prefill_completed || output_blocks > 0;
        let Some(&Watched { booked, booked_own, prefill, is_prefilling, blocks, predicted, seen, .. }) =
            self.bookings.get(&booking).filter(|_| is_generating)
        else {
            return;
        };
        if !is_prefilling && seen.is_some() && blocks >= output_blocks {
            return; // no new information
        }
        self.run_to(now);
        if is_prefilling {
            self.prefill_ended();
        }
        // Without a report of the first token, output shows only that it was earlier.
        let mut first_token = (prefill_completed && (is_prefilling || predicted[0].is_some())).then(|| FirstToken {
            prefill: prefill.filter(|_| is_prefilling).and_then(|prefill| self.timed(prefill, booked_own)),
            ttft: predicted[0].map(|predicted| (predicted, now.since(booked).as_secs_f64())),
        });
        if self.is_exact == Some(true)
            && let Some(first_token) = first_token.take()
        {
            self.learn_first_token(first_token, now);
        }
        // Reports in quick succession, for example from one chunk of a response, are merged; the next report covers
        // them all.
        let is_later = seen.is_none_or(|seen| self.sums.until.since(seen.sums.until) >= INTERVAL_MIN);
        let sample = seen.filter(|_| is_later).and_then(|seen| self.sample(&seen, output_blocks));
        if sample.is_some_and(|sample| self.learn_step(&sample, now)) {
            self.cell.publish_step(&self.speed(), now);
        }
        if let Some(watched) = self.bookings.get_mut(&booking) {
            watched.predicted[0] = None; // output without a first token has no time to it
            (watched.is_prefilling, watched.blocks) = (false, watched.blocks.max(output_blocks));
            watched.first_token = first_token.or(watched.first_token);
            if is_later {
                watched.seen = Some(OutputReport { blocks: output_blocks, sums: self.sums });
            }
        }
    }

    /// The sample of a prefill that was booked at `booked` in own time; `None` if it is too short.
    fn timed(&mut self, prefill: PrefillLoadHint, booked: Timestamp) -> Option<(PrefillLoadHint, Duration, f64)> {
        let (requests, blocks) = self.total_load();
        let step_seconds = self.speed().step(f64::from(requests), f64::from(blocks));
        // A short one may have been computed beside a long one, so its completion is no information, unless the rate has no sample.
        let is_first = self.rate.samples() == 0 && self.own_time.now.since(booked) >= LearnedRate::SHORT_MIN.1;
        (is_first || prefill.work_tokens() >= LearnedRate::TOKENS_MIN)
            .then(|| (prefill, self.rate.completed(booked, self.own_time.now), step_seconds))
    }

    fn learn_first_token(&mut self, FirstToken { prefill, ttft }: FirstToken, now: Timestamp) {
        if let Some((predicted, observed)) = ttft {
            self.learn_bias(0, predicted, observed, now);
        }
        if prefill.is_some_and(|sample| self.learn_rate(sample, now)) {
            self.cell.publish_rate(self.rate.tokens_per_second(), now);
        }
    }

    /// Learns from a prefill. An outdated rate counts as four samples, reduced by its age.
    fn learn_rate(&mut self, sample: (PrefillLoadHint, Duration, f64), now: Timestamp) -> bool {
        let (prefill, time, step_seconds) = sample;
        let tokens = prefill.work_tokens();
        if let Some(aged) = self.aged(now, 0) {
            let mut restarted = self.rate.restarted(aged.work_tokens_per_second);
            if restarted.observe(tokens, time, step_seconds) {
                self.rate = restarted;
                return true;
            }
        }
        self.rate.observe(tokens, time, step_seconds)
    }

    /// Like [`learn_rate`](Self::learn_rate), from steps.
    fn learn_step(&mut self, sample: &StepSample, now: Timestamp) -> bool {
        if let Some(aged) = self.aged(now, 1) {
            let mut restarted = LearnedStep::from_known(&aged, self.block_size);
            if restarted.observe(sample) {
                self.step = restarted;
                return true;
            }
        }
        self.step.observe(sample)
    }

    /// The aged speed if the rate (0) or the step (1) is outdated and the typical speed is known.
    fn aged(&self, now: Timestamp, which: usize) -> Option<EngineSpeed> {
        if self.cell.weights(now)[which] >= 1.0 {
            return None;
        }
        self.cell.typical().map(|typical| self.cell.speed_at(now, &typical))
    }

    /// Records the end of a booking with its last reported output, and the cached tokens of its prompt if the engine
    /// reported them. The progress of an unreported prefill is unknown.
    pub fn ended(&mut self, booking: BookingId, cached_tokens: Option<u32>, now: Timestamp) {
        let Some(watched) = self.bookings.remove(&booking) else { return };
        self.run_to(now);
        if watched.is_prefilling {
            self.prefill_ended();
        }
        let Watched { prefill, blocks, seen, mut first_token, .. } = watched;
        if let Some(predicted) = prefill.filter(|_| seen.is_some()) {
            let computed = cached_tokens.map_or(Some(predicted), |cached| predicted.with_cached(cached));
            let least = predicted.effective_tokens().saturating_sub(self.block_size);
            let is_exact = computed.map_or(0, PrefillLoadHint::effective_tokens) >= least;
            if cached_tokens.is_some() || self.is_exact.is_none() {
                self.is_exact = Some(is_exact);
            }
            if let Some(FirstToken { prefill, ttft }) = &mut first_token {
                *prefill = prefill.and_then(|(_, time, step_seconds)| Some((computed?, time, step_seconds)));
                *ttft = ttft.filter(|_| is_exact); // another prompt was predicted
            }
        }
        if let Some(first_token) = first_token {
            self.learn_first_token(first_token, now);
        }
        // A caller that never reported a block reports none, or ends before the first. The mean starts with callers
        // that report blocks.
        if seen.is_some() && (blocks > 0 || self.output.requests > 0) {
            let tokens = self.output.observe((f64::from(blocks) + 0.5) * f64::from(self.block_size));
            self.cell.publish_output(tokens);
        }
    }

    /// Sets the load of the rank; must be called after each change.
    pub fn load_is(&mut self, load: RankLoad, now: Timestamp) {
        self.run_to(now);
        self.load = load;
    }

    /// Adds the time up to `now` to the sums.
    fn run_to(&mut self, now: Timestamp) {
        let elapsed = now.since(self.sums.until);
        let before = std::mem::replace(&mut self.peers_busy, (self.peers.busy_until(now), self.peers.busy.1));
        let busy = self.peers_busy.0.saturating_sub(before.0).min(elapsed);
        let lost = if busy.is_zero() { busy } else { busy.mul_f64(1.0 - self.own_time.share) };
        self.own_time.now = self.own_time.now + (elapsed - lost);
        let passed = now.since(self.sums.until.max(self.unreported_until)).saturating_sub(busy);
        self.sums.until = self.sums.until.max(now);
        if self.prefills == 0 {
            self.sums.prefill_ends += u64::from(self.peers_busy.1.wrapping_sub(before.1));
            if !passed.is_zero() {
                let seconds = passed.as_secs_f64();
                let (requests, blocks) = self.total_load();
                self.sums.seconds += seconds;
                self.sums.request_seconds += seconds * f64::from(requests);
                self.sums.block_seconds += seconds * f64::from(blocks);
            }
        }
    }

    /// Requests, and blocks that a step reads, with those of other replicas.
    fn total_load(&self) -> (u32, u32) {
        let RankLoad { requests, read_blocks, .. } = self.load;
        (requests.saturating_add(self.peers.requests), read_blocks.saturating_add(self.peers.read_blocks))
    }

    fn prefill_ended(&mut self) {
        self.prefills -= 1;
        self.sums.prefill_ends += u64::from(self.prefills == 0);
    }

    /// The steps between two reports, if enough of the time was without prefills.
    fn sample(&self, seen: &OutputReport, output_blocks: u32) -> Option<StepSample> {
        // A block is reported with its last token. Before the first block, the first token was reported.
        let tokens = |blocks: u32| (u64::from(blocks) * u64::from(self.block_size)).max(1);
        let made = tokens(output_blocks).saturating_sub(tokens(seen.blocks)) as f64;
        let (now, then) = (&self.sums, &seen.sums);
        let steps = made - STEPS_IN_PREFILL * (now.prefill_ends - then.prefill_ends) as f64;
        let seconds = now.seconds - then.seconds;
        let least = 1.0 - PREFILL_SHARE_MAX;
        let is_enough = seconds >= least * now.until.since(then.until).as_secs_f64() && steps >= least * made;
        (is_enough && seconds > 0.0).then(|| StepSample {
            steps,
            seconds,
            requests: (now.request_seconds - then.request_seconds) / seconds,
            blocks: (now.block_seconds - then.block_seconds) / seconds,
        })
    }

    /// The learned speed; unlearned parts have their prior.
    #[must_use]
    pub fn speed(&self) -> EngineSpeed {
        let work_tokens_per_second = self.rate.tokens_per_second();
        self.step.on(EngineSpeed { work_tokens_per_second, ..EngineSpeed::prior(self.block_size) })
    }

    /// Checks the invariants, for tests.
    ///
    /// # Panics
    /// If a number is out of bounds, a count is wrong, or the published speed differs from the learned one.
    pub fn check_invariants(&self) {
        self.rate.check_invariants();
        self.step.check_invariants();
        let prefills = self.bookings.values().filter(|watched| watched.is_prefilling).count();
        assert_eq!(prefills, self.prefills, "prefills under way");
        let Sums { seconds, request_seconds, block_seconds, .. } = self.sums;
        assert!([seconds, request_seconds, block_seconds].iter().all(|sum| sum.is_finite() && *sum >= 0.0));
        // Values without a sample are not published: the typical speed of the pool is a better estimate.
        if self.rate.samples() > 0 || self.step.samples() > 0 {
            let learned = self.speed();
            let published = self.cell.speed_or(learned);
            let close = |published: f64, learned: f64| (published / learned - 1.0).abs() < 1e-6;
            assert!(
                close(published.work_tokens_per_second, learned.work_tokens_per_second)
                    && close(published.step_seconds, learned.step_seconds)
                    && close(published.request_seconds, learned.request_seconds)
                    && close(published.block_seconds, learned.block_seconds),
                "{published:?} is published, {learned:?} learned"
            );
        }
    }
}

/// Mean output of a request in tokens, with weights that halve every 64 requests.
#[derive(Clone, Copy, Debug)]
struct MeanOutput {
    tokens: f64,
    requests: u32,
}

impl MeanOutput {
    /// Minimum weight of a request in the mean: 1 − 2^(−1/64).
    const SHARE_MIN: f64 = 0.010_772;

    /// Weight of a predecessor's mean, in requests.
    const KNOWN_REQUESTS: u32 = 64;

    fn from_known(tokens: Option<f64>) -> Self {
        tokens.map_or(Self { tokens: 0.0, requests: 0 }, |tokens| Self { tokens, requests: Self::KNOWN_REQUESTS })
    }

    /// Adds a request and returns the mean.
    fn observe(&mut self, tokens: f64) -> f64 {
        self.requests = self.requests.saturating_add(1);
        self.tokens += (tokens - self.tokens) * Self::SHARE_MIN.max(1.0 / f64::from(self.requests));
        self.tokens
    }
}

#[cfg(test)]
mod tests;
