//! Audit: comparison of a rank's index contents with the cache of its engine.
//!
//! An engine that supports audits replies to two requests at its replay socket: one for the [digest](BlockDigest) of its
//! cache, one for the names of its blocks. Each reply states a position, the number of the next event message, and
//! describes the cache after exactly the messages before it. The index is compared at the same position, so events in
//! flight cause no difference: digests of the index are sampled after each message that is applied during the request,
//! and names that changed during the request are excluded until the next audit.
//!
//! Equal digests prove equal contents. Otherwise the names are compared, and a [`Difference`] lists them. An engine
//! without support replies like to a replay without messages, and its replay buffer is compared.
//!
//! A reply with the replay buffer is not always whole: a ROUTER socket drops messages in the middle, or the end mark, if
//! the reader is slower than the engine writes. Its beginning arrives, so the rest is requested again from the first
//! missing message. Only consecutive messages up to the position of the index at the first request are evidence.
//!
//! A correction requires two audits with the same finding, because each reply is a single observation.
//!
//! The owner sends the requests, queries the index and heals. This module has no clock and no I/O.

mod contents;
mod result;
mod ring;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

pub use contents::{BlockName, DIGEST_REQUEST, EngineContents, NAMES_REQUEST};
pub use result::{AuditCause, AuditResult, Difference};

use super::Note;
use crate::index::BlockDigest;
use crate::protocol::{KvEvent, RouterEvent, Timestamp};
use ring::{RingContents, names_of};

/// Maximum duration of one request and its comparison.
const DURATION_MAX: Duration = Duration::from_secs(10);

/// Number of intervals between comparisons of the replay buffer, which reads all of it.
const RING_INTERVALS: u32 = 10;

/// Maximum time between messages of a replay buffer, after which the rest is requested again.
const RING_IDLE_MAX: Duration = Duration::from_secs(5);

/// Maximum number of requests for one replay buffer. The high-water mark of ZeroMQ lets 1,000 messages pass for each.
const RING_REQUESTS_MAX: u32 = 16;

/// Delay of the audit after a finding or a correction.
const FOLLOW_UP_AFTER: Duration = Duration::from_secs(1);

/// Maximum number of such audits until index and engine are equal. Later ones keep the interval.
const FOLLOW_UPS_MAX: u32 = 2;

/// Number of consecutive inconclusive audits that the owner should report.
const INCONCLUSIVE_NOTICE: u32 = 3;

/// Maximum number of samples. More messages during one request make an audit inconclusive.
const SAMPLES_MAX: usize = 4096;

/// Share of the engine's blocks, 1/16, from which missing blocks justify a replay of the whole stream.
const RESYNC_SHARE: usize = 16;

/// Delays between replays because of missing blocks: doubled up to the maximum, in case a replay does not help.
const RESYNC_AFTER_MIN: Duration = Duration::from_secs(60);
const RESYNC_AFTER_MAX: Duration = Duration::from_secs(3600);

/// Correction of a difference.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Heal {
    /// Remove these blocks from the index.
    Forget(Vec<BlockName>),
    /// Drop the rank's blocks and replay the stream.
    Resync,
    /// Nothing: few blocks are missing, and the engine stores or evicts them in time. A replay could lose more.
    Wait,
}

/// Next step of an audit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AuditStep {
    /// Nothing until a reply or another message.
    Wait,
    /// Send this request to the replay socket.
    Request(u64),
    /// Query the index for the names of the rank, and call [`Audit::compare`].
    QueryNames,
    /// The audit has ended.
    Ended(AuditResult),
}

/// Audits of one rank, one at a time.
///
/// ```
/// use std::time::Duration;
/// use pointsman::internals::index::BlockDigest;
/// use pointsman::EngineContents;
/// use pointsman::internals::ingest::{Audit, AuditResult, AuditStep, DIGEST_REQUEST};
/// use pointsman::protocol::Timestamp;
///
/// let (digest, now) = (BlockDigest { sum: 7, blocks: 1 }, Timestamp::default());
/// let mut audit = Audit::new(Duration::from_secs(60), now);
/// assert_eq!(audit.begin(now, 4, digest), AuditStep::Request(DIGEST_REQUEST));
/// audit.replied(5, EngineContents::Digest(digest));
/// assert_eq!(audit.step(now, 4), AuditStep::Wait, "message 4 is in flight");
/// audit.applied(5, &[], Some(digest));
/// assert_eq!(audit.step(now, 5), AuditStep::Ended(AuditResult::Equal));
/// ```
#[derive(Clone, Debug)]
pub struct Audit {
    interval: Duration,
    due: Timestamp,
    stage: AuditStage,
    last_equal: Option<Timestamp>,
    /// Whether events were lost since the index was last known to be complete, so that missing blocks are expected.
    is_incomplete: bool,
    /// The last finding, until another audit confirms a part of it or index and engine are equal.
    finding: Option<Difference>,
    follow_ups: u32,
    /// Consecutive inconclusive audits.
    inconclusive_audits: u32,
    /// Blocks of the last comparison that a replay of the stream would not restore.
    resync_loses: usize,
    resync_allowed: Timestamp,
    resync_after: Duration,
}

