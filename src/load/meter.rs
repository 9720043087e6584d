//! What a rank's bookings teach about its engine's speed.
//!
//! Owns which bookings are prefilled and which generate, since when, and what was learned of the rank: the rate of its
//! prefills, what a step takes, how much a request generates. Promises that each prefill counts once, when it is first
//! reported complete, that each token generated counts in one sample at most, and that what was learned is published as
//! soon as it changes. Leaves the arithmetic to [`LearnedRate`] and [`LearnedStep`]. A booking that it did not see
//! booked teaches nothing.
//!
//! A request gets one token a step, so that between two reports of its output as many steps were made as it got tokens.
//! Engines compute prompts in the same steps, which then take longer by what the prompts take. So time counts only while
//! no prefill is under way on the rank, and what is left is divided by the steps made in it. Of a prefill that nobody
//! will report, because the answer comes whole, the end is taken to be as modelled.

use std::sync::Arc;
use std::time::Duration;

use ahash::AHashMap;

use super::{EngineSpeed, LearnedRate, LearnedStep, PrefillLoadHint, RankLoad, SpeedCell, StepSample};
use crate::protocol::{BookingId, Timestamp};

/// Watches the bookings of one rank.
///
/// Each call costs one look into a map of the bookings; one that brings a sample costs what [`LearnedStep`] says.
///
/// ```
/// use std::sync::Arc;
/// use pointsman::load::{EngineSpeed, PrefillLoadHint, RankLoad, SpeedCell, SpeedMeter};
/// use pointsman::protocol::{BookingId, Timestamp};
///
/// let cell = Arc::new(SpeedCell::default());
/// let mut meter = SpeedMeter::new(Arc::clone(&cell), 64);
/// meter.booked(BookingId(1), PrefillLoadHint::new(8_000, 0, true, None), Timestamp(0));
/// meter.load_is(RankLoad { requests: 1, active_blocks: 125, prefill_tokens: 8_000 }, Timestamp(0));
/// assert_eq!(cell.work_tokens_per_second(), None);
/// let mut now = 1_000_000_000; // 8,000 tokens in a second
/// meter.reported(BookingId(1), true, 0, Timestamp(now));
/// assert!(cell.work_tokens_per_second().is_some_and(|rate| (9_000.0..10_000.0).contains(&rate)));
/// for blocks in 1..=50 {
///     now += 64 * 9_000_000; // 9 ms a token
///     meter.reported(BookingId(1), true, blocks, Timestamp(now));
/// }
/// assert!((0.0085..0.0095).contains(&cell.speed_or(EngineSpeed::prior(64)).step(1.0, 125.0)));
/// meter.ended(BookingId(1), Timestamp(now));
/// assert_eq!(cell.output_tokens(), Some(3_232.0)); // 50 blocks, and half a block
/// ```
#[derive(Debug)]
pub struct SpeedMeter {
    block_size: u32,
    rate: LearnedRate,
    step: LearnedStep,
    output: MeanOutput,
    cell: Arc<SpeedCell>,
    bookings: AHashMap<BookingId, Watched>,
    /// Prefills under way whose end will be reported.
    prefills: usize,
    /// Until when the others are under way.
    unreported_until: Timestamp,
    load: RankLoad,
    sums: Sums,
}

#[derive(Clone, Copy, Debug)]
struct Watched {
    booked: Timestamp,
    /// Work of the prefill while it is under way, in tokens without context.
    prefill: Option<u32>,
    /// Output blocks as last reported.
    blocks: u32,
    /// Where the last interval of output began, once there is any.
    seen: Option<Seen>,
}

/// Where a report of output found things.
#[derive(Clone, Copy, Debug)]
struct Seen {
    blocks: u32,
    sums: Sums,
}

/// What has come together on the rank since the meter began, as far as no prefill was under way.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    /// All time, for comparison.
    until: Timestamp,
    seconds: f64,
    /// Requests running, times seconds.
    request_seconds: f64,
    /// Blocks held, times seconds.
    block_seconds: f64,
    /// Times at which a prefill was completed and no other one was under way.
    prefill_ends: u64,
}

/// Of more than this share of a sample's time a prefill was under way: what is left says too little.
const PREFILL_SHARE_MAX: f64 = 0.5;

/// Intervals of output shorter than this teach nothing.
const INTERVAL_MIN: Duration = Duration::from_millis(5);