#[derive(Clone, Debug)]
enum AuditStage {
    Idle,
    Failed(AuditCause),
    Digest {
        started: Timestamp,
        /// Digests of the index by the number of the next message.
        samples: BTreeMap<u64, BlockDigest>,
        reply: Option<(u64, BlockDigest)>,
    },
    Names {
        started: Timestamp,
        /// The number of the next message at the request.
        from: u64,
        /// Names in messages applied since the request.
        touched: BTreeSet<BlockName>,
        reply: Option<(u64, BTreeSet<BlockName>)>,
    },
    Ring {
        /// Time at which the present reply counts as ended.
        due: Timestamp,
        touched: BTreeSet<BlockName>,
        ring: RingContents,
        /// The number of the next message at the first request, to which the ring is compared.
        end: u64,
        /// First message of the present request, and the number of requests.
        requested: u64,
        requests: u32,
        /// Whether the present reply has ended or has a gap.
        has_ended: bool,
    },
}

impl Audit {
    /// Audits at an interval; the first one is due after half of it.
    #[must_use]
    pub fn new(interval: Duration, now: Timestamp) -> Self {
        Self {
            interval,
            due: now + interval / 2,
            stage: AuditStage::Idle,
            last_equal: None,
            is_incomplete: false,
            finding: None,
            follow_ups: FOLLOW_UPS_MAX,
            inconclusive_audits: 0,
            resync_loses: 0,
            resync_allowed: now,
            resync_after: RESYNC_AFTER_MIN,
        }
    }

    /// Time of the next [`Audit::begin`], or of the timeout of a running audit; `None` if audits are disabled.
    #[must_use]
    pub fn due(&self) -> Option<Timestamp> {
        match &self.stage {
            AuditStage::Idle => Some(self.due).filter(|_| !self.interval.is_zero()),
            AuditStage::Failed(_) => Some(Timestamp::default()),
            AuditStage::Digest { started, .. } | AuditStage::Names { started, .. } => Some(*started + DURATION_MAX),
            AuditStage::Ring { due, .. } => Some(*due),
        }
    }

    /// Time of the last audit without a difference.
    #[must_use]
    pub fn last_equal(&self) -> Option<Timestamp> {
        self.last_equal
    }

    /// Whether the last audit completed a series of inconclusive ones, which should be reported once.
    #[must_use]
    pub fn is_notice_due(&self) -> bool {
        self.inconclusive_audits == INCONCLUSIVE_NOTICE
    }

    /// Whether an audit is running.
    #[must_use]
    pub fn is_running(&self) -> bool {
        !matches!(self.stage, AuditStage::Idle)
    }

    /// Whether the digest of the index is needed after each applied message.
    #[must_use]
    pub fn samples(&self) -> bool {
        matches!(self.stage, AuditStage::Digest { .. })
    }

    /// Postpones an audit that is due while no comparison is possible.
    pub fn postpone(&mut self, now: Timestamp) {
        self.due = now + self.interval;
    }

    /// Begins an audit of a caught-up stream whose next message is `next`, with the digest of the index at this position.
    pub fn begin(&mut self, now: Timestamp, next: u64, digest: BlockDigest) -> AuditStep {
        self.postpone(now);
        self.stage = AuditStage::Digest { started: now, samples: BTreeMap::from([(next, digest)]), reply: None };
        AuditStep::Request(DIGEST_REQUEST)
    }

    /// Records the events of an applied message, and the digest of the index after it if [`Audit::samples`].
    pub fn applied(&mut self, next: u64, events: &[RouterEvent], digest: Option<BlockDigest>) {
        match &mut self.stage {
            AuditStage::Idle | AuditStage::Failed(_) => {}
            AuditStage::Digest { samples, .. } => match digest {
                Some(digest) if samples.len() < SAMPLES_MAX => drop(samples.insert(next, digest)),
                Some(_) | None => {}
            },
            AuditStage::Names { touched, .. } | AuditStage::Ring { touched, .. } => {
                for event in events {
                    touched.extend(names_of(event));
                }
                if events.iter().any(|event| matches!(event.data, KvEvent::Cleared | KvEvent::TierCleared)) {
                    self.fail(AuditCause::Changed);
                }
            }
        }
    }

    /// Ends a running audit without a result: the stream was interrupted, or the index lost its contents.
    pub fn abort(&mut self) {
        (self.stage, self.finding) = (AuditStage::Idle, None);
    }

    /// Makes a running audit inconclusive.
    pub fn fail(&mut self, cause: AuditCause) {
        if self.is_running() {
            self.stage = AuditStage::Failed(cause);
        }
    }

    /// Records a note of the source.
    pub fn noted(&mut self, note: Note) {
        match note {
            Note::Cold => self.is_incomplete = true,
            // The stream is read from its beginning; otherwise the rank becomes cold again.
            Note::Incarnation => self.is_incomplete = false,
            _ => {}
        }
    }

    /// Records the reply of the engine, at the position before message `next`.
    pub fn replied(&mut self, next: u64, contents: EngineContents) {
        match (&mut self.stage, contents) {
            (AuditStage::Digest { reply, .. }, EngineContents::Digest(digest)) => *reply = Some((next, digest)),
            (AuditStage::Names { reply, .. }, EngineContents::Names(names)) => *reply = Some((next, names)),
            _ => self.fail(AuditCause::BrokenReply),
        }
    }

    /// Records a reply without contents: the engine does not support audits. Its replay buffer is compared instead, with
    /// the index at message `next`, the next to apply.
    pub fn unsupported(&mut self, now: Timestamp, next: u64) -> AuditStep {
        self.due = now + self.interval * RING_INTERVALS;
        self.stage = AuditStage::Ring {
            due: now + DURATION_MAX,
            touched: BTreeSet::new(),
            ring: RingContents::default(),
            end: next,
            requested: 0,
            requests: 1,
            has_ended: false,
        };
        AuditStep::Request(0)
    }

    /// Whether the replay buffer of the engine is read.
    #[must_use]
    pub fn reads_ring(&self) -> bool {
        matches!(self.stage, AuditStage::Ring { .. })
    }

    /// Records a message of the replay buffer. Only the next message is decoded; `None` from `decode` if it is
    /// unreadable.
    pub fn ring_message(&mut self, now: Timestamp, sequence: u64, decode: impl FnOnce() -> Option<Vec<RouterEvent>>) {
        let AuditStage::Ring { due, ring, end, has_ended, .. } = &mut self.stage else { return };
        if *has_ended || sequence < ring.next() || ring.next() >= *end {
            return;
        }
        if !ring.continues_with(sequence) || sequence >= *end {
            *has_ended = true; // a gap
            return;
        }
        match decode() {
            Some(events) if ring.add(sequence, &events) => *due = now + RING_IDLE_MAX,
            Some(_) => self.fail(AuditCause::TooLarge),
            None => self.fail(AuditCause::RejectedEvents),
        }
    }

    /// Records the end of a reply with the replay buffer.
    pub fn ring_ended(&mut self) {
        if let AuditStage::Ring { has_ended, .. } = &mut self.stage {
            *has_ended = true;
        }
    }

    /// The next step, with the number of the next message to apply.
    pub fn step(&mut self, now: Timestamp, next: u64) -> AuditStep {
        let is_late = self.is_running() && self.due().is_some_and(|end| end <= now);
        match &self.stage {
            AuditStage::Idle => AuditStep::Wait,
            AuditStage::Failed(cause) => self.inconclusive(now, *cause),
            AuditStage::Digest { samples, reply: Some((at, digest)), .. } if next >= *at => match samples.get(at) {
                Some(sample) if sample == digest => AuditStep::Ended(self.end(now, AuditResult::Equal)),
                Some(_) => {
                    self.stage = AuditStage::Names { started: now, from: next, touched: BTreeSet::new(), reply: None };
                    AuditStep::Request(NAMES_REQUEST)
                }
                None => self.inconclusive(now, AuditCause::Changed),
            },
            AuditStage::Names { reply: Some((at, _)), from, .. } if at < from => {
                self.inconclusive(now, AuditCause::IncompleteReply)
            }
            AuditStage::Names { reply: Some((at, _)), .. } if next >= *at => AuditStep::QueryNames,
            AuditStage::Ring { end, ring, .. } if ring.next() >= *end => match ring.is_empty() {
                true => AuditStep::Ended(self.end(now, AuditResult::Unsupported)),
                false => AuditStep::QueryNames,
            },
            AuditStage::Ring { has_ended, .. } if *has_ended || is_late => self.continue_ring(now),
            _ if is_late => self.inconclusive(now, AuditCause::NoReply),
            AuditStage::Digest { .. } | AuditStage::Names { .. } | AuditStage::Ring { .. } => AuditStep::Wait,
        }
    }

    /// Requests the rest of the replay buffer after an incomplete reply, if that reply had new messages.
    fn continue_ring(&mut self, now: Timestamp) -> AuditStep {
        let AuditStage::Ring { due, ring, requested, requests, has_ended, .. } = &mut self.stage else {
            return AuditStep::Wait;
        };
        if ring.next() > *requested && *requests < RING_REQUESTS_MAX {
            (*requested, *requests, *has_ended, *due) = (ring.next(), *requests + 1, false, now + DURATION_MAX);
            return AuditStep::Request(*requested);
        }
        let cause = if *has_ended || ring.next() > 0 { AuditCause::IncompleteReply } else { AuditCause::NoReply };
        self.inconclusive(now, cause)
    }