/// Steps made while prefills are under way, each time: half of one before the prefill begins, and at least the one that
/// computes it.
const STEPS_IN_PREFILL: f64 = 1.5;

impl SpeedMeter {
    /// Begins with what is published already, which is worth as much as any prior: the meter may be a successor's.
    /// Blocks, here and in all reports, are of `block_size` tokens.
    #[must_use]
    pub fn new(cell: Arc<SpeedCell>, block_size: u32) -> Self {
        let block_size = block_size.max(1);
        let known = cell.speed_or(EngineSpeed::prior(block_size));
        Self {
            block_size,
            rate: LearnedRate::from_prior(known.work_tokens_per_second),
            step: LearnedStep::from_known(&known, block_size),
            output: MeanOutput::from_known(cell.output_tokens()),
            cell,
            bookings: AHashMap::new(),
            prefills: 0,
            unreported_until: Timestamp::default(),
            load: RankLoad::default(),
            sums: Sums::default(),
        }
    }

    /// A request was booked, with this prefill to do.
    pub fn booked(&mut self, booking: BookingId, hint: Option<PrefillLoadHint>, now: Timestamp) {
        self.run_to(now);
        let prefill = hint.filter(|hint| hint.is_reported()).map(PrefillLoadHint::work_tokens);
        if let Some(expected) = hint.filter(|hint| !hint.is_reported()).and_then(PrefillLoadHint::expected_duration) {
            self.unreported_until = self.unreported_until.max(now) + expected;
            self.sums.prefill_ends += u64::from(self.prefills == 0);
        }
        self.prefills += usize::from(prefill.is_some());
        let before = self.bookings.insert(booking, Watched { booked: now, prefill, blocks: 0, seen: None });
        if before.is_some_and(|before| before.prefill.is_some()) {
            self.prefill_ended();
        }
    }

    /// What a request reports of itself: whether its first token is out, and its output blocks so far. Again, late, or
    /// of a request that is not known, is harmless.
    pub fn reported(&mut self, booking: BookingId, prefill_completed: bool, output_blocks: u32, now: Timestamp) {
        let is_generating = prefill_completed || output_blocks > 0;
        let Some(&Watched { booked, prefill, blocks, seen }) = self.bookings.get(&booking).filter(|_| is_generating)
        else {
            return;
        };
        if prefill.is_none() && seen.is_some() && blocks >= output_blocks {
            return; // nothing new
        }
        self.run_to(now);
        if let Some(tokens) = prefill {
            self.prefill_ended();
            // Output without a report of the first token came some time after it.
            if prefill_completed && self.learn_rate(tokens, booked, now) {
                self.cell.publish_rate(self.rate.tokens_per_second(), now);
            }
        }
        // Reports that come close together, as of one chunk of an answer, are one: the next one tells of them all.
        let is_later = seen.is_none_or(|seen| self.sums.until.since(seen.sums.until) >= INTERVAL_MIN);
        let sample = seen.filter(|_| is_later).and_then(|seen| self.sample(&seen, output_blocks));
        if sample.is_some_and(|sample| self.learn_step(&sample, now)) {
            self.cell.publish_step(&self.speed(), now);
        }
        if let Some(watched) = self.bookings.get_mut(&booking) {
            (watched.prefill, watched.blocks) = (None, watched.blocks.max(output_blocks));
            if is_later {
                watched.seen = Some(Seen { blocks: output_blocks, sums: self.sums });
            }
        }
    }

    /// Learns from a prefill. What is no longer fresh counts as a prior, as far as its age has left of it.
    fn learn_rate(&mut self, tokens: u32, booked: Timestamp, now: Timestamp) -> bool {
        if let Some(aged) = self.aged(now, 0) {
            let mut restarted = self.rate.restarted(aged.work_tokens_per_second);
            if restarted.observe(tokens, booked, now) {
                self.rate = restarted;
                return true;
            }
        }
        self.rate.observe(tokens, booked, now)
    }

    /// As [`learn_rate`](Self::learn_rate), from steps.
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

    /// The speed as it has aged, where the rate (0) or the step (1) is not fresh and the typical speed is known.
    fn aged(&self, now: Timestamp, which: usize) -> Option<EngineSpeed> {
        if self.cell.weights(now)[which] >= 1.0 {
            return None;
        }
        self.cell.typical().map(|typical| self.cell.speed_at(now, &typical))
    }