    /// Compares the names of the index with those of the engine.
    pub fn compare(&mut self, now: Timestamp, index: &BTreeSet<BlockName>) -> AuditResult {
        let is_same = |touched: &BTreeSet<BlockName>, name: &BlockName| touched.contains(name);
        let (stale, mut missing): (Vec<_>, Vec<_>) = match &self.stage {
            AuditStage::Names { touched, reply: Some((_, engine)), .. } => {
                self.resync_loses = 0;
                (
                    index.difference(engine).filter(|name| !is_same(touched, name)).copied().collect(),
                    engine.difference(index).filter(|name| !is_same(touched, name)).copied().collect(),
                )
            }
            AuditStage::Ring { touched, ring, .. } => {
                self.resync_loses = index.iter().filter(|name| ring.is_older(**name)).count();
                let stale = index.iter().filter(|name| ring.is_gone(**name) && !is_same(touched, name));
                let missing = ring.held().filter(|name| !index.contains(name) && !is_same(touched, name));
                (stale.copied().collect(), missing.collect())
            }
            _ => return AuditResult::Inconclusive(AuditCause::Changed),
        };
        let is_ring = self.reads_ring();
        if self.is_incomplete {
            missing.clear();
        }
        let result = match (stale.is_empty() && missing.is_empty(), is_ring) {
            (false, _) => self.confirm(Difference { stale, missing, since: self.last_equal }),
            (true, true) => AuditResult::Equal,
            // The names that differ have changed since, or are expected to be missing.
            (true, false) => AuditResult::Inconclusive(AuditCause::Changed),
        };
        self.end(now, result)
    }

    /// The part of a finding that the previous finding confirms.
    fn confirm(&mut self, found: Difference) -> AuditResult {
        let both = |before: &[BlockName], now: &[BlockName]| -> Vec<BlockName> {
            let before: BTreeSet<&BlockName> = before.iter().collect();
            now.iter().filter(|name| before.contains(name)).copied().collect()
        };
        if let Some(before) = self.finding.take() {
            let (stale, missing) = (both(&before.stale, &found.stale), both(&before.missing, &found.missing));
            if !(stale.is_empty() && missing.is_empty()) {
                return AuditResult::Different(Difference { stale, missing, since: found.since });
            }
        }
        self.finding = Some(found);
        AuditResult::Inconclusive(AuditCause::Unconfirmed)
    }

    /// Schedules the next audit soon, unless earlier ones have not led to equal contents.
    fn follow_up(&mut self, now: Timestamp) {
        if self.follow_ups > 0 {
            self.follow_ups -= 1;
            self.due = self.due.min(now + FOLLOW_UP_AFTER);
        }
    }

    /// The correction of a difference at an index with this number of blocks. The next audit follows soon.
    pub fn heal(&mut self, now: Timestamp, difference: &Difference, index_blocks: usize) -> Heal {
        let blocks = (index_blocks + difference.missing.len()).saturating_sub(difference.stale.len());
        let missing = difference.missing.len();
        let is_large = missing > self.resync_loses && missing * RESYNC_SHARE >= blocks;
        if is_large && self.resync_allowed <= now {
            self.resync_allowed = now + self.resync_after;
            self.resync_after = (self.resync_after * 2).min(RESYNC_AFTER_MAX);
            self.follow_up(now);
            return Heal::Resync;
        }
        if difference.stale.is_empty() {
            return Heal::Wait;
        }
        self.follow_up(now);
        Heal::Forget(difference.stale.clone())
    }

    fn inconclusive(&mut self, now: Timestamp, cause: AuditCause) -> AuditStep {
        AuditStep::Ended(self.end(now, AuditResult::Inconclusive(cause)))
    }

    fn end(&mut self, now: Timestamp, result: AuditResult) -> AuditResult {
        self.stage = AuditStage::Idle;
        match result {
            AuditResult::Equal => {
                (self.last_equal, self.is_incomplete, self.resync_after) = (Some(now), false, RESYNC_AFTER_MIN);
                (self.finding, self.follow_ups, self.inconclusive_audits) = (None, FOLLOW_UPS_MAX, 0);
            }
            AuditResult::Different(_) => self.inconclusive_audits = 0,
            AuditResult::Inconclusive(cause) => {
                self.inconclusive_audits += 1;
                if cause == AuditCause::Unconfirmed {
                    self.follow_up(now);
                }
            }
            AuditResult::Unsupported => {}
        }
        result
    }
}