    /// A booking has ended, with the output that it last reported. If its prefill was not reported complete, nobody
    /// knows how far it came.
    pub fn ended(&mut self, booking: BookingId, now: Timestamp) {
        let Some(Watched { prefill, blocks, seen, .. }) = self.bookings.remove(&booking) else { return };
        self.run_to(now);
        if prefill.is_some() {
            self.prefill_ended();
        }
        // Who has never reported a block reports none, or ends before the first: the mean begins with those who do.
        if seen.is_some() && (blocks > 0 || self.output.requests > 0) {
            let tokens = self.output.observe((f64::from(blocks) + 0.5) * f64::from(self.block_size));
            self.cell.publish_output(tokens);
        }
    }

    /// The load of the rank from now on: to be told after each change.
    pub fn load_is(&mut self, load: RankLoad, now: Timestamp) {
        self.run_to(now);
        self.load = load;
    }

    /// Counts the time that has passed.
    fn run_to(&mut self, now: Timestamp) {
        let passed = now.since(self.sums.until.max(self.unreported_until));
        self.sums.until = self.sums.until.max(now);
        if self.prefills == 0 && !passed.is_zero() {
            let seconds = passed.as_secs_f64();
            self.sums.seconds += seconds;
            self.sums.request_seconds += seconds * f64::from(self.load.requests);
            self.sums.block_seconds += seconds * f64::from(self.load.active_blocks);
        }
    }

    fn prefill_ended(&mut self) {
        self.prefills -= 1;
        self.sums.prefill_ends += u64::from(self.prefills == 0);
    }

    /// The steps from a report to this one, if enough of the time was theirs.
    fn sample(&self, seen: &Seen, output_blocks: u32) -> Option<StepSample> {
        // A block is reported with its last token. Before the first, the first token was.
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

    /// What is learned so far; what is not, as it was assumed.
    #[must_use]
    pub fn speed(&self) -> EngineSpeed {
        let work_tokens_per_second = self.rate.tokens_per_second();
        self.step.on(EngineSpeed { work_tokens_per_second, ..EngineSpeed::prior(self.block_size) })
    }

    /// What is learned of prefills.
    #[must_use]
    pub fn rate(&self) -> &LearnedRate {
        &self.rate
    }

    /// What is learned of steps.
    #[must_use]
    pub fn step(&self) -> &LearnedStep {
        &self.step
    }

    /// Prefills under way whose end will be reported.
    #[must_use]
    pub fn under_way(&self) -> usize {
        self.prefills
    }

    /// Bookings watched.
    #[must_use]
    pub fn watched(&self) -> usize {
        self.bookings.len()
    }

    /// For tests.
    ///
    /// # Panics
    /// If a number is out of bounds, a count is off, or what is published is another.
    pub fn check_invariants(&self) {
        self.rate.check_invariants();
        self.step.check_invariants();
        let prefills = self.bookings.values().filter(|watched| watched.prefill.is_some()).count();
        assert_eq!(prefills, self.prefills, "prefills under way");
        let Sums { seconds, request_seconds, block_seconds, .. } = self.sums;
        assert!([seconds, request_seconds, block_seconds].iter().all(|sum| sum.is_finite() && *sum >= 0.0));
        // What no sample has touched is not published: others know better what is usual.
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

/// The mean output of a request in tokens, with weights that halve every 64 requests.
#[derive(Clone, Copy, Debug)]
struct MeanOutput {
    tokens: f64,
    requests: u32,
}

impl MeanOutput {
    /// The least share of a request in the mean: 1 − 2^(−1/64).
    const SHARE_MIN: f64 = 0.010_772;

    /// Requests that a predecessor's mean is worth.
    const KNOWN_REQUESTS: u32 = 64;

    fn from_known(tokens: Option<f64>) -> Self {
        tokens.map_or(Self { tokens: 0.0, requests: 0 }, |tokens| Self { tokens, requests: Self::KNOWN_REQUESTS })
    }

    /// The mean with one more request.
    fn observe(&mut self, tokens: f64) -> f64 {
        self.requests = self.requests.saturating_add(1);
        self.tokens += (tokens - self.tokens) * Self::SHARE_MIN.max(1.0 / f64::from(self.requests));
        self.tokens
    }
}

#[cfg(test)]
mod tests;
